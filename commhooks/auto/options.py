"""Define the options of the hook auto, and the candidates from which it chooses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from commhooks.options import HookConfig, check_choice

__all__ = ["Auto"]

MARGIN = 1.1
"""A hook must shorten the step by at least this factor to be chosen. A median of eight steps varies
by a few percent, and a gain of less than a tenth does not justify other gradients.
"""


@dataclass(frozen=True)
class Candidate:
    """Describes a hook with options, to be compared with others.

    Attributes:
        hook, options: as in `attach`, without a start step.
        changes: how much it changes the gradients, for choosing the most exact of equally fast
            candidates. 0: not at all; up to 1: another dtype; above 1: lossy compression.
        between_nodes: average exactly inside nodes, and compress between nodes only; see
            `ranks_per_node` of `attach`.
    """

    label: str
    hook: str
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: float = 2.0
    between_nodes: bool = False

    def options_at_once(self, config: type[HookConfig]) -> dict[str, Any]:
        """Return the options with which it compresses from its first step on.

        `config`: the hook's config class.
        """
        start = {} if config.start_option is None else {config.start_option: 0}
        return {**self.options, **start}

    def excluding(self, names: list[str]) -> "Candidate":
        """Return the candidate with `names` as its option `exclude`, if it is a lossy hook."""
        if self.changes <= 1:
            return self
        return replace(self, options={**self.options, "exclude": list(names)})

    def of_nodes(self) -> "Candidate":
        if self.changes == 0:
            return self
        return replace(self, label=f"{self.label} between nodes", between_nodes=True)


def powersgd(rank: int, options: Mapping[str, Any]) -> Candidate:
    options = {"matrix_approximation_rank": rank, **options}
    return Candidate(f"powerSGD rank {rank}", "powerSGD", options, 2 + 1 / rank)


NOOP = Candidate("noop", "noop")
ALLREDUCE = Candidate("allreduce", "allreduce", changes=0.0)
FP16 = Candidate("fp16", "fp16_compress", changes=1.0)
BF16 = Candidate("bf16", "bf16_compress", changes=0.5)  # before fp16: it needs no GradScaler
INT8 = Candidate("int8", "int8_compress", changes=1.2)
INT4 = Candidate("int4", "int4_compress", changes=1.6)

QUALITIES = {
    "same": (ALLREDUCE, BF16, INT8),
    "close": (ALLREDUCE, BF16, INT8, INT4, powersgd(16, {})),
}
"""The candidates by quality, plain all-reduce first. PowerSGD of rank 4 or less is not among them:
the language model of benchmarks/language_model.py ends at a loss at least 6 % higher than with
all-reduce.
"""


@dataclass(frozen=True, kw_only=True)
class Auto(HookConfig):
    """Measures all-reduce and other hooks in the first steps, and continues with the fastest.

    Args:
        quality: "same": all-reduce, bf16 and int8, which train like all-reduce within its noise;
            "close": also int4 and PowerSGD of rank 16. If ranks form nodes, all except all-reduce
            work between nodes.
        measure_steps: number of steps of plain all-reduce that are measured before the first
            decision.
        exclude: globs on parameter names ("*embed*", "head.?.weight"; case-sensitive) that int8,
            int4 and PowerSGD do not compress.
    """

    hook_name: ClassVar[str] = "auto"
    aliases: ClassVar[tuple[str, ...]] = ("automatic",)

    quality: str = "same"
    measure_steps: int = 10
    exclude: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{type(self).__name__}: quality", self.quality, QUALITIES)
        self._require(2 <= self.measure_steps <= 10_000, "measure_steps", "2 to 10000")

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates of `quality`, without hooks that this build of commhooks does not have."""
        from commhooks.registry import COMPRESSORS  # here: it imports this module

        return [
            candidate.excluding(self.exclude)
            for candidate in QUALITIES[self.quality]
            if candidate.hook in COMPRESSORS
        ]

    def candidates_with(self, ranks_per_node: int) -> list[Candidate]:
        if ranks_per_node == 1:
            return self.candidates
        return [candidate.of_nodes() for candidate in self.candidates]


def choose(times: Mapping[str, float], candidates: Mapping[str, Candidate], now: str) -> str:
    """Return the label of the candidate to use.

    Of those that are faster than the current one (`now`) by `MARGIN` and nearly as fast as the
    fastest, that is the one that changes the gradients least; without such candidates, `now`. Equal
    on all ranks for equal arguments. `times`: seconds per step by label; candidates without a valid
    time are left out.
    """
    usable = {
        label: seconds for label, seconds in times.items() if math.isfinite(seconds) and seconds > 0
    }
    if now not in usable:
        return now
    longest = min(MARGIN * min(usable.values()), usable[now] / MARGIN)
    about = [label for label, seconds in usable.items() if seconds <= longest]
    return min(about, key=lambda label: (candidates[label].changes, usable[label]), default=now)


COMPRESSOR_PATHS: dict[type[HookConfig], str] = {Auto: "commhooks.auto.compressor:AutoCompressor"}
