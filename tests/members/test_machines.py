"""Machines that come and go: a real lighthouse of torchft, a process per rank, and deaths
everywhere.
"""

import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from tests.support.ddp_steps import process_group_of_one
from tests.support.machine_oracle import (
    EVERY,
    assert_equal_weights,
    compare_with_oracle,
    train_on,
)
from tests.support.machines import Machine, lighthouse
from tests.support.member_job import new_model

pytestmark = pytest.mark.timeout(120)
JOB = Path(__file__).parents[1] / "support" / "member_job.py"
MACHINE = {"every": EVERY, "wire": "int4", "steps": 10_000}
SHARDED = {"world": 2, "shards": 2, "width": 7, "out": 1}
"""A machine with a sharded model: the shards have different sizes, and some are empty."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Starts the machine `name`: every 2 steps, int4, 10,000 steps, unless `given` says
    otherwise.
    """
    started: list[Machine] = []
    with lighthouse() as address:

        def new(name: str, folder: Path = tmp_path, **given: Any) -> Machine:
            started.append(Machine(JOB, address, folder, name, **MACHINE | given))
            return started[-1]

        yield new
        for each in started:
            each.signal(signal.SIGCONT)
            each.kill()


def begin_together(start: Callable[..., Machine]) -> tuple[Machine, Machine]:
    """Start a, and then b, without which a does not train: neither takes the other's state. b can
    go on alone.
    """
    a = start("a", least=2)
    a.wait_for_text("1 of min_machines=2 is here; waiting")
    return a, start("b")


@pytest.mark.parametrize(
    ("wire", "others", "given"),
    [
        ("int4", ["b"], {}),
        ("float32", [], {}),
        ("int4", [], SHARDED),
        ("int4", [], SHARDED | {"compressed": True}),
    ],
)
def test_machines_come_and_go(
    start: Callable[..., Machine], wire: str, others: list[str], given: Any
) -> None:
    """Machine a, c that begins with other weights and is killed, and d that comes after it, beside
    `others`. No step of a is lost, and all outer steps are those of an oracle in one process. (gloo
    adds three float32 in another order than the oracle.)
    """
    given = {"wire": wire, "options": {"outer_momentum": 0.5}} | given
    a = start("a", **given)
    a.round(2)
    stay, c = [start(name, **given) for name in others], start("c", seed=1, **given)
    a.wait_for(lambda line: line.get("names") == ["a", *others, "c"])
    a.round(max(a.rounds) + 3)
    c.signal(signal.SIGKILL)
    a.wait_for(
        lambda line: line.get("names") == ["a", *others] and line["step"] > max(c.rounds) + 2
    )
    d = start("d", seed=2, **given)
    a.wait_for(lambda line: line.get("names") == ["a", *others, "d"])
    train_on(a, 3, *stay, c, d)
    for each in (a, *stay, d):
        each.signal(signal.SIGTERM)
        assert each.end()["what"] == "end"
    assert_equal_weights(a, *stay, c, d)
    # Every round of a is whole: it has lost no step.
    counts = [line["count"] for line in a.rounds.values()]
    assert {later - before for before, later in zip(counts[1:], counts[2:], strict=False)} == {
        EVERY
    }
    if "compressed" not in given:  # the oracle trains with exact weights and gradients
        compare_with_oracle([a, *stay, c, d], **given)


@pytest.mark.parametrize("model", [{}, SHARDED], ids=["", "sharded"])
def test_a_round_ends_with_the_first_machine_that_has_done_it(
    start: Callable[..., Machine], model: dict[str, Any]
) -> None:
    """The other one, slower, counts with the steps that it has done, and goes on from where the
    first one stands: the registered position is that of the first.
    """
    oracle: dict[str, Any] = {"every": 12, "options": {"outer_momentum": 0.5}} | model
    given = oracle | {"least": 2, "rounds": 5}
    fast = start("a", sleep_s=0.03, **given)
    slow = start("b", sleep_s=0.15, **given)
    assert fast.end()["step"] == slow.end()["step"] == 5
    counts = {
        machine.name: [line["count"] for line in machine.rounds.values()]
        for machine in (fast, slow)
    }
    assert counts["a"][-1] == 5 * 12 and counts["b"][-1] < 5 * 8, counts
    positions = {
        machine.name: [line["position"] for line in machine.rounds.values()]
        for machine in (fast, slow)
    }
    assert positions["a"] == positions["b"] == counts["a"]
    assert_equal_weights(fast, slow)
    compare_with_oracle([fast, slow], "int4", first="ab", enough=9, **oracle)


FAULTS = {
    "alone": ["before", "unsure", "unshared"],
    "sharded": ["unconnected", "exchanged", "agreed", "refused"],
}
"""One for each phase of an outer step. What follows from it is in test_decide.py, for every
combination.
"""


@pytest.mark.parametrize(
    ("ranks", "fault"), [(ranks, each) for ranks, faults in FAULTS.items() for each in faults]
)
def test_an_outer_step_fails(start: Callable[..., Machine], ranks: str, fault: str) -> None:
    """A machine dies before the exchange or after it, or believes that the confirmation has failed:
    the others take the same outer step again, or all take the one that has arrived; none loses a
    step, and the weights stay equal. Of a machine of two ranks that happens to the second one.
    """
    given: Any = SHARDED if ranks == "sharded" else {}
    start = functools.partial(start, timeout_s=3.0, **given)
    a, b = begin_together(start)
    a.wait_for(lambda line: line.get("part") == ["a", "b"])
    # all of its exchanges are with both
    c = start("c", fault=[fault, 1 if fault == "unconnected" else 3])
    a.wait_for(lambda line: line.get("part") == ["a", "b", "c"])
    train_on(a, 8, b, c)
    for each in (a, b):
        each.signal(signal.SIGTERM)
        assert each.end()["what"] == "end"
    if fault in ("before", "exchanged", "agreed"):
        assert c.processes[-1].wait(10) == -signal.SIGKILL
        assert not given or c.end()["type"] == "HookRunError"
    else:
        assert len(c.rounds) > 5  # it goes on
        assert "failed, and the machines meet again" in c.log.read_text()
        # Only when it has come: nothing was lost.
        assert c.log.read_text().count("c goes on from outer step ") == 1
    c.kill()
    assert_equal_weights(a, b, c)
    counts = {
        name: [line["count"] for line in each.rounds.values()]
        for name, each in {"a": a, "b": b}.items()
    }
    for name, each in counts.items():
        assert {later - before for before, later in zip(each[1:], each[2:], strict=False)} <= {
            EVERY
        }, name
    compare_with_oracle([a, b, c], "int4", first="ab", **given)


def test_a_machine_with_which_no_exchange_succeeds_ends_and_the_others_go_on(
    start: Callable[..., Machine],
) -> None:
    """Though all machines reach each other, as with a firewall that closes other ports. Its name
    sorts first.
    """
    b, c = start("b"), start("c")
    c.wait_for(lambda line: line.get("part") == ["b", "c"])
    a = start("a", fault=["blocked", 0])
    end = a.end()
    assert (
        end["type"] == "AttachError"
        and "but could not exchange 2 times in turn. Does a firewall" in end["text"]
    )
    step = max(b.rounds)
    b.wait_for(lambda line: line.get("part") == ["b", "c"] and line["step"] > step + 3)
    assert_equal_weights(b, c)


@pytest.mark.parametrize("given", [{}, SHARDED], ids=["", "sharded"])
def test_a_machine_dies_before_it_connects(start: Callable[..., Machine], given: Any) -> None:
    """The others know its name already, and do not wait for it until the timeout."""
    start = functools.partial(start, timeout_s=60.0, **given)
    a, b = begin_together(start)
    a.wait_for(lambda line: line.get("part") == ["a", "b"])
    c = start("c", fault=["listed", 1])
    assert c.processes[-1].wait(60) == -signal.SIGKILL
    died = time.monotonic()
    a.round(max(a.rounds) + 2)
    assert time.monotonic() - died < 20
    train_on(a, 5, b)
    assert "failed, and the machines meet again" in a.log.read_text() + b.log.read_text()
    for each in (a, b):
        each.signal(signal.SIGTERM)
        assert each.end()["what"] == "end"
    assert_equal_weights(a, b)
    compare_with_oracle([a, b, c], "int4", first="ab", **given)


def test_the_others_do_not_wait_for_a_machine_that_was_killed(tmp_path: Path) -> None:
    """Its closed sockets say it at once, long before the lighthouse misses its heartbeats."""
    with lighthouse(wait_s=60.0, dead_s=40.0) as address:
        both = [Machine(JOB, address, tmp_path, name, **MACHINE) for name in "ab"]
        try:
            both[0].wait_for(lambda line: line.get("part") == ["a", "b"])
            both[1].round(max(both[0].rounds) + 2)
            both[1].signal(signal.SIGKILL)
            killed, step = time.monotonic(), max(both[0].rounds)
            both[0].wait_for(lambda line: line.get("names") == ["a"] and line["step"] > step)
            assert time.monotonic() - killed < 15.0, "0.2 s on a quiet machine"
        finally:
            for machine in both:
                machine.kill()


def test_a_machine_dies_while_another_one_takes_its_state(start: Callable[..., Machine]) -> None:
    """c does not wait for b until the timeout, if the exchange of b and a has failed meanwhile."""
    start = functools.partial(start, timeout_s=60.0)
    a, b = start("a", fault=["asked", 1], least=2), start("b")  # b takes no state of a
    a.wait_for(lambda line: line.get("part") == ["a", "b"])
    c = start("c", seed=1)
    b.wait_for(lambda line: line.get("part") == ["b", "c"], 40.0)
    b.round(max(b.rounds) + 3)
    assert a.processes[0].wait(10) == -signal.SIGKILL
    assert re.search(r"the state of machine a at \S+ is unavailable: ", c.log.read_text())
    assert "keeps its own: registered object" in c.log.read_text()  # an object that cannot be sent
    assert_equal_weights(a, b, c)


def test_the_others_train_on_while_a_machine_reads_the_state(
    start: Callable[..., Machine],
) -> None:
    """Its transfer takes many rounds. It catches up with the outer steps that it has missed, which
    give it the same bits, and takes part in the next one.
    """
    given: dict[str, Any] = {"options": {"outer_momentum": 0.5}}
    a = start("a", fault=["slow", 12], **given)
    a.round(2)
    c = start("c", seed=1, **given)
    a.wait_for_text("this machine gives the state of outer step")
    began = max(a.rounds)
    a.wait_for(lambda line: line.get("names") == ["a", "c"])
    train_on(a, 4, c)
    alone = [step for step, line in a.rounds.items() if step > began and line["names"] == ["a"]]
    assert len(alone) > 8, "a machine that reads is not waited for"
    found = re.findall(r"c goes on from .* has read the last (\d+) of them", c.log.read_text())
    assert len(found) == 1 and int(found[0]) > 8, c.log.read_text()[-2000:]
    a.kill()
    c.kill()
    assert_equal_weights(a, c)
    compare_with_oracle([a, c], "int4", **given)


def test_a_machine_that_hangs(start: Callable[..., Machine]) -> None:
    """It is left out, finds itself behind when it wakes, and goes on with the state of the
    others.
    """
    a = start("a", timeout_s=60.0)
    a.round(1)
    b = start("b", timeout_s=60.0)
    b.wait_for(lambda line: line.get("part") == ["a", "b"])
    b.signal(signal.SIGSTOP)
    a.wait_for(lambda line: line.get("names") == ["a"] and line["step"] > max(b.rounds) + 3)
    stopped = max(b.rounds)
    b.signal(signal.SIGCONT)
    woke, step = time.monotonic(), max(a.rounds)
    a.wait_for(lambda line: line.get("part") == ["a", "b"] and line["step"] > step)
    assert time.monotonic() - woke < 12, (
        "a waited until timeout_s for connections that b no longer had"
    )
    train_on(b, 8, a)
    a.kill()
    b.kill()
    assert_equal_weights(a, b)
    missed = set(a.rounds) - set(b.rounds)
    assert any(step > stopped for step in missed)
    took = [line for line in b.lines if line["what"] == "took"]
    assert [line["of"] for line in took] == ["a", "a"]
    compare_with_oracle([a, b], "int4")  # b begins again without a residual
    # Registered state comes with the state of the others.
    together = [step for step in a.rounds if step in b.rounds and step > stopped]
    assert all(a.rounds[step]["position"] == b.rounds[step]["position"] for step in together)


def _last_round(machine: Machine) -> int:
    """Wait until the machine waits. Returns the outer step after which it does."""
    deadline = time.monotonic() + 30.0
    step = -1
    while max(machine.rounds) > step:
        assert time.monotonic() < deadline, "it trains on"
        step = max(machine.rounds)
        time.sleep(1.5)
    return step


def test_the_lighthouse_is_gone_for_a_while(tmp_path: Path) -> None:
    """Training waits at the next outer step, and goes on when the lighthouse is back at its
    address.
    """
    with lighthouse() as address:
        both = [Machine(JOB, address, tmp_path, name, **MACHINE) for name in "ab"]
        both[0].wait_for(lambda line: line.get("names") == ["a", "b"])
    try:
        before = _last_round(both[0])
        with lighthouse(address.removeprefix("http://")):
            for each in both:
                each.round(before + 5)
            met = both[0].wait_for(
                lambda line: line.get("names") == ["a", "b"] and line["step"] > before + 2
            )
            for each in both:
                each.round(met["step"] + 3)
            assert_equal_weights(*both)
    finally:
        for each in both:
            each.kill()


UNFIT: list[tuple[Any, dict[str, Any]]] = [
    (
        {},
        {
            r"machine b has another model than machine a \(4 parameters, .* and 4 parameters, ": {
                "width": 9
            },
            r"machine b has another hook than machine a \(diloco with .*'int8'.* and .*'int4'": {
                "wire": "int8"
            },
            r"machine b has another wait_for than machine a \(all and first\)": {"wait_for": "all"},
            r"two machines have the name a: give each a name of its own": {"name": "a"},
        },
    ),
    (
        SHARDED,
        {
            r"machine b has another number of ranks than machine a \(1 and 2\)": {
                "world": 1,
                "shards": 1,
            },
            r"machine b has another sharding than machine a \(none and 2 shards, key ": {
                "shards": None
            },
            r"machine b has another sharding than machine a \(2 shards, key .* and 2 shards": {
                "columns": True
            },
        },
    ),
]


@pytest.mark.parametrize("common, sentences", UNFIT, ids=["", "sharded"])
def test_machines_that_do_not_fit(
    start: Callable[..., Machine], tmp_path: Path, common: Any, sentences: dict[str, Any]
) -> None:
    """They are refused, and the other one goes on."""
    a = start("a", **common)
    a.round(1)
    unfit = {}
    for number, (sentence, given) in enumerate(sentences.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        unfit[sentence] = start(**({"name": "b", "folder": folder} | common | given))
    for sentence, machine in unfit.items():
        end = machine.end()
        assert (
            end["what"] == "error"
            and end["type"] == "AttachError"
            and re.search(sentence, end["text"])
        ), end
    a.round(max(a.rounds) + 3)
    assert {name for line in a.rounds.values() for name in line["names"]} == {"a"}
    assert all(len(line["names"]) == 1 for line in a.rounds.values())


def test_a_secret(start: Callable[..., Machine]) -> None:
    """Two machines share it, and one of them heals from the other. Others end, and say why."""
    secret = "correct horse battery"
    shared = {"variables": {"COMMHOOKS_SECRET": secret}}
    a = start("a", **shared)
    a.round(1)
    b = start("b", seed=1, **shared)
    c = start("c")
    d = start("d", variables={"COMMHOOKS_SECRET": "another horse battery"})
    a.wait_for(lambda line: line.get("part") == ["a", "b"])
    for machine, sentence in (
        (c, r"machine c has no secret, and machine [abd] has one: give it the same by COMMHOOKS_"),
        (d, r"machine d has another secret than machine [ab]: start it with the same$"),
    ):
        end = machine.end()
        assert end["type"] == "AttachError" and re.search(sentence, end["text"]), end
    a.round(max(a.rounds) + 3)
    assert_equal_weights(a, b)
    assert [line["of"] for line in b.lines if line["what"] == "took"] == ["a"]
    a.wait_for_text("machine (c has no|d has another) secret, and does not take part")
    assert {name for line in a.rounds.values() for name in line["names"]} == {"a", "b"}
    assert not any("horse" in machine.log.read_text() for machine in (a, b, c, d))


def test_machines_of_two_ranks(start: Callable[..., Machine]) -> None:
    """The ranks of a machine train as one by DDP; one rank of each exchanges."""
    a = start("a", world=2, buffer_bytes=64)
    a.round(1)
    b = start("b", world=2, seed=1, buffer_bytes=64)
    a.wait_for(lambda line: line.get("names") == ["a", "b"])
    a.round(max(a.rounds) + 3)
    b.signal(signal.SIGKILL)
    gone = max(b.rounds)
    c = start("c", world=2, seed=2, buffer_bytes=64)
    a.wait_for(lambda line: line.get("names") == ["a", "c"] and line["step"] > gone + 1)
    c.round(max(a.rounds) + 3)
    by_step: dict[int, set[tuple[str, float]]] = {}
    for each in (a, b, c):
        for line in each.lines:
            if line["what"] == "round":
                by_step.setdefault(line["step"], set()).add((line["weights"], line["seen"]))
    assert len(by_step) > 6 and all(len(found) == 1 for found in by_step.values()), by_step


@pytest.mark.parametrize("given", [{}, SHARDED], ids=["", "sharded"])
def test_min_machines(start: Callable[..., Machine], given: Any) -> None:
    """One machine of two waits for the other one, which has made as many outer steps, with another
    weight; in a sharded model in the shard of the last rank. When it is alone again it can leave,
    within the time that it was given.
    """
    start = functools.partial(start, least=2, wait_s=2.0, every=8, **given)
    a = start("a", hold=3)
    a.wait_for_text("members: 1 of min_machines=2 is here; waiting")
    assert not a.rounds
    b = start("b", shift=1)
    b.round(3)
    a.round(3)
    assert {tuple(line["names"]) for line in a.rounds.values()} == {("a", "b")}
    assert_equal_weights(a, b)
    a.wait_for(lambda line: line["what"] == "holds")
    b.kill()
    a.signal(signal.SIGTERM)
    assert a.end()["sent"] is False
    assert (
        "leaves without its part of the round: members: the other machines did not come"
        in a.log.read_text()
    )


def state_in(machine: Machine, what: str) -> dict[str, Any]:
    """What rank 0 of the machine has saved or loaded."""
    return machine.wait_for(lambda line: line["what"] == what and line["local_rank"] == 0)["state"]


def test_resume_with_other_machines(start: Callable[..., Machine]) -> None:
    """From the checkpoint of one machine of two: as one machine, and as three. Of machines that
    begin with different checkpoints, the one that is behind takes the state of the other.
    """
    momentum = {"options": {"outer_momentum": 0.5}}
    a, b = (start(name, least=2, rounds=4, save=True, **momentum) for name in "ab")
    saved = state_in(a, "saved")
    assert (
        saved["step"] == 4
        and saved["exact"]
        and saved["outer_momentum"][0] == 4
        and saved["residual"][0] > 0
    )
    assert {key: value for key, value in state_in(b, "saved").items() if "residual" not in key} == {
        key: value for key, value in saved.items() if "residual" not in key
    }
    assert (a.end()["weights"], b.end()["what"]) == (saved["weights"], "end")
    c = start("c", load="a", rounds=7, save=True, **momentum)
    assert state_in(c, "loaded") == saved
    assert c.end()["step"] == 7 and list(c.rounds) == [5, 6, 7]
    three = [start(name, load="a", least=3, rounds=10, **momentum) for name in "def"]
    for each in three:
        assert state_in(each, "loaded") == saved
        assert each.end()["step"] == 10 and list(each.rounds) == [*range(5, 11)]
        assert all(line["names"] == ["d", "e", "f"] for line in each.rounds.values())
        assert not [line for line in each.lines if line["what"] == "took"]
    assert_equal_weights(*three)
    files = {"g": "a", "h": "c"}
    behind, ahead = (
        start(name, load=file, least=2, rounds=13, **momentum) for name, file in files.items()
    )
    assert behind.end()["step"] == ahead.end()["step"] == 13
    assert [line["of"] for line in behind.lines if line["what"] == "took"] == ["h"]
    assert_equal_weights(behind, ahead)


def test_resume_of_a_machine_of_two_ranks(start: Callable[..., Machine]) -> None:
    """Its residual is that of rank 0, which alone exchanges. Anchor and momentum are those of both
    ranks, so that either may save.
    """
    given = {"world": 2, "buffer_bytes": 64, "options": {"outer_momentum": 0.5}}
    a = start("a", rounds=4, save=True, **given)
    saved = state_in(a, "saved")
    assert saved["exact"] and saved["residual"][0] > 0 and saved["outer_momentum"][0] == 4
    other = a.wait_for(lambda line: line["what"] == "saved" and line["local_rank"] == 1)["state"]
    assert all(other[key] == saved[key] for key in ("step", "anchor", "outer_momentum"))
    c = start("c", load="a", rounds=6, **given)
    assert state_in(c, "loaded") == saved
    assert c.end()["step"] == 6


def test_resume_of_sharded_machines(start: Callable[..., Machine]) -> None:
    """By torch.distributed.checkpoint, as one machine and as two, with the momentum and the
    optimizer of each shard.
    """
    given = SHARDED | {"options": {"outer_momentum": 0.5}}
    a, b = (start(name, least=2, rounds=4, save=True, **given) for name in "ab")
    for each in (a, b):
        assert each.end()["step"] == 4

    def states(machine: Machine, what: str) -> list[Any]:
        lines = [
            machine.wait_for(lambda line, r=r: line["what"] == what and line["local_rank"] == r)
            for r in (0, 1)
        ]
        return [line["state"] for line in lines]

    saved = states(a, "saved")
    assert [each["learned"] for each in states(b, "saved")] == [each["learned"] for each in saved]
    assert saved[0]["learned"] != saved[1]["learned"]
    three = [start(name, load="a", least=2, rounds=8, **given) for name in "cd"]
    for each in three:
        assert states(each, "loaded") == saved
        assert each.end()["step"] == 8 and list(each.rounds) == [*range(5, 9)]
        assert not [line for line in each.lines if line["what"] == "took"]
    assert_equal_weights(*three)
    alone = start("e", load="a", rounds=6, **given)
    assert states(alone, "loaded") == saved and alone.end()["step"] == 6


@pytest.mark.parametrize(
    "given", [{}, SHARDED, {"world": 4, "shards": 2}], ids=["", "sharded", "replicas"]
)
def test_weights_that_are_not_finite(start: Callable[..., Machine], given: Any) -> None:
    """In the last step of a round, in one shard of one machine: all ranks of all machines discard
    the round.
    """
    a, b = start("a", least=2, **given), start("b", least=2, nan=5 * EVERY - 1, **given)
    for each in (a, b):
        each.wait_for(lambda line: line.get("nonfinite") == 1 and line["step"] > 8)
    assert_equal_weights(a, b)
    for each in (a, b):
        for rank in each.ranks:
            assert {line["nonfinite"] for line in each.rounds_of(rank).values()} == {0, 1}
            assert len({line["weights"] for line in each.rounds_of(rank).values()}) > 6


@pytest.mark.parametrize(
    "members, hook, sentence",
    [
        ("torch", "diloco", "members='torch'; expected 'torchft', commhooks.Torchft"),
        ("torchft", "int8_compress", "members with hook 'int8_compress', which averages gradients"),
        ("torchft", commhooks.DiLoCo(start_iter=5), "members with start_iter=5; expected 0"),
        (
            commhooks.Torchft(lighthouse="http://host:x"),
            "diloco",
            "the address of the lighthouse is 'http://host:x'; expected one with http:// and",
        ),
        (
            commhooks.Torchft(lighthouse="10.0.0.5:29510"),
            "diloco",
            "the address of the lighthouse is '10.0.0.5:29510'; expected one with http:// and a",
        ),
        (
            commhooks.Torchft(lighthouse="http://10.0.0.5"),
            "diloco",
            "the address of the lighthouse is 'http://10.0.0.5'; expected one with http:// and a",
        ),
        ("torchft", "diloco", "members without a lighthouse: set TORCHFT_LIGHTHOUSE="),
        (
            commhooks.Torchft(lighthouse="http://127.0.0.1:1", timeout_s=0.5),
            "diloco",
            (
                "the lighthouse at http://127.0.0.1:1 did not answer within 0.5 s; start it by"
                " `commhooks lighthouse`, or correct TORCHFT_LIGHTHOUSE (Connection refused (os"
            ),
        ),
    ],
)
def test_bad_input(members: Any, hook: Any, sentence: str) -> None:
    with process_group_of_one(), pytest.raises(commhooks.CommHookError) as caught:
        commhooks.attach(new_model(0), hook, members=members)
    assert sentence in str(caught.value)


def _attach_over_two_machines() -> str:
    with (
        mock.patch.dict(os.environ, GROUP_RANK=str(dist.get_rank())),
        pytest.raises(commhooks.AttachError) as caught,
    ):
        model = torch.nn.parallel.DistributedDataParallel(new_model(0))
        commhooks.attach(
            model, "diloco", members=commhooks.Torchft(lighthouse="http://127.0.0.1:1")
        )
    return str(caught.value)


def test_a_model_over_two_machines_is_refused(run_ranks: Callable[..., list[str]]) -> None:
    for sentence in run_ranks(_attach_over_two_machines):
        assert re.match(
            r"members with a model on 2 machines \(\S+ 0, \S+ 1\): each machine starts a job of",
            sentence,
        )


@pytest.mark.parametrize(
    "option, value",
    [
        ("min_machines", 0),
        ("min_machines", 1.5),
        ("wait_for", "last"),
        ("samples_per_step", 0),
        ("timeout_s", 0),
        ("name", ""),
    ],
)
def test_bad_options(option: str, value: object) -> None:
    with pytest.raises(commhooks.HookConfigError, match=f"Torchft: {option}={value!r}; expected"):
        commhooks.Torchft(**{option: value})
