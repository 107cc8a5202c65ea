"""What the last bits of torch's floating-point results depend on.

Products of matrices and orthonormalisation sum in an order that depends on the processor, on the version of torch and,
on the CPU, on the number of threads.
"""

import platform
from pathlib import Path

import torch


def arithmetic_of(device: torch.device) -> str:
    """A line that two machines share if torch computes equal bits on them, for example "torch 2.13.0+cpu, AMD EPYC 7763
    64-Core Processor, AVX2, 8 threads"."""
    parts = [f"torch {torch.__version__}"]
    if device.type == "cpu":
        threads = torch.get_num_threads()
        parts += [_processor(), torch.backends.cpu.get_cpu_capability()]
        parts += [f"{threads} thread{'s' if threads > 1 else ''}"]
    elif device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        parts += [torch.cuda.get_device_name(device), f"capability {major}.{minor}"]
    else:
        parts += [device.type]
    return ", ".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
