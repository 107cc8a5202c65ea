"""Runs Triton's kernels on CPU tensors, in Triton's interpreter, and compares them with torch's
operators; or compiles them for NVIDIA GPUs and prints the instructions on floating-point numbers.
`test_triton_bits.py` starts it.

    TRITON_INTERPRET=1 python -m tests.compressors.quantized.triton_bits kernels|hooks|faults
    python -m tests.compressors.quantized.triton_bits instructions
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
import triton

from commhooks import Int4Compress, Int8Compress
from commhooks.compressors.quantized import compressor as quantized
from commhooks.compressors.quantized import triton_kernel
from commhooks.compressors.quantized.kernels import TorchKernel
from commhooks.compressors.quantized.mean import BlockCode
from commhooks.compressors.quantized.triton_kernel import TritonKernel, build, results_of
from commhooks.errors import HookConfigError
from commhooks.registry import compressor_of
from commhooks.testing import simulated_ranks
from tests.support.models import masks
from tests.support.simulation import SimulatedRanks

CPU = torch.device("cpu")
CODES = [BlockCode(8, 256), BlockCode(4, 128), BlockCode(8, 48), BlockCode(4, 16)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def round_bfloat16() -> None:
    """Convert as torch and devices do; Triton 3.9's interpreter truncates to bfloat16."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    real = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, to: Any) -> Any:
        numbers = torch.from_numpy(src.data.copy())
        if (src.dtype.scalar, to.scalar) == (tl.float32, tl.bfloat16):
            return TensorHandle(numbers.bfloat16().view(torch.uint16).numpy(), to.scalar)
        if (src.dtype.scalar, to.scalar) == (tl.bfloat16, tl.float32):
            return TensorHandle(numbers.view(torch.bfloat16).float().numpy(), to.scalar)
        return real(self, src, to)

    InterpreterBuilder.cast_impl = cast_impl


def kernels() -> list[str]:
    """Cases in which the bits differ."""
    return [
        f"{code} {dtype} {ranks} ranks"
        for code in CODES
        for dtype in DTYPES
        for ranks in (1, 3, 6)
        if (code.block_size < 100 or ranks == 3)
        and results_of(TorchKernel, CPU, dtype, code, ranks)
        != results_of(TritonKernel, CPU, dtype, code, ranks)
    ]


def _trained(config: Any, world_size: int, dtype: torch.dtype, kernel: type) -> list[torch.Tensor]:
    """Return buckets and residuals of four steps, of which some are not finite or incomplete."""
    shapes = {"a": (3, 33), "bias": (5,), "b": (16, 16), "idle": (5, 20)}
    parameters = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    ranks = SimulatedRanks(lambda: compressor_of(config)(config), world_size, parameters)
    results = []
    info = simulated_ranks.StepInfo
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        buckets = [
            torch.randn(ranks.layout.numel, generator=generator).to(dtype)
            for _ in range(world_size)
        ]
        if step == 1:
            buckets[-1][100] = float("nan")
        for bucket in buckets[: world_size if step == 2 else 1]:
            ranks.layout.slots[3].of(bucket).zero_()
        factor = 0.7 if step == 2 else 1.0
        with mock.patch.object(
            simulated_ranks, "StepInfo", lambda *a, f=factor, **k: info(*a, **k, residual_factor=f)
        ):
            with torch.no_grad():
                assert ranks.step(buckets) == (step != 1)
        assert isinstance(ranks._works[0]._kernel, kernel), ranks._works[0]._kernel
        fields = [state["residual"] for state in ranks.states] if config.use_error_feedback else []
        results += [torch.where(bucket.isnan(), torch.nan, bucket) for bucket in buckets]
        results += [residual.clone() for of_rank in fields for residual in of_rank.values()]
    return results


def hooks() -> list[str]:
    """Cases in which whole exchanges differ."""
    differing = []
    for make in (Int8Compress, Int4Compress):
        for feedback, dtype, world_size in ((True, torch.float32, 3), (False, torch.bfloat16, 2)):
            config = make(block_size=32, use_error_feedback=feedback)
            expected = _trained(config, world_size, dtype, TorchKernel)
            with mock.patch.object(quantized, "runs_triton", lambda device: True):
                results = _trained(config, world_size, dtype, TritonKernel)
            pairs = zip(results, expected, strict=True)
            if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
                differing.append(f"{config} {dtype}")
    return differing


def messages_of(build: Any, place: Any, name: str, faulty: Iterable[Any]) -> list[str]:
    """What `build` says with each of `faulty` in the place of a function: an error, or an id."""
    messages = []
    for replacement in faulty:
        build.cache_clear()
        with mock.patch.object(place, name, replacement):
            try:
                messages.append(build(CPU, torch.float32, BlockCode(8, 16)))
            except HookConfigError as error:
                messages.append(str(error))
    return messages


def faults() -> list[str]:
    """What `build` says of kernels that are wrong, or cannot run."""

    # Each change is one that a kernel which computes something else would make.
    def launched(change: Callable[[dict[str, Any]], Any]) -> Any:
        real = TritonKernel._launch
        return lambda self, kernel, *a, **options: (
            change(options) or real(self, kernel, *a, **options)
        )

    changes = (
        lambda options: options.update(LEVELS=126) if "LEVELS" in options else None,
        lambda options: options.update(SCALED=False) if "SCALED" in options else None,
        lambda options: options.update(FEEDBACK=False) if "FEEDBACK" in options else None,
        lambda options: options.update(RANKS=4) if "HALVINGS" in options else None,
        lambda options: options["unknown"],
    )
    return messages_of(build, TritonKernel, "_launch", map(launched, changes))


def instructions() -> list[str]:
    pointers = {"flags": "*u8", "codes": "*u8", "factor": "*fp32", "good": "*i1", "count": "*i32"}
    pointers |= dict.fromkeys(("first", "tensor", "places", "owned"), "*i64")
    pointers |= dict.fromkeys(("delta", "residual", "scales"), "*fp32")
    shared_options = {
        "LEVELS": 127,
        "MOST": 1e30,
        "TINY": 1e-38,
        "RANKS": 13,
        "PADDED": 32,
        "ROWS": 8,
        "HALVINGS": 4,
    }
    shared_options |= {"TILE": 128, "FEEDBACK": True, "SCALED": True, "WIDTH": 32}
    instructions: set[str] = set()
    for kernel in (
        triton_kernel._quantise,
        triton_kernel._quantise_mean,
        triton_kernel._average,
        triton_kernel._store,
    ):
        for bits, flat in ((8, "*bf16"), (4, "*fp32")):
            instructions |= compiled(
                kernel, pointers | {"flat": flat}, {**shared_options, "BITS": bits}
            )
    return sorted(instructions)


def compiled(kernel: Any, pointers: dict[str, str], options: dict[str, Any]) -> set[str]:
    """Return the floating-point instructions of a kernel, for two kinds of NVIDIA GPUs. `pointers`:
    the types of arguments; the others are integers or, in capitals, `options`.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: options[name] for name in kernel.arg_names if name in options}
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    found: set[str] = set()
    for capability in (80, 90):
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        target = GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options=triton_kernel._ROUNDED)
        pattern = r"^\s+(?:@\S+ )?([a-z]\S*\.b?f(?:16|32|64)\S*)"
        found |= set(re.findall(pattern, made.asm["ptx"], re.MULTILINE))
    return found


def run_one(name: str, *tasks: Callable[[], list[str]]) -> None:
    """Run the task with this name, and print its result as JSON."""
    interpreted = name != "instructions"
    if interpreted:
        round_bfloat16()
    with masks(interpreted):
        print(json.dumps({task.__name__: task for task in tasks}[name]()))


if __name__ == "__main__":
    run_one(sys.argv[1], kernels, hooks, faults, instructions)
