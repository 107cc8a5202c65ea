"""`auto` with times that tests prescribe, so that its decision is the same every time: everything else is real.

It decides at step 2. A step takes a second, or a tenth of it with anything but all-reduce; codecs take no time; the
link is so slow that the fewest bytes win.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from inside import session_of
from training import Run

from commhooks.comm.link import Link
from commhooks.compressors.auto import candidates
from commhooks.compressors.auto.compressor import AutoCompressor
from commhooks.compressors.auto.config import Auto
from commhooks.compressors.auto.decision import Decision
from commhooks.compressors.auto.report import Report
from commhooks.compressors.auto.watcher import Watcher
from commhooks.compressors.config import LARGEST_STEP
from commhooks.compressors.observation import Ranks
from commhooks.compressors.registry import register_compressor


@dataclass(frozen=True, kw_only=True)
class PrescribedAuto(Auto):
    """auto, with prescribed times."""

    hook_name: ClassVar[str] = "prescribed_auto"
    aliases: ClassVar[tuple[str, ...]] = ()

    measure_steps: int = 2
    mbit_per_s: float = 1.0
    codec_s: float = 0.0
    """Of every candidate but all-reduce and bf16."""
    tried_s: float = 0.1
    """A step with anything but all-reduce."""
    rehearsals: int = 1


class PrescribedRanks:
    def __init__(self, ranks: Ranks, mbit_per_s: float) -> None:
        self._ranks = ranks
        self._mbit_per_s = mbit_per_s
        self.size = max(2, ranks.size)

    @property
    def backend(self) -> Any:
        return self._ranks.backend

    def together(self) -> int:
        return self._ranks.together()

    def table(self, numbers: Sequence[float]) -> list[list[float]]:
        return self._ranks.table(numbers)

    def of_first(self, numbers: Sequence[float]) -> list[float]:
        return self._ranks.of_first(numbers)

    def link(self) -> Link:
        return Link(self._mbit_per_s, 0.01)


class PrescribedAutoCompressor(AutoCompressor):
    Config = PrescribedAuto
    enough_passes = 1

    def _report(self) -> Report:
        labels = [each.label for each in candidates.probes(self.config)] if self.decision.phase == "measuring" else []
        plain = self.decision.candidate.label == "allreduce"
        return Report(
            passes=9 if self._watcher.layouts else 0,
            step_s=1.0 if plain else self.config.tried_s,
            waiting_s=0.05,
            spent_s=0.0,
            rehearsals=self.config.rehearsals,
            computing_s=(0.001,) * len(self._watcher.layouts),
            codec_s=tuple(0.0 if label in ("allreduce", "bf16") else self.config.codec_s for label in labels),
        )

    def _new_watcher(self) -> Watcher:
        return Watcher({}, None)  # how often it rehearses would depend on the clock

    def reconsidered(self, ranks: Ranks, step: int) -> tuple[AutoCompressor, str]:
        return super().reconsidered(PrescribedRanks(ranks, self.config.mbit_per_s), step)

    def with_start(self, start: int) -> AutoCompressor:
        """Decided at once, for tests without `reconsidered`."""
        if start == LARGEST_STEP:
            return super().with_start(start)
        low_rank = candidates.powersgd(self.config, 2, "powerSGD")
        chosen = candidates.simple(self.config)[2] if self.config.quality == "same" else low_rank
        return self._with(Decision(chosen, None, since=start, phase="resting"))


def decided(label: str = "int8", since: int = 0, **more: object) -> Decision:
    """A decision for one of the simple candidates."""
    known = {each.label: each for each in candidates.simple(Auto(quality="close"))}
    chosen = known.pop(label)
    made = Decision(chosen, None, tuple(known.values()), since=since, phase="resting")
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]


def new(**options: Any) -> Run:
    """A training with it."""
    register_compressor(PrescribedAutoCompressor)
    return Run.new(hook=PrescribedAuto(**options))


def decision_of(run: Run) -> Decision:
    compressor = session_of(run.hook).compressor
    assert isinstance(compressor, AutoCompressor)
    return compressor.decision
