"""The hooks that `auto`, the doctor and `commhooks network` compare, and which of the measured ones to use."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from commhooks.options import HookConfig

MARGIN = 1.1
"""What a hook has to gain, as a factor on the time of a step; and those whose steps differ by less are equally fast. A
median of eight steps scatters by some percent, and less than a tenth is not worth other gradients."""


@dataclass(frozen=True)
class Candidate:
    """
    Attributes:
        label: its name in logs, tables and checkpoints.
        hook, options: as in `attach`; without a start step.
        changes: how much it changes the gradients, to choose the most exact of equally fast ones: 0 not at all, up to 1
            for another dtype, above 1 for lossy compression.
    """

    label: str
    hook: str
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: float = 2.0

    def options_at_once(self, config: type[HookConfig]) -> dict[str, Any]:
        """The options with which it compresses from its first step on. `config`: the config class of the hook."""
        return {**self.options, **({} if config.start_option is None else {config.start_option: 0})}


NOOP = Candidate("noop", "noop")
ALLREDUCE = Candidate("allreduce", "allreduce", changes=0.0)
FP16 = Candidate("fp16", "fp16_compress", changes=1.0)
BF16 = Candidate("bf16", "bf16_compress", changes=0.5)  # before fp16: it needs no GradScaler
INT8 = Candidate("int8", "int8_compress", changes=1.2)
INT4 = Candidate("int4", "int4_compress", changes=1.6)


def powersgd(rank: int, options: Mapping[str, Any]) -> Candidate:
    """PowerSGD; the higher ranks change the gradients less."""
    options = {"matrix_approximation_rank": rank, **options}
    return Candidate(f"powerSGD rank {rank}", "powerSGD", options, 2 + 1 / rank)


def choose(times: Mapping[str, float], known: Mapping[str, Candidate], now: str) -> str:
    """The label of the candidate to use; the same on all ranks that have the same numbers.

    Among those that are about as fast as the fastest, and faster than the one of now by the margin, the one that
    changes the gradients least; the one of now if there are none.

    Args:
        times: of a step, by label. Candidates without a usable time are left out.
        known: the candidates by label.
    """
    usable = {label: each for label, each in times.items() if math.isfinite(each) and each > 0}
    if now not in usable:
        return now
    longest = min(MARGIN * min(usable.values()), usable[now] / MARGIN)
    about: Sequence[str] = [label for label, each in usable.items() if each <= longest]
    return min(about, key=lambda label: (known[label].changes, usable[label]), default=now)
