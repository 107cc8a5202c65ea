"""The options of PowerSGD."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Union

from commhooks.compressors.hook_config import HookConfig


@dataclass(frozen=True, kw_only=True)
class PowerSGD(HookConfig):
    """Low-rank gradients with error feedback, per parameter.

    Args:
        matrix_approximation_rank: rank of the factors; 1 to 4 is usual, more is closer to all-reduce and sends more. Or
            ranks by globs on parameter names, as in `{"*attention*": 8, "*": 2}`: the first that matches counts, and
            what matches none is not compressed. Not for batched PowerSGD.
        start_powerSGD_iter: plain all-reduce for so many steps first. An int is a number of steps, a float strictly
            between 0 and 1 a fraction of the run; None is 10 % of the run, at most 1000 steps, and 1000 where the
            length of the run is unknown.
        min_compression_rate: parameters that would shrink by less than this factor are not compressed.
        use_error_feedback: add what compression lost to the next gradient. Leave it on.
        warm_start: start from the Q of the step before. Leave it on.
        orthogonalization_epsilon: accepted for compatibility with torch and not needed: no column is divided by zero.
        random_seed: of the first Q.
        compression_stats_logging_frequency: steps between two log lines with compression statistics.
        batch_tensors_with_same_shape: on an accelerator, work on all matrices of a bucket that have the same shape at
            once: fewer and larger kernels, for one more copy of their gradients in float32. Changes results by rounding
            only, and nothing on the CPU.
        coalesce: send small messages of all buckets as one, after the backward pass, so that a step costs two round
            trips however many buckets there are. None: where a round trip takes 10 ms or more and it changes no bit of
            the results, which is between two ranks, or two nodes with `ranks_per_node`. True: always; sums over more
            than two ranks then differ by rounding. False: never.
        exclude: globs on parameter names ("*embed*", "head.?.weight"; case matters) that are never compressed. Not for
            batched PowerSGD.
    """

    hook_name: ClassVar[str] = "powerSGD"
    start_option: ClassVar[str | None] = "start_powerSGD_iter"

    matrix_approximation_rank: int | dict[str, int] = field(default=1, hash=False)
    # `Union` because OmegaConf 2.4 does not read `int | float | None`. Not Optional[Union[int, float]]: typing caches
    # unions regardless of order, so the order of int and float could be that of another module's annotation.
    start_powerSGD_iter: Union[int, float, None] = None  # noqa: UP007
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    batch_tensors_with_same_shape: bool = False
    coalesce: bool | None = None
    exclude: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = self.matrix_approximation_rank
        by_glob = isinstance(ranks, dict)
        smallest = min(ranks.values(), default=0) if isinstance(ranks, dict) else ranks
        self._require(
            smallest >= 1 and not (isinstance(ranks, dict) and "" in ranks),
            "matrix_approximation_rank",
            "numbers of at least 1 by patterns that are not empty" if by_glob else "at least 1",
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
        self._require(all(self.exclude), "exclude", "patterns that are not empty")

    @property
    def option_globs(self) -> Sequence[str]:
        ranks = self.matrix_approximation_rank
        return list(ranks) if isinstance(ranks, dict) else ()

    @property
    def glob_option(self) -> str:
        return "matrix_approximation_rank"

    def rank_for(self, glob: str | None) -> int | None:
        """The rank of a parameter; None if it has none. `glob`: see `ParameterInfo.glob`."""
        ranks = self.matrix_approximation_rank
        if isinstance(ranks, dict):
            return None if glob is None else ranks[glob]
        return ranks

    @property
    def rank_words(self) -> str:
        """The ranks in words, such as "rank 4" or "ranks 1 to 8"."""
        ranks = self.matrix_approximation_rank
        low, high = (min(ranks.values()), max(ranks.values())) if isinstance(ranks, dict) else (ranks, ranks)
        return f"rank {low}" if low == high else f"ranks {low} to {high}"


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(PowerSGD):
    """PowerSGD on whole buckets: each is flattened and seen as one square matrix padded with zeros.

    Fewer and larger products than `PowerSGD` and usually a much lower accuracy; try `PowerSGD` first. The arguments are
    the same; `min_compression_rate` is not used, and `exclude` cannot be.
    """

    hook_name: ClassVar[str] = "batched_powerSGD"
    without_use: ClassVar[tuple[str, ...]] = ("min_compression_rate", "exclude")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(not self.exclude, "exclude", "none: whole buckets are compressed here; use PowerSGD")
        self._require(
            isinstance(self.matrix_approximation_rank, int),
            "matrix_approximation_rank",
            "one number: whole buckets are compressed here; use PowerSGD",
        )
