"""Starts a lighthouse and machines as processes that print lines of JSON."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support import warm
from tests.support.repository import PYTHONPATH

_LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
times = {"join_timeout_ms": int(sys.argv[2]), "heartbeat_timeout_ms": int(sys.argv[3])}
server = LighthouseServer(sys.argv[1], 1, quorum_tick_ms=50, **times)
print(server.address(), flush=True)
time.sleep(600)
"""
FRONT_JOB = Path(__file__).with_name("front_job.py")
TORCHFT = ("torchft.coordination", "torchft.process_group")


@contextlib.contextmanager
def lighthouse(
    bind: str = "127.0.0.1:0", wait_s: float = 20.0, dead_s: float = 3.0
) -> Iterator[str]:
    """A lighthouse that runs in the body. Its address. It leaves out machines for which the others
    have waited `wait_s` seconds, and those without a heartbeat for `dead_s`.
    """
    process = subprocess.Popen(
        [
            warm.python(*TORCHFT),
            "-c",
            _LIGHTHOUSE,
            bind,
            f"{wait_s * 1000:.0f}",
            f"{dead_s * 1000:.0f}",
        ],
        env=os.environ | {"RUST_LOG": "off"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip().rpartition(':')[2]}"
    finally:
        process.kill()
        process.wait()


def _is_round_of(line: dict[str, Any], rank: int) -> bool:
    return line["what"] == "round" and line.get("local_rank", 0) == rank


class Machine:
    """A job: `script` with the JSON of `given`, in which `name`, `folder` and `rank` are added.

    Attributes:
        lines: what its processes have printed so far; first {"what": "process", "pid": ...} of
            each, if it is to be stopped (the process of a warm interpreter is another one than the
            one started here).
        processes: one per rank of the machine; `world` in `given`, 1 by default.
        ranks: of its processes.
        log: the file of the standard error.

    `prefix` is a command that starts another one in its environment; `variables` are added to the
    environment.
    """

    def __init__(
        self,
        script: Path,
        lighthouse: str,
        folder: Path,
        name: str,
        *modules: str,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.name = name
        self.lines = list[dict[str, Any]]()
        self.log = folder / f"{name}.log"
        self._news = threading.Condition()
        self._read_all = set[subprocess.Popen[str]]()  # whose output has ended
        self.processes = []
        self.ranks = range(settings.get("world", 1))
        for rank in self.ranks:
            text = json.dumps(settings | {"name": name, "folder": str(folder), "rank": rank})
            with self.log.open("a") as errors:
                started = subprocess.Popen(
                    [
                        *prefix,
                        warm.python(*modules, *TORCHFT),
                        str(script),
                        text,
                    ],
                    env=os.environ
                    | {"TORCHFT_LIGHTHOUSE": lighthouse, "RUST_LOG": "off", "OMP_NUM_THREADS": "1"}
                    | {"PYTHONPATH": PYTHONPATH}
                    | dict(variables or {}),
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self.processes.append(started)
            threading.Thread(target=self._read, args=(started,), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"'):  # the Trainer prints dicts
                with self._news:
                    self.lines.append(json.loads(line))
                    self._news.notify_all()
        with self._news:
            self._read_all.add(process)
            self._news.notify_all()

    def wait_for(
        self, met: Callable[[dict[str, Any]], Any], limit_s: float = 60.0
    ) -> dict[str, Any]:
        """Wait for a line for which `met` is true."""
        with self._news:
            arrived = self._news.wait_for(
                lambda: any(map(met, self.lines)) or self.processes[0] in self._read_all, limit_s
            )
        line = next(filter(met, self.lines), None)
        assert arrived and line is not None, f"{self.lines[-5:]}\n{self.log.read_text()[-4000:]}"
        return line

    def wait_for_text(self, pattern: str, limit_s: float = 60.0) -> None:
        """Wait until the log has a line with `pattern`."""
        deadline = time.monotonic() + limit_s
        while not re.search(pattern, self.log.read_text()):
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.1)

    def round(self, step: int) -> dict[str, Any]:
        """Wait until all ranks have begun the round after outer step `step`, or a later one."""
        return [
            self.wait_for(lambda line, r=rank: _is_round_of(line, r) and line["step"] >= step)  # type: ignore[misc]
            for rank in self.ranks
        ][0]

    @property
    def rounds(self) -> dict[int, dict[str, Any]]:
        return self.rounds_of(0)

    def rounds_of(self, rank: int) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in list(self.lines) if _is_round_of(line, rank)}

    def sent_in(self, step: int) -> int | None:
        """Return after how many steps it has sent what is in outer step `step`; None if it has not
        told.
        """
        if step in self.rounds:
            return int(self.rounds[step]["sent"])
        for line in list(self.lines):
            if line["what"] == "sent" and line["step"] == step - 1:
                return int(line["count"])
            if line["what"] == "end" and line["step"] == step and line["sent"]:
                return int(line["trained"])
        return None

    def kept_in(self, step: int) -> bool:
        """Return whether outer step `step` was behind its training."""
        if step in self.rounds:
            return bool(self.rounds[step]["kept"])
        return any(line["what"] == "sent" and line["step"] == step - 1 for line in list(self.lines))

    def count_in(self, step: int) -> int | None:
        """Return its number of steps at the commit of outer step `step`; None if it has not
        told.
        """
        if step in self.rounds:
            return int(self.rounds[step]["count"])
        for line in list(self.lines):
            if line["what"] == "end" and line["step"] >= step and line["sent"]:
                return int(line["count"])
        return None

    def took_before(self, step: int) -> tuple[str, int]:
        """Return whose state it has taken last before the line of outer step `step`, after which
        outer step; ("", 0) if none.
        """
        taken = ("", 0)
        for line in list(self.lines):
            if line["what"] == "took" and line["local_rank"] == 0:
                taken = line["of"], line["step"]
            if _is_round_of(line, 0) and line["step"] >= step:
                break
        return taken

    def end(self) -> dict[str, Any]:
        """Wait for the last line and the end of the process."""
        last = self.wait_for(lambda line: line["what"] in ("end", "error"))
        assert self.processes[0].wait(60) == 0
        return last

    def signal(self, number: int) -> None:
        for line in list(self.lines):
            if line["what"] == "process":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(line["pid"], number)

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def assert_equal(*machines: Machine, began_together: bool = False) -> None:
    """The machines have the same weights, progress and learning rate at each outer step that they
    took together. A machine that has come has a state of the optimizer that the first one had.
    """
    for rank in machines[0].ranks:
        rounds = [machine.rounds_of(rank) for machine in machines]
        compared = 0
        for step in sorted(set().union(*rounds)):
            there = [
                of_machine[step]
                for of_machine in rounds
                if step in of_machine and len(of_machine[step]["names"]) > 1
            ]
            if len(there) > 1:
                alike = [
                    {name: x for name, x in line.items() if name != "moments"} for line in there
                ]
                assert all(line == alike[0] for line in alike), there
                if not compared and not began_together:
                    moments = [line["moments"] for line in rounds[0].values()]
                    assert there[-1]["moments"] in moments, (there, moments)
                compared += 1
        assert compared > 3


def one_gets_sigterm(
    folder: Path, *modules: str, **settings: Any
) -> tuple[Machine, dict[str, Any]]:
    """Two machines train by front_job.py, and b gets SIGTERM in mid-round: it ends the round early,
    together with a, which goes on alone at once. (transformers stops some seconds later, maybe at
    the end of a round, and has then no part to send.) Returns a and the last line of b.
    """
    (folder / "slow").touch()
    with lighthouse(wait_s=90.0, dead_s=5.0) as address:
        new = functools.partial(Machine, FRONT_JOB, address, folder, steps=10_000, **settings)
        first = new("a", *modules, seed=0)
        first.round(2)
        second = new("b", *modules, seed=1, sigterm=5)
        try:
            end = second.end()
            first.wait_for(
                lambda line: line.get("names") == ["a"] and line["step"] > end["round"], 60.0
            )
            last = first.rounds[end["round"]]
            assert last["names"] == ["a", "b"] and last["weights"] == end["weights"], (last, end)
            log = second.log.read_text()
            in_mid_round = end["steps"] % 5 != 0
            assert (
                "this machine leaves, and has sent its part of the round" in log
            ) == in_mid_round, log
        finally:
            first.kill()
            second.kill()
    assert_equal(first, second)
    return first, end


def one_is_slower(folder: Path, *modules: str, **given: Any) -> None:
    """Two machines train 40 steps by front_job.py, one of which takes much longer for a step. Its
    step count and learning rate follow those of the other one, and both end with the same round,
    of 4 steps instead of 9: the other one leaves between two steps, and this one counts the step in
    which it follows.
    """
    with lighthouse() as address:
        new = functools.partial(
            Machine, FRONT_JOB, address, folder, seed=0, steps=40, every=9, least=2, **given
        )
        both = new("a", *modules), new("b", *modules, lag_s=0.4)
        try:
            for machine, steps in zip(both, (40, 41), strict=True):
                end = machine.end()
                assert (end["steps"], end["round"]) == (steps, 5), (machine.name, end)
        finally:
            for machine in both:
                machine.kill()
    assert_equal(*both, began_together=True)
    trained = [line["steps"] for line in both[1].lines if line["what"] == "trained"]
    assert trained[-1] < 30, trained


def one_comes_and_is_killed(
    folder: Path, *modules: str, **settings: Any
) -> tuple[Machine, Machine, dict[str, Any]]:
    """Machine a trains `given["steps"]` steps by front_job.py. b comes later, with other weights,
    trains some rounds with it, and is killed. Returns both and the last line of a.
    """
    slow = folder / "slow"
    slow.touch()
    # the ranks of a machine find each other in the store of this process, as in that of torchrun
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)
    ]
    with lighthouse(wait_s=90.0, dead_s=5.0) as address:
        new = functools.partial(Machine, FRONT_JOB, address, folder, **settings)
        first = new("a", *modules, seed=0, port=stores[0].port)
        started = [first]
        try:
            first.round(2)
            second = new("b", *modules, seed=1, port=stores[1].port, sigkill=4)
            started.append(second)
            first.wait_for(lambda line: line.get("names") == ["a", "b"])
            assert second.processes[0].wait(60) == -signal.SIGKILL
            second.kill()
            slow.unlink()
            end = first.end()
        finally:
            for machine in started:
                machine.kill()
    assert_equal(first, second)
    assert end["steps"] == settings["steps"] and end["names"] == ["a"]
    assert end["round"] == settings["steps"] // 5 and sorted(first.rounds) == [
        *range(1, end["round"] + 1)
    ]
    return first, second, end
