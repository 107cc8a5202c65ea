"""A description of the machine, for the line under each table of figures. Needs only torch."""

import contextlib
import datetime
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Return names and versions; for CUDA only if torch can use a device."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu
        )
    on_cuda = torch.cuda.is_available()
    found: dict[str, Any] = {
        "cpu": cpu,
        "caches": _caches(),
        "cores": (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "gpu": torch.cuda.get_device_name() if on_cuda else None,
        "cuda": torch.version.cuda if on_cuda else None,
        "driver": driver() if on_cuda else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    with contextlib.suppress(OSError, AttributeError):
        found["load_before"] = os.getloadavg()[0]
    return found


def _caches() -> str | None:
    """Return the caches of one core on Linux, such as "L1d 48K, L2 1024K, L3 32768K" (other cores
    may share them).
    """
    found = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
            if kind != "Instruction":
                found.append(f"L{level}{'d' if kind == 'Data' else ''} {size}")
    return ", ".join(found) or None


def driver() -> str:
    """Return the version of NVIDIA's driver, for which torch has no public function."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            if done.stdout.strip():
                return done.stdout.splitlines()[0].strip()
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found.group()
    return "unknown"


def in_words(at: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in at.items() if value is not None)


def no_device() -> str:
    """Return why nothing can run on CUDA here, in one sentence; "" if a device works."""
    if torch.version.cuda is None:
        return (
            f"This torch ({torch.__version__}) was built without CUDA: install one with it, or name"
            " its Python."
        )
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else ""
        return f"torch {torch.__version__} finds no CUDA device{why}."
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        return (
            f"torch {torch.__version__} cannot use {torch.cuda.get_device_name()}:"
            f" {str(error).splitlines()[0]}"
        )
    return ""
