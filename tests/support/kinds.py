"""The compressors for which every guarantee is tested: the built-in ones, their variants and
wrappers, and the example of a user's own. A new compressor is added to `KINDS`.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.support.kernels import computing_with
from tests.support.training import Run

START = 2
RANDOM_K = "examples.random_k:RandomKCompressor"
AUTO = "tests.support.prescribed_auto:PrescribedAutoCompressor"
POWERSGD = {"matrix_approximation_rank": 2, "start_powerSGD_iter": START}
QUANTIZED = {"block_size": 32, "start_iter": START}


@dataclass(frozen=True)
class Kind:
    hook: str
    options: dict[str, Any] = field(default_factory=dict)
    wrapper: str | None = None
    learns: bool = True
    layouts_matter: bool = False
    """It compresses whole buckets."""
    pads: bool = False
    """It sends to each rank up to a block per parameter, and 64 bytes per bucket, more than is
    planned.
    """
    keeps_residual: bool = True
    kernel: str = "native"

    def new(self, **more: Any) -> Run:
        with computing_with(self.kernel):
            return Run.new(
                hook=self.hook, hook_options=self.options or None, wrapper=self.wrapper, **more
            )


KINDS = {
    "allreduce": Kind("allreduce", learns=False),
    "fp16": Kind("fp16", learns=False),
    "bf16": Kind("bf16", learns=False),
    "powerSGD": Kind("powerSGD", POWERSGD),
    "powerSGD, bf16 wrapper": Kind("powerSGD", POWERSGD, "bf16"),
    "powerSGD, fp16 wrapper": Kind("powerSGD", POWERSGD, "fp16"),
    "powerSGD, torch": Kind("powerSGD", POWERSGD, kernel="torch"),
    "int8, native": Kind("int8", QUANTIZED, pads=True),
    "int8, torch": Kind("int8", QUANTIZED, pads=True, kernel="torch"),
    "int8, fp16 wrapper": Kind("int8", QUANTIZED, "fp16", pads=True),
    "int4, native": Kind("int4", QUANTIZED, pads=True),
    "int4, torch": Kind("int4", QUANTIZED, pads=True, kernel="torch"),
    "int4, bf16 wrapper": Kind("int4", QUANTIZED, "bf16", pads=True),
    "int4, no error feedback": Kind(
        "int4", QUANTIZED | {"use_error_feedback": False}, pads=True, keeps_residual=False
    ),
    "batched": Kind("batched_powerSGD", POWERSGD, layouts_matter=True),
    "batched, torch": Kind("batched_powerSGD", POWERSGD, layouts_matter=True, kernel="torch"),
    "random_k": Kind(RANDOM_K, {"share": 0.2, "start_iter": START}),
    "auto, chooses int8": Kind(AUTO, pads=True),
    "auto, chooses powerSGD": Kind(AUTO, {"quality": "low rank"}),
}
