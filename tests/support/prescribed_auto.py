"""`auto` with prescribed times, so that its decision is always the same. Everything else is real.

It begins its trials at step 2. A step takes a second with all-reduce, and `tried_s` with anything
else. If `tried_s` is a tenth, only the candidate that sends least is tried, because the bytes of
the others alone would take longer.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

from commhooks.auto.compressor import AutoCompressor
from commhooks.auto.options import ALLREDUCE, QUALITIES, Auto, Candidate, powersgd
from commhooks.auto.trials import TRIAL_STEPS, WARM_UP, Decision
from commhooks.auto.watch import ObservedPass, Ranks
from commhooks.options import LARGEST_STEP
from commhooks.registry import register_compressor
from tests.support.inside import session_of
from tests.support.training import Run

BEGIN = 2
"""The step at which the trials begin."""
TRIAL = WARM_UP + TRIAL_STEPS
"""Steps of one trial."""
# PowerSGD, of a rank that compresses the small layers of tests
QUALITIES["low rank"] = (
    ALLREDUCE,
    powersgd(2, {}),
)


@dataclass(frozen=True, kw_only=True)
class PrescribedAuto(Auto):
    """auto with prescribed times."""

    hook_name: ClassVar[str] = "prescribed_auto"
    aliases: ClassVar[tuple[str, ...]] = ()

    measure_steps: int = BEGIN
    tried_s: float = 0.1
    """Seconds of a step with anything but all-reduce and bf16."""
    bf16_s: float | None = 0.5
    """Seconds of a step with bf16; None: bf16 is not a candidate."""


class PrescribedAutoCompressor(AutoCompressor):
    Config = PrescribedAuto
    enough_passes = 1

    def observe(self, seen: ObservedPass) -> None:
        prescribed = {"allreduce": 1.0, "bf16_compress": self.config.bf16_s}
        step_s = prescribed.get(self.decision.candidate.hook, self.config.tried_s)
        assert step_s is not None
        super().observe(dataclasses.replace(seen, step_s=step_s))

    def _offered(self, ranks: Ranks) -> list[Candidate]:
        with mock.patch.object(ranks, "size", 2):  # also where it is alone
            offered = super()._offered(ranks)
        return [
            candidate
            for candidate in offered
            if candidate.hook != "bf16_compress" or self.config.bf16_s is not None
        ]

    def with_start(self, start: int) -> AutoCompressor:
        """Decided at once, for tests without `reconsidered`."""
        if start == LARGEST_STEP:
            return super().with_start(start)
        return self._with(Decision(self.config.candidates[-1], None, since=start, phase="decided"))


def decided(label: str = "int8", since: int = 0, **more: object) -> Decision:
    """Make a decision for one of the simple candidates."""
    offered = {candidate.label: candidate for candidate in Auto(quality="close").candidates}
    chosen = offered.pop(label)
    made = Decision(chosen, None, tuple(offered.values()), since=since, phase="decided")
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]


def new(*, ranks_per_node: int | None = None, **options: Any) -> Run:
    """Make a training with it."""
    register_compressor(PrescribedAutoCompressor)
    return Run.new(hook=PrescribedAuto(**options), ranks_per_node=ranks_per_node)


def decision_of(run: Run) -> Decision:
    compressor = session_of(run.hook).compressor
    assert isinstance(compressor, AutoCompressor)
    return compressor.decision
