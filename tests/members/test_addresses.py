"""Machines with addresses of their own, in network namespaces: which of them reach each other, and
what follows.
"""

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.machines import TORCHFT, Machine
from tests.support.namespaces import Hosts, hosts, missing
from tests.support.repository import PYTHONPATH

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(reason := missing()), reason=reason or "it can"),
]
JOB = Path(__file__).parents[1] / "support" / "member_job.py"


@pytest.fixture
def net() -> Iterator[Hosts]:
    with hosts("abc") as made:
        yield made


@pytest.fixture
def start(net: Hosts, tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Starts a machine on the host of its name, with a lighthouse on the router, whose printed
    address it takes.
    """
    command = [
        "ip",
        "netns",
        "exec",
        net.router,
        warm.python(*TORCHFT),
        "-m",
        "commhooks",
        "lighthouse",
        "--wait-s",
        "30",
    ]
    started: list[Machine] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": PYTHONPATH}
    ) as lighthouse:
        assert lighthouse.stdout is not None
        printed = re.fullmatch(
            r"export TORCHFT_LIGHTHOUSE=(http://10\.91\.\d\.1:\d+)\n", lighthouse.stdout.readline()
        )
        assert printed, "it is no address of the router"

        def new(name: str, variables: Any = None, **given: Any) -> Machine:
            variables = (
                {"GLOO_SOCKET_IFNAME": net.interface(name)} if variables is None else variables
            )
            given = {
                "every": 4,
                "wire": "float32",
                "steps": 10_000,
                "timeout_s": 60.0,
                "sleep_s": 0.05,
            } | given
            prefix = net.command(name)
            started.append(
                Machine(
                    JOB, printed[1], tmp_path, name, prefix=prefix, variables=variables, **given
                )
            )
            return started[-1]

        yield new
        for machine in started:
            machine.kill()
        lighthouse.kill()


def test_a_machine_that_cannot_be_reached_is_left_out_and_comes_back(
    net: Hosts, start: Callable[..., Machine]
) -> None:
    """Its name sorts first. The others train on, and each says why; when it can be reached, it
    takes part. In between one was asleep, so that the connections of the others are old.
    """
    b, c = start("b"), start("c")
    c.wait_for(lambda line: line.get("part") == ["b", "c"])
    net.cut("a", off=True)
    a = start("a")
    pair = "(a cannot connect with [bc]|[bc] cannot connect with a)"
    a.wait_for_text(rf"a does not take part, because {pair}.* \(a is at 10\.91\.1\.2:\d+\)")
    began, before = time.monotonic(), max(b.rounds)
    b.round(before + 10)
    assert time.monotonic() - began < 20 and b.rounds[before + 5]["names"] == ["b", "c"]
    b.wait_for_text(
        r"a does not take part, because .* cannot connect .* \(a is at 10\.91\.1\.2:\d+\)"
    )
    net.cut("a", off=False)
    a.wait_for(lambda line: line.get("part") == ["a", "b", "c"])
    # b sleeps so long that the others take it for dead, and connect without it.
    b.signal(signal.SIGSTOP)
    c.wait_for(lambda line: line.get("part") == ["a", "c"])
    b.signal(signal.SIGCONT)
    woke, step = time.monotonic(), max(c.rounds)
    c.wait_for(lambda line: line.get("part") == ["a", "b", "c"] and line["step"] > step)
    assert time.monotonic() - woke < 20, "they waited for a connection that is gone"


def test_a_machine_whose_gloo_would_listen_at_loopback_is_told_what_to_set(
    start: Callable[..., Machine],
) -> None:
    end = start("a", variables={}).end()
    assert end["type"] == "AttachError"
    assert re.search(
        r"gloo would listen at 127\.0\.\d\.1, .*: set GLOO_SOCKET_IFNAME=a0$", end["text"]
    ), end["text"]
