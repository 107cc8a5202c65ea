"""The exchanges of this machine, one after the other: the one that runs or is undecided, what must
be exchanged again, and what has been committed.
"""

from typing import Any

from commhooks.engine.session import ABANDONED_LIMIT_S
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.outer_steps import OuterSteps
from commhooks.members.attempt import Attempt
from commhooks.members.registered import Registered
from commhooks.members.report import Decision, Report
from commhooks.members.this_machine import ThisMachine


class Attempts:
    """Runs one attempt after the other. All ranks of the machine must call each method together.

    Attributes:
        current: in flight, or undecided; None: neither. It is kept if `MachinePartner` raises an
            error, because others may have committed it.
        trained: passes of this machine when it has sent what was committed last.
        whole: whether that were all weights.
    """

    _outer: OuterSteps
    _common: CommonState

    def __init__(
        self, machine: ThisMachine, source: GradientSource, registered: Registered
    ) -> None:
        self.current: Attempt | None = None
        self.trained = 0
        self.whole = False
        self._again: Attempt | None = None  # was in flight, and was abandoned
        # passes that are in the anchor: those of each fragment, and of fragments without an entry
        self._of_fragments: dict[int, int] = {}
        self._of_others = 0
        # passes at the latest exchange, in which all have gone on from where one stood
        self._shared_at = 0
        self._machine, self._source, self._registered = machine, source, registered

    def bind(self, outer: OuterSteps, common: CommonState) -> None:
        self._outer, self._common = outer, common

    @property
    def round(self) -> int:
        """The number of the running round: outer steps before it, with those discarded."""
        state = self._outer.state
        return state.step + state.nonfinite_steps

    @property
    def point(self) -> int:
        """The number of the point for which the machines of a round train: the exchange, or if it
        is in flight its commit.
        """
        return 2 * self.round + (self.current is not None)

    @property
    def turn(self) -> int:
        """The fragment whose turn it is: equal on all machines with this anchor."""
        return self.round % self._outer.rules.fragments

    def reported(self, own: Report, trained: int) -> dict[str, Any]:
        """Return what `own` is to report. `trained`: passes of this machine."""
        current, again = self.current, self._again
        steps = trained - self._of_fragments.get(self.turn, self._of_others)
        if again is not None:
            steps = again.steps
        return {
            "steps": steps if own.joined else 0,
            "done": trained - self._shared_at if own.joined else 0,
            "attempt": "" if current is None else current.decision.name,
            "attempt_with": (
                () if current is None else tuple(x.id for x in current.decision.machines)
            ),
            "complete": current is not None and current.complete,
            "again": again is not None,
        }

    def run(self, decision: Decision, own: Report, trained: int, limit_s: float) -> str:
        """Exchange, and confirm; or begin behind the training. Returns what has failed, or ""."""
        self.current = Attempt(
            decision,
            own,
            self._machine,
            self._source,
            self._registered,
            self.turn,
            trained,
            self._again,
        )
        failure = self.current.run(self._outer, self._common, limit_s)
        if self.current.in_flight:
            self._shared_at = trained
        return self._said(failure)

    def arrive(self, deadline: float | None) -> str:
        """Wait for what is in flight, which is due. Returns what has failed, or ""."""
        if self.current is None or not self.current.in_flight:
            return ""
        return self._said(self.current.arrive(deadline))

    def _said(self, failure: str) -> str:
        if failure and self.current is not None:
            self._machine.lines.say(
                "an outer step among %s failed, and the machines meet again: %s",
                ", ".join(machine.name for machine in self.current.decision.machines),
                failure,
                about=self.current.decision.name,
            )
        return failure

    def abandon(self) -> None:
        """Forget the attempt; if it was behind the training, exchange its differences again. A
        machine that had just come had none.
        """
        attempt, self.current = self.current, None
        assert attempt is not None
        self._again = attempt if attempt.sent and attempt.steps else None

    def commit(self) -> None:
        """Write what the attempt has received."""
        attempt, self.current = self.current, None
        assert attempt is not None
        attempt.commit(self._outer)
        self._again = None
        self.trained = attempt.trained
        self.whole = attempt.fragment is None
        if attempt.fragment is None:
            self.begin(attempt.trained)
        else:
            self._of_fragments[attempt.fragment] = attempt.trained
        if attempt.decision.at_once:
            self._shared_at = attempt.began

    def begin(self, trained: int) -> None:
        """Begin with the anchor, which contains all passes so far."""
        self._again = None
        self._of_fragments.clear()
        self._of_others = self._shared_at = self.trained = trained

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
