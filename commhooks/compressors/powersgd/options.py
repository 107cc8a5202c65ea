"""Define the options of PowerSGD and batched PowerSGD."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Union

from commhooks.options import HookConfig

__all__ = ["BatchedPowerSGD", "PowerSGD"]


@dataclass(frozen=True, kw_only=True)
class PowerSGD(HookConfig):
    """Sends each matrix of gradients as two thin factors, with error feedback.

    Args:
        matrix_approximation_rank: rank of the factors, usually 1 to 4. A higher rank is closer to
            all-reduce and sends more.
        start_powerSGD_iter: number of steps with plain all-reduce before compression begins (int),
            or a fraction of the run (float between 0 and 1, exclusive). None: 10 % of the run, at
            most 1000 steps; 100 steps if the length of the run is unknown.
        min_compression_rate: leave parameters uncompressed that would shrink by less than this
            factor.
        use_error_feedback: add the compression error to the next gradient. Leave it on.
        warm_start: start from the Q of the previous step. Leave it on.
        orthogonalization_epsilon: accepted for compatibility with torch, without effect: no column
            is divided by zero.
        random_seed: seed of the first Q.
        compression_stats_logging_frequency: steps between two log lines with compression
            statistics.
        batch_tensors_with_same_shape: on an accelerator, process all matrices of a bucket with the
            same shape at once. This takes fewer and larger kernels, and another copy of their
            gradients in float32. Changes results by rounding, and has no effect on the CPU.
        exclude: globs on parameter names ("*embed*", "head.?.weight"; case-sensitive) that are
            never compressed. Not for batched PowerSGD.
    """

    hook_name: ClassVar[str] = "powerSGD"
    start_option: ClassVar[str | None] = "start_powerSGD_iter"

    matrix_approximation_rank: int = 1
    # `Union` because OmegaConf 2.4 does not read `int | float | None`. Not Optional[Union[int,
    # float]], because typing caches unions regardless of order: an annotation in another module
    # could then decide the order of int and float.
    start_powerSGD_iter: Union[int, float, None] = None  # noqa: UP007
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    batch_tensors_with_same_shape: bool = False
    exclude: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            self.matrix_approximation_rank >= 1, "matrix_approximation_rank", "at least 1"
        )
        self._require(
            math.isfinite(self.min_compression_rate) and self.min_compression_rate > 0,
            "min_compression_rate",
            "a positive number",
        )
        self._require(
            math.isfinite(self.orthogonalization_epsilon) and self.orthogonalization_epsilon >= 0,
            "orthogonalization_epsilon",
            "0 or a small positive number",
        )


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(PowerSGD):
    """Compresses each bucket as one square matrix padded with zeros.

    It computes fewer and larger products than `PowerSGD`, and is usually much less accurate; try
    `PowerSGD` first. The arguments are the same, except that `min_compression_rate` has no effect
    and `exclude` must be empty.
    """

    hook_name: ClassVar[str] = "batched_powerSGD"
    without_use: ClassVar[tuple[str, ...]] = ("min_compression_rate", "exclude")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            not self.exclude, "exclude", "none: whole buckets are compressed here; use PowerSGD"
        )


COMPRESSOR_PATHS: dict[type[HookConfig], str] = {
    PowerSGD: "commhooks.compressors.powersgd.compressor:PowerSGDCompressor",
    BatchedPowerSGD: "commhooks.compressors.powersgd.batched:BatchedPowerSGDCompressor",
}
