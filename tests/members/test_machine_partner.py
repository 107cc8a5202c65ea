"""What a machine does with an exchange of which it does not know whether the others have committed
it, without other machines: quorums, exchanges and commits are stand-ins.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from commhooks import HookRunError, Torchft
from commhooks.local_steps.partner import Due
from commhooks.local_steps.schedule import Exchanged, Rules
from commhooks.members.client import Client
from commhooks.members.history import History
from commhooks.members.machine_partner import MachinePartner
from commhooks.members.numbers import Numbers
from commhooks.members.report import Report
from commhooks.members.round_end import RoundEnd

OTHER = Report(
    id="b:1",
    step=5,
    anchor=7,
    joined=True,
    steps=20,
    done=20,
    exchanged=True,
    servers=("10.0.0.2:1",),
)


class Machine:
    """Machine a, with a `MachinePartner`. `failing`: how many confirmations fail after everything
    has arrived.
    """

    def __init__(self, failing: int) -> None:
        self.failing, self.committed, self.reports = failing, 0, list[Report]()
        # what each quorum adds to the own report; None: no quorum in time
        self.answers: list[Any] = []
        ranks = SimpleNamespace(
            is_first=True, alone=True, exchanges=True, all_agree=bool, key_of_shards=lambda key: key
        )
        connections = mock.Mock(name="connections", unreachable=())
        connections.name = ""
        connections.confirm.side_effect = self._confirm
        connections.all_answer.return_value = True
        machine = SimpleNamespace(
            id="a:1",
            options=Torchft(timeout_s=1.0),
            servers=("10.0.0.1:1",),
        )
        vars(machine).update(
            store="",
            server=None,
            ranks=ranks,
            connections=connections,
            lines=mock.Mock(),
            lighthouse=None,
            round_end=RoundEnd(Client()),
            history=History(lambda: 1.0),
            numbers=Numbers(),
            timeout_s=lambda: 1.0,
            limit_s=lambda deadline: 1.0 if deadline is None else 0.5,
        )
        self.steps = MachinePartner(machine, mock.Mock(), {})  # type: ignore[arg-type]
        self.steps._own = dataclasses.replace(self.steps._own, joined=True)
        self.outer = mock.Mock(state=mock.MagicMock(step=5, nonfinite_steps=0))
        self.outer.rules = Rules(sync_every=20)
        self.outer.commit_prepared.side_effect = self._commit
        self.steps.bind(self.outer, mock.Mock(**{"digest.return_value": 7}))
        self.steps.healing = mock.Mock(failed=0)

    def _confirm(self) -> None:
        self.failing -= 1
        if self.failing >= 0:
            raise RuntimeError("connection closed")

    def _commit(self, held: object) -> None:
        self.committed += 1
        self.outer.state.step += 1

    def end_round(self, limit_s: float | None = None) -> bool:
        def quorum(report: Report, deadline: object) -> list[Report] | None:
            self.reports.append(report)
            answer = self.answers.pop(0)
            return None if answer is None else [report, dataclasses.replace(OTHER, **answer)]

        with mock.patch.object(self.steps._quorums, "ask", quorum):
            due = Due(fragment=0, trained=20, limit_s=limit_s)
            return self.steps.exchange(self.outer, due) == Exchanged(fragment=0)


def test_the_transfer_of_the_state_pauses_during_an_exchange() -> None:
    machine = Machine(failing=0)
    machine.answers = [{}]
    server = mock.MagicMock()
    entered, left = server.pausing().__enter__, server.pausing().__exit__
    machine.steps._machine.server = server
    machine.steps._machine.connections.confirm.side_effect = lambda: (
        entered.assert_called_once(),
        left.assert_not_called(),
    )
    assert machine.end_round()
    left.assert_called_once()


@pytest.mark.parametrize(("limit_s", "limit"), [(None, 1.0), (10.0, 0.5)])
def test_each_exchange_has_a_limit_also_over_connections_of_before(
    limit_s: float | None, limit: float
) -> None:
    """That of a machine that leaves may be shorter than those before."""
    machine = Machine(failing=0)
    connections = machine.steps._machine.connections
    machine.steps._machine.numbers.passes = lambda: 20
    machine.answers = [{}]
    assert machine.end_round(limit_s)
    connections.name = connections.connect.call_args.args[1]
    machine.answers = [{"step": 6, "done": 0, "connection": connections.name}]
    assert machine.end_round(limit_s)
    connections.connect.assert_called_once()
    assert connections.limit.call_args_list == [mock.call(limit)] * 2


def test_a_machine_between_two_steps_looks_with_its_weight() -> None:
    """It may wait there for the end of the round: as long as it loses less than the others."""
    machine = Machine(failing=0)
    machine.steps._machine.numbers.weight = 0.25
    with mock.patch.object(RoundEnd, "ends_here", return_value=True) as ends_here:
        assert machine.steps.another_is_done()
    ends_here.assert_called_once_with(machine.steps.attempts.point, 0.25)


def test_a_settled_commit_is_an_outer_step() -> None:
    """The others have committed: this machine does, too, and counts as one with which exchanges
    succeed.
    """
    machine = Machine(failing=1)
    machine.answers = [{}, {"step": 6}, {"step": 6, "steps": 0}]
    assert machine.end_round() and machine.committed == 1
    first, second, third = machine.reports
    assert not first.attempt and second.attempt and second.complete and not third.attempt
    assert (second.exchanged, second.unexplained) == (False, 1), "it is not known yet"
    assert (third.exchanged, third.unexplained) == (True, 0)


def test_an_exchange_in_doubt_outlives_an_error() -> None:
    """A script may catch the error and go on: the others may have committed the exchange."""
    machine = Machine(failing=1)
    machine.answers = [{}, None]
    with pytest.raises(HookRunError, match="did not come to their outer step in time"):
        machine.end_round()
    assert machine.committed == 0
    machine.answers = [{"step": 6}, {"step": 6, "steps": 0}]
    machine.end_round()
    assert machine.reports[2].attempt == machine.reports[1].attempt != "" and machine.committed == 1


@pytest.mark.parametrize(("steps", "expected"), [(3, (True, 3)), (0, (False, 2))])
def test_what_is_exchanged_again(steps: int, expected: tuple[bool, int]) -> None:
    """What was behind the training, and is abandoned when it is due. A machine that had just come
    had nothing in it, and exchanges what it has trained since.
    """
    machine = Machine(failing=0)
    attempts = machine.steps.attempts
    attempts.begin(8)
    attempts.current = mock.Mock(sent=[1], steps=steps, in_flight=False)
    attempts.abandon()
    reported = attempts.reported(Report(id="a:1", joined=True), trained=10)
    assert (reported["again"], reported["steps"]) == expected


def test_a_machine_whose_exchanges_fail_five_times_ends_with_an_error() -> None:
    machine = Machine(failing=5)
    machine.steps._own = dataclasses.replace(machine.steps._own, exchanged=True)
    # The other one reports an incomplete exchange, so that all abandon it and begin another one.
    undecided = {"attempt": "x", "attempt_with": ("a:1", "b:1"), "unreachable": ()}
    machine.answers = [{}, undecided, {}, undecided, {}, undecided, {}, undecided, {}]
    with pytest.raises(
        HookRunError, match="the outer step failed 5 times in turn: connection closed"
    ):
        machine.end_round()
    assert machine.committed == 0
