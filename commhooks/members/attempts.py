"""The exchanges of this machine, one after the other: the one that runs or is undecided, what must
be exchanged again, and what has been committed.
"""

from typing import Any

from commhooks.engine.session import ABANDONED_LIMIT_S
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.fragments import OuterSteps
from commhooks.members.attempt import Attempt
from commhooks.members.registered import Registered
from commhooks.members.report import Decision, Report
from commhooks.members.this_machine import ThisMachine


class Attempts:
    """Runs one attempt after the other. All ranks of the machine must call each method together.

    Attributes:
        current: in flight, or undecided; None: neither. It is kept if `MachinePartner` raises an
            error, because others may have committed it.
        trained: passes of this machine that are in exchanges which were committed.
        latest: the machines of the latest exchange.
    """

    _outer: OuterSteps
    _common: CommonState

    def __init__(
        self, machine: ThisMachine, source: GradientSource, registered: Registered
    ) -> None:
        self.current: Attempt | None = None
        self.trained = 0
        self.latest: tuple[Report, ...] = ()
        self._again: Attempt | None = None  # was in flight, and was abandoned
        self._machine, self._source, self._registered = machine, source, registered

    def bind(self, outer: OuterSteps, common: CommonState) -> None:
        self._outer, self._common = outer, common

    def reported(self, own: Report, trained: int) -> dict[str, Any]:
        """Return what `own` is to report. `trained`: passes of this machine."""
        current, again = self.current, self._again
        steps = trained - self.trained if again is None else again.steps
        return {
            "steps": steps if own.joined else 0,
            "attempt": "" if current is None else current.decision.name,
            "attempt_with": (
                () if current is None else tuple(x.id for x in current.decision.machines)
            ),
            "complete": current is not None and current.complete,
            "at_once": own.at_once or again is not None,
        }

    def run(self, decision: Decision, own: Report, trained: int, limit_s: float) -> str:
        """Exchange, and confirm; or begin behind the training. Returns what has failed, or ""."""
        self.current = Attempt(
            decision,
            own,
            self._machine,
            self._source,
            self._registered,
            trained,
            self._again,
        )
        self.latest = decision.machines
        return self.current.run(self._outer, self._common, limit_s)

    def abandon(self) -> None:
        """Forget the attempt; if it was behind the training, exchange its differences again."""
        attempt, self.current = self.current, None
        assert attempt is not None
        self._again = attempt if attempt.sent else None

    def commit(self) -> None:
        """Write what the attempt has received."""
        attempt, self.current = self.current, None
        assert attempt is not None
        attempt.commit(self._outer)
        self.begin(attempt.trained)

    def begin(self, trained: int) -> None:
        """Begin with the weights of the others, or with the anchor of an outer step."""
        self.trained, self._again = trained, None

    def forget(self) -> None:
        """Begin with a state that was loaded."""
        attempt = self.current
        if attempt is not None and attempt.in_flight:
            # Nobody can have committed it without a report of this machine.
            self.close()
            self.current = None
        elif attempt is not None:
            attempt.trained = 0
        self.begin(0)

    def close(self) -> None:
        """Give up what is in flight."""
        if self.current is not None and self.current.in_flight:
            self.current.drop(ABANDONED_LIMIT_S)
