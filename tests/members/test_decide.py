"""What the machines decide after a quorum, as tables and by enumeration, without processes."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from commhooks.members.report import (
    VERSION,
    Decision,
    NotAReport,
    QuorumAction,
    Report,
    decide,
    effective_number,
    furthest,
    read,
    share_of,
)

NAMES = "abcd"
X: dict[str, Any] = {"attempt": "X", "attempt_with": ("a:1", "b:1", "c:1")}


def report(name: str, **given: Any) -> Report:
    """A report of the machine `name`, which has joined and has trained, unless `given` says
    otherwise.
    """
    defaults = {
        "joined": True,
        "steps": 20,
        "step": 5,
        "anchor": 50,
        "servers": (f"10.0.0.1:{ord(name)}",),
    }
    return Report(id=f"{name}:1", **defaults | given)


def new(name: str, **given: Any) -> Report:
    return report(name, **{"joined": False, "steps": 0, "step": 0, "anchor": 1} | given)


def all_decide(*reports: Report) -> dict[str, Decision]:
    return {own.name: decide(reports, own.id) for own in reports if not own.left}


def actions(*reports: Report) -> dict[str, str]:
    return {name: decision.action.name for name, decision in all_decide(*reports).items()}


def names(reports: Sequence[Report]) -> str:
    return "".join(each.name for each in reports)


# ---- every combination
# -----------------------------------------------------------------------------------------------

PLACES = {
    "ahead": {"step": 6, "anchor": 60},
    "same": {"step": 5, "anchor": 50},
    "behind": {"step": 4, "anchor": 40},
    "other anchor": {"step": 5, "anchor": 51},
}
TRAINED = {
    "trained": {"joined": True, "steps": 20},
    "new": {"joined": False, "steps": 0},
}
ATTEMPTS = ("none", "complete", "incomplete")
STATES = list(itertools.product(PLACES, TRAINED, ATTEMPTS))


def combinations(machines: int, every: int = 1) -> Iterator[list[Report]]:
    """All combinations of states, or one of `every` so many, without the order of the machines,
    which differs from combination to combination.
    """
    for number, states in enumerate(itertools.combinations_with_replacement(STATES, machines)):
        if number % every:
            continue
        turn = number % machines
        ids = tuple(f"{name}:1" for name in NAMES[:machines])
        reports = []
        for name, (place, trained, attempt) in zip(
            NAMES, states[turn:] + states[:turn], strict=False
        ):
            step = PLACES[place]["step"]
            tried = {"attempt": f"X{step}", "attempt_with": ids, "complete": attempt == "complete"}
            # not every combination, but each of two in many
            waits = {"at_once": (number >> len(reports)) % 2 == 1}
            reports.append(
                report(
                    name,
                    **PLACES[place]
                    | TRAINED[trained]
                    | waits
                    | (tried if attempt != "none" else {}),
                )
            )
        yield reports


def assert_compatible(reports: Sequence[Report], decisions: Mapping[str, Decision]) -> None:
    by_id = {own.id: (own, decisions[own.name]) for own in reports if own.name in decisions}
    top = max(own.step for own in reports)
    for own, decision in by_id.values():
        if decision.action in (QuorumAction.EXCHANGE, QuorumAction.BEGIN):
            assert own in decision.machines and own.step == top
            for other in decision.machines:  # nobody waits for a partner that does not come
                theirs = by_id[other.id][1]
                fields = ("action", "machines", "name", "reuse", "step", "at_once", "whole")
                for name in fields:
                    assert getattr(theirs, name) == getattr(decision, name)
                assert (other.step, other.anchor) == (own.step, own.anchor)
            for other in decision.heals:
                theirs = by_id[other.id][1]
                assert (theirs.action, theirs.source, theirs.step) == (
                    QuorumAction.HEAL,
                    own,
                    decision.step,
                )
        if decision.action is QuorumAction.HEAL:  # the latest anchor wins
            assert decision.source is not None and own in by_id[decision.source.id][1].heals
            assert decision.source.step == top and decision.step >= own.step
            assert (own.step, own.anchor) != (top, decision.source.anchor) or not own.joined
        if decision.action is QuorumAction.COMMIT:  # nobody writes what another may not have
            assert own.attempt and own.complete
            for other in by_id.values():
                if other[0].id in own.attempt_with and other[0].step == own.step:
                    assert other[0].attempt == own.attempt and other[0].complete
                    assert other[1].action is QuorumAction.COMMIT
                    assert other[1].participants == decision.participants
            if decision.participants:  # they train on, and nobody waits for them
                assert own.step == top and own in decision.participants
        settles = decision.action in (
            QuorumAction.COMMIT,
            QuorumAction.ABANDON,
            QuorumAction.ASK_AGAIN,
        )
        assert settles == any(other.attempt for other in reports)
    if (
        len(
            {decision.action for _, decision in by_id.values()}
            & {QuorumAction.EXCHANGE, QuorumAction.BEGIN}
        )
        == 0
    ):
        assert any(other.attempt for other in reports)
    participants = {
        decision.participants for _, decision in by_id.values() if decision.participants
    }
    assert len(participants) <= 1, "the machines disagree about who trains the next round"


def after(
    reports: Sequence[Report],
    decisions: Mapping[str, Decision],
    *,
    committed: int | None = None,
    added: int = 10_000,
) -> list[Report]:
    """The reports of the next quorum, if everything succeeds.

    A commit sets the anchor to `committed` (None: to a number of the step), and an exchange adds
    `added` to it.
    """
    results = []
    for machine in reports:
        decision = decisions[machine.name]
        changes: dict[str, Any] = {"number": machine.number + 1}
        if decision.action is QuorumAction.COMMIT:
            anchor = machine.step * 1000 if committed is None else committed
            changes |= {"step": machine.step + 1, "anchor": anchor, "steps": 0}
        if decision.action in (QuorumAction.COMMIT, QuorumAction.ABANDON):
            changes |= {"attempt": "", "attempt_with": (), "complete": False}
        if decision.action in (QuorumAction.EXCHANGE, QuorumAction.BEGIN, QuorumAction.HEAL):
            source = decision.source or machine
            changes |= {
                "step": decision.step,
                "anchor": source.anchor + (0 if decision.step == source.step else added),
                "joined": True,
                "steps": 0 if decision.action is QuorumAction.HEAL else 20,
            }
        results.append(dataclasses.replace(machine, **changes))
    return results


after_x = functools.partial(after, committed=6, added=10)
"""As `after`, but the anchor keeps whether X is in it: 6 in its last place."""


@pytest.mark.parametrize("machines", [1, 2, 3, 4])
def test_every_combination_of_machines_decides_compatibly_and_ends_with_one_anchor(
    machines: int,
) -> None:
    # four machines decide by no rule that three do not: some of their combinations are enough
    for reports in combinations(machines, every=7 if machines == 4 else 1):
        for _ in range(4):
            decisions = all_decide(*reports)
            assert_compatible(reports, decisions)
            reports = after(reports, decisions)
            if all(decision.step for decision in decisions.values()):
                break
        assert len({(own.step, own.anchor) for own in reports}) == 1, reports
        assert all(own.joined for own in reports) and any(own.trained for own in reports)
        if machines < 4:  # machines that have healed take part
            decisions = all_decide(*reports)
            assert {decision.machines for decision in decisions.values()} == {tuple(reports)}


# ---- an exchange that is interrupted anywhere
# ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class World:
    """Machines with the contents of their anchors. `content` says which exchanges are in an
    anchor.
    """

    reports: tuple[Report, ...]
    content: tuple[str, ...]


def meetings(count: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, count + 1):
        yield from itertools.combinations(range(count), size)


def outcomes(members: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """What may happen in an exchange: it may not have arrived everywhere, and then nobody confirms;
    or it has, and each machine knows it or not.
    """
    for incomplete in itertools.product(("incomplete", "complete"), repeat=len(members)):
        if "incomplete" in incomplete:
            yield incomplete
    yield from itertools.product(("complete", "confirmed"), repeat=len(members))


def test_an_exchange_that_is_interrupted_anywhere_leaves_one_anchor_for_each_step() -> None:
    """Three machines exchange with every outcome; then any of them meet, in any order, some of them
    never. As long as every meeting includes a machine of the one before, no step has two anchors on
    machines that train.
    """
    for outcome in outcomes(range(3)):
        start = []
        for name, what in zip("abc", outcome, strict=True):
            ids = ("a:1", "b:1", "c:1")
            waiting = {"attempt": "X", "attempt_with": ids, "complete": what == "complete"}
            confirmed = {"step": 6, "anchor": 6, "steps": 0}
            start.append(report(name, **(confirmed if what == "confirmed" else waiting)))
        for first in meetings(3):
            for second in meetings(3):
                if not set(first) & set(second):
                    continue
                reports = list(start)
                for meeting in (first, second, second, second, second):
                    there = [reports[place] for place in meeting]
                    decisions = all_decide(*there)
                    assert_compatible(there, decisions)
                    for place, now in zip(meeting, after_x(there, decisions), strict=True):
                        reports[place] = now
                together = [reports[place] for place in second]
                assert len({(own.step, own.anchor) for own in together}) == 1, (
                    outcome,
                    first,
                    second,
                )
                if "confirmed" in outcome and any(
                    outcome[place] == "confirmed" for place in {*first, *second}
                ):
                    assert all("X" in _history(own) for own in together), (
                        outcome,
                        first,
                        second,
                        together,
                    )


def test_an_exchange_in_flight_that_is_interrupted_anywhere_leaves_one_anchor_for_each_step() -> (
    None
):
    """Three machines, whose parts may have arrived or not, meet when their exchange is due, some of
    them never. The answer of the quorum reaches any of them, which act on it and train on; the
    others ask again. All that then meet end with one anchor, which contains the exchange if it was
    complete.
    """
    for complete in itertools.product((False, True), repeat=3):
        start = [
            report(name, complete=arrived, at_once=False, **X)
            for name, arrived in zip("abc", complete, strict=True)
        ]
        for first, second in itertools.product(meetings(3), repeat=2):
            for acting in [(), *meetings(3)]:
                if not set(acting) <= set(first):
                    continue
                reports = list(start)
                for number, meeting in enumerate((first, second, second, second, second, second)):
                    there = [reports[place] for place in meeting]
                    decisions = all_decide(*there)
                    assert_compatible(there, decisions)
                    for place, now in zip(meeting, after_x(there, decisions), strict=True):
                        if number or place in acting:
                            reports[place] = now
                        if not number and decisions[now.name].participants and place in acting:
                            reports[place] = dataclasses.replace(now, steps=20)
                together = [reports[place] for place in second]
                case = complete, first, acting, second
                assert len({(own.step, own.anchor) for own in together}) == 1, case
                if all(complete):
                    assert all("X" in _history(own) for own in together), case


def _history(own: Report) -> str:
    return "X" if own.anchor % 10 == 6 else "?"


# ---- tables
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reports, expected",
    [
        pytest.param([report("a")], {"a": "EXCHANGE"}, id="alone"),
        pytest.param([new("a"), new("b")], {"a": "BEGIN", "b": "BEGIN"}, id="they begin together"),
        pytest.param(
            [new("a"), new("b", anchor=2)], {"a": "BEGIN", "b": "HEAL"}, id="with other weights"
        ),
        pytest.param(
            [report("a", step=0, anchor=1), new("b")],
            {"a": "EXCHANGE", "b": "HEAL"},
            id="who joins round 0 heals",
        ),
        pytest.param(
            [new("a", anchor=2), report("b", step=0, anchor=1)],
            {"a": "HEAL", "b": "EXCHANGE"},
            id="sorts first",
        ),
        pytest.param(
            [report("a"), new("b", step=7, anchor=7)],
            {"a": "HEAL", "b": "BEGIN"},
            id="a later checkpoint",
        ),
        pytest.param(
            [
                report("a", steps=0, anchor=9),
                report("b"),
                report("c", anchor=9, steps=0),
            ],
            {"a": "HEAL", "b": "EXCHANGE", "c": "HEAL"},
            id="an anchor with which a machine has trained goes before others",
        ),
        pytest.param(
            [report("a", anchor=9), report("b"), report("c")],
            {"a": "HEAL", "b": "EXCHANGE", "c": "EXCHANGE"},
            id="the anchor of more machines goes before others",
        ),
        pytest.param(
            [report("a", steps=0, anchor=9), new("b", step=5), new("c", step=5)],
            {"a": "BEGIN", "b": "HEAL", "c": "HEAL"},
            id="a machine that joined goes before newcomers",
        ),
        pytest.param(
            [
                report("a", anchor=9),
                new("c", step=5, anchor=9),
                new("d", step=5, anchor=9),
                report("b"),
                report("e"),
            ],
            {"a": "HEAL", "b": "EXCHANGE", "c": "HEAL", "d": "HEAL", "e": "EXCHANGE"},
            id="newcomers do not count",
        ),
        pytest.param(
            [report("a"), report("b", steps=0)],
            {"a": "EXCHANGE", "b": "EXCHANGE"},
            id="b has missed the round",
        ),
        pytest.param(
            [report("a", min_machines=2), report("b", left=True)], {"a": "WAIT"}, id="b has left"
        ),
        pytest.param(
            [report("a", min_machines=1), report("b", min_machines=3)],
            {"a": "WAIT", "b": "WAIT"},
            id="the largest min_machines counts",
        ),
        pytest.param(
            [report("a", signature={"hook": "x"}), new("b", signature={"hook": "y"})],
            {"a": "EXCHANGE", "b": "REFUSED"},
            id="another hook",
        ),
        pytest.param(
            [
                new("a", signature={"hook": "x"}),
                new("b", signature={"hook": "y"}),
                new("c", signature={"hook": "x"}),
            ],
            {"a": "BEGIN", "b": "REFUSED", "c": "BEGIN"},
            id="of machines that begin together the first stays, and who matches it",
        ),
        pytest.param(
            [report("a", signature={"hook": "x"}), report("b", signature={"hook": "y"})],
            {"a": "EXCHANGE", "b": "EXCHANGE"},
            id="two runs at one lighthouse",
        ),
        pytest.param(
            [report("b", exchanged=True, unexplained=2), report("a", unexplained=2)],
            {"b": "EXCHANGE", "a": "REFUSED"},
            id="with a no exchange ever succeeds",
        ),
        pytest.param(
            [report("a", unexplained=2), report("b", unexplained=2)],
            {"a": "EXCHANGE", "b": "REFUSED"},
            id="with none it ever does: the first stays",
        ),
        pytest.param(
            [report("a", exchanged=True, unexplained=9), report("b", unexplained=1)],
            {"a": "EXCHANGE", "b": "EXCHANGE"},
            id="one failure",
        ),
        pytest.param(
            [new("a", signature={"hook": "y"}), report("b")],
            {"a": "REFUSED", "b": "EXCHANGE"},
            id="first",
        ),
        pytest.param(
            [report("a"), report("b", signature={"hook": "y"}), new("c", signature={"hook": "y"})],
            {"a": "EXCHANGE", "b": "EXCHANGE", "c": "HEAL"},
            id="two runs, and a newcomer of the second",
        ),
        pytest.param(
            [report("a"), new("b", number=11)],
            {"a": "EXCHANGE", "b": "HEAL"},
            id="it has asked often",
        ),
        pytest.param(
            [report("a", number=11)], {"a": "EXCHANGE"}, id="its own name is no other machine's"
        ),
        pytest.param(
            [report("a", unreachable=("c:1",)), report("b", unreachable=("c:1",)), report("c")],
            {"a": "EXCHANGE", "b": "EXCHANGE", "c": "WAIT"},
            id="nobody reaches c",
        ),
        pytest.param(
            [report("a", unreachable=("b:1", "c:1")), report("b"), report("c")],
            {"a": "WAIT", "b": "EXCHANGE", "c": "EXCHANGE"},
            id="a reaches nobody, though it sorts first",
        ),
        pytest.param(
            [report("b", unreachable=("a:1",)), new("a")],
            {"b": "EXCHANGE", "a": "WAIT"},
            id="of two, the newcomer",
        ),
        pytest.param(
            [report("a", unreachable=("c:1",)), report("b")],
            {"a": "EXCHANGE", "b": "EXCHANGE"},
            id="c is gone",
        ),
        pytest.param(
            [
                report("a", unreachable=("c:1",), min_machines=3),
                report("b", unreachable=("c:1",)),
                report("c"),
            ],
            {"a": "WAIT", "b": "WAIT", "c": "WAIT"},
            id="a machine that cannot be reached does not count for min_machines",
        ),
    ],
)
def test_a_quorum(reports: list[Report], expected: dict[str, str]) -> None:
    assert actions(*reports) == expected
    assert actions(*reversed(reports)) == expected, "the order of the reports counts"
    decisions = all_decide(*reports)
    for own in reports:
        alike = [each for each in reports if each.signature == own.signature]
        together = [each.name for each in alike if expected.get(each.name) in ("EXCHANGE", "BEGIN")]
        if own.name in together:
            assert names(decisions[own.name].machines) == "".join(sorted(together))


@pytest.mark.parametrize(
    "reports, expected",
    [
        pytest.param(
            [report("a", complete=True, **X), report("b", complete=True, **X), report("d")],
            {"a": "COMMIT", "b": "COMMIT", "d": "ASK_AGAIN"},
            id="a machine that was not in the exchange does not count",
        ),
        pytest.param(
            [report("a", complete=True, **X), report("b", step=6, anchor=6, steps=0)],
            {"a": "COMMIT", "b": "ASK_AGAIN"},
            id="b has written",
        ),
        pytest.param(
            [report("a", complete=True, **X), report("b")],
            {"a": "ABANDON", "b": "ASK_AGAIN"},
            id="b has abandoned it",
        ),
        pytest.param(
            [
                report("a", complete=True, **X),
                report("b", attempt="Y", attempt_with=("b:1", "c:1"), complete=True),
            ],
            {"a": "ABANDON", "b": "COMMIT"},
            id="b has abandoned it for another one",
        ),
        pytest.param([report("a", complete=True, **X)], {"a": "COMMIT"}, id="a is alone"),
        pytest.param(
            [report("a", complete=True, unreachable=("b:1",), **X), report("b", **X)],
            {"a": "ABANDON", "b": "ABANDON"},
            id="a machine that cannot be reached counts, too",
        ),
    ],
)
def test_an_undecided_exchange(reports: list[Report], expected: dict[str, str]) -> None:
    assert actions(*reports) == actions(*reversed(reports)) == expected


@pytest.mark.parametrize(
    ("reports", "at_once"),
    [
        ([report("a", at_once=False)], False),
        ([report("a", at_once=False), report("b", at_once=False)], False),
        ([report("a", at_once=False), report("b")], True),
        ([report("a", at_once=False), new("c", at_once=False)], True),
        ([report("a", at_once=False), report("b", at_once=False, again=True)], True),
        ([report("a", at_once=False), report("b", left=True)], False),
    ],
    ids=["alone", "all train on", "b waits", "c comes", "b sends again", "b has left"],
)
def test_the_training_goes_on_during_an_exchange_if_no_machine_waits(
    reports: list[Report], at_once: bool
) -> None:
    decisions = [decide(reports, own.id) for own in reports if own.joined and not own.left]
    assert {decision.action for decision in decisions} == {QuorumAction.EXCHANGE}
    assert {decision.at_once for decision in decisions} == {at_once}


def test_all_weights_are_exchanged_when_a_machine_leaves_after_what_must_be_sent_again() -> None:
    for reports, whole in (
        ([report("a"), report("b", whole=True)], True),
        ([report("a"), report("b")], False),
        ([report("a", again=True), report("b", whole=True)], False),
    ):
        assert {decide(reports, own.id).whole for own in reports} == {whole}


def test_machines_that_commit_train_on_unless_others_are_ahead() -> None:
    """Those meet them again, and none waits for a machine that has begun a round."""
    both = [report("a", complete=True, **X), report("b", complete=True, **X)]
    for reports in (both, [*both, report("d", reads="a:1", step=4)], [*both, new("e")]):
        assert names(decide(reports, "a:1").participants) == "ab"
    ahead = [*both, report("c", step=6, anchor=60)]
    assert actions(*ahead) == {"a": "COMMIT", "b": "COMMIT", "c": "ASK_AGAIN"}
    assert not decide(ahead, "a:1").participants


def test_connections_are_used_again_only_if_all_hold_them() -> None:
    """A machine that has connected with others in between reports another name, or none."""
    first = decide([report("a"), report("b")], "a:1")
    assert not first.reuse
    held = {"connection": first.name, "number": 9}
    assert decide([report("a", **held), report("b", **held)], "a:1").reuse
    for other in ({"connection": ""}, {"connection": "x"}):
        reports = [report("a", **held), report("b", **held | other)]
        assert not any(decide(reports, own.id).reuse for own in reports)
    assert not decide([report("a", **held)], "a:1").reuse, "b was among them"


def test_no_two_quorums_give_the_same_name() -> None:
    numbers = itertools.product(range(3), repeat=2)
    found = {decide([report("a", number=x), report("b", number=y)], "a:1").name for x, y in numbers}
    assert len(found) == 9


def test_a_machine_that_fails_to_heal_asks_another_one_and_does_not_count() -> None:
    sources = set()
    for failed in range(2):
        reports = [report("a"), report("b"), new("c", failed_heals=failed)]
        decisions = all_decide(*reports)
        source = decisions["c"].source
        assert source is not None
        sources.add(source.name)
        assert names(decisions["a"].participants) == "ab", "nobody waits for a machine that heals"
        assert_compatible(
            reports,
            {name: dataclasses.replace(x, participants=()) for name, x in decisions.items()},
        )
    assert sources == {"a", "b"}


def test_a_machine_reads_on_from_the_machine_whose_state_it_has() -> None:
    for source in "ab":
        reports = [report("a"), report("b"), report("c", step=4, anchor=40, reads=f"{source}:1")]
        decisions = all_decide(*reports)
        assert decisions["c"].source is reports["ab".index(source)]
        assert [names(decisions[name].heals) for name in "ab"] == (
            ["c", ""] if source == "a" else ["", "c"]
        )


def test_a_machine_that_the_others_have_declared_dead_asks_again() -> None:
    """They go on without it."""
    gone = Report(id="b:1", left=True)
    assert names(decide([report("a"), gone], "a:1").machines) == "a"
    decision = decide([report("a"), gone], "b:1")
    assert decision.action is QuorumAction.WAIT
    assert decision.reason == "the others have declared b dead, and it asks again"
    assert names(decide([report("a"), gone, report("b")], "b:1").machines) == "ab"


def test_who_is_left_out_is_told_why() -> None:
    decision = decide([report("a", unreachable=("b:1",)), new("b")], "b:1")
    assert (
        decision.reason
        == "b does not take part, because a cannot connect with b (b is at 10.0.0.1:98)"
    )


@pytest.mark.parametrize("local", ["127.0.0.1", "127.0.1.1", "[::1]"])
def test_a_loopback_address_is_refused_beside_another_host(local: str) -> None:
    here, there = {"servers": (f"{local}:1",)}, {"servers": ("[fd00::2]:1",)}
    for newcomer, elder in ((here, there), (there, here)):
        reports = [report("a", **elder), new("b", **newcomer)]
        assert actions(*reports) == {"a": "EXCHANGE", "b": "REFUSED"}
        culprit = "b" if newcomer is here else "a"
        assert f"start {culprit} with TORCHFT_LIGHTHOUSE set to" in decide(reports, "b:1").reason
        assert names(decide(reports, "a:1").participants) == "a"
    assert actions(report("a", **here), new("b", **here)) == {"a": "EXCHANGE", "b": "HEAL"}


def test_a_second_machine_of_the_same_name_waits() -> None:
    for id in ("a:0", "a:2"):
        twin = dataclasses.replace(new("b"), id=id)
        assert (
            decide([report("a"), twin], id).reason
            == "a waits for another machine of this name to end"
        )
        assert names(decide([report("a"), twin], "a:1").participants) == "a"
        for number, action in ((10, QuorumAction.WAIT), (11, QuorumAction.REFUSED)):
            again = dataclasses.replace(twin, number=number)
            assert decide([report("a"), again], id).action is action


@pytest.mark.parametrize(
    ("works", "shares", "effective", "first"),
    [
        ([(20, 1)], [1], 1, None),
        ([(7, 3), (7, 3), (7, 3)], [1, 1, 1], 3, None),
        ([(20, 1), (10, 1), (0, 1)], [2, 1, 0], 2500 / 900, "a"),
        ([(4, 1), (20, 1), (20, 1)], [12 / 44, 60 / 44, 60 / 44], 44**2 / 816, "b"),
        ([(20, 8), (5, 32)], [1, 1], 2, "a"),
    ],
)
def test_a_machine_counts_with_its_work(
    works: list[tuple[int, int]], shares: list[float], effective: float, first: str | None
) -> None:
    """Equal machines count with exactly 1, and their number is exactly that of the machines."""
    machines = [
        report(name, steps=steps, done=steps, samples=samples)
        for name, (steps, samples) in zip("abc", works, strict=False)
    ]
    assert [share_of(own, machines) for own in machines] == pytest.approx(shares, rel=1e-15)
    if set(shares) == {1}:
        assert [share_of(own, machines) for own in machines] == shares
        assert effective_number(machines) == effective
    assert effective_number(machines) == pytest.approx(effective, rel=1e-15)
    found = furthest(machines)
    assert (found and found.name) == first


# ---- what comes from outside
# -----------------------------------------------------------------------------------------


def test_a_report_is_read_as_it_was_written() -> None:
    own = report(
        "a",
        signature={"hook": "x"},
        unreachable=("b:1",),
        attempt="X",
        attempt_with=("a:1",),
        complete=True,
    )
    assert read("a:1", json.loads(json.dumps(own.to_json()))) == own


@pytest.mark.parametrize(
    "changes",
    [
        {"commhooks": None},
        {"id": "b:1"},
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"servers": []},
        {"servers": "10.0.0.1:1"},
        {"servers": [1]},
        {"signature": {"hook": 1}},
        {"signature": None},
        {"complete": 1},
        {"at_once": 0},
        {"steps": True},
        {"samples": 0},
        {"attempt": None},
        {"left": "no"},
    ],
)
def test_what_is_no_report_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotAReport, match="'a:1'"):
        read("a:1", report("a").to_json() | changes)


@pytest.mark.parametrize("content", [None, {}, {"step": 1}, "text", [1], {"commhooks": "1"}])
def test_another_job_is_no_report(content: object) -> None:
    with pytest.raises(NotAReport, match="'a:1' of another job"):
        read("a:1", content)


def test_another_version_is_refused_by_name() -> None:
    signature = {"protocol between machines": str(VERSION)}
    elder = read("a:1", {"commhooks": VERSION + 1, "joined": True, "new": [1]})
    decision = decide([elder, new("b", signature=signature)], "b:1")
    assert decision.action is QuorumAction.REFUSED
    assert (
        f"another protocol between machines than machine a ({VERSION} and {VERSION + 1})"
        in decision.reason
    )
