"""Processes on both sides of a link of `namespaces.py`, which receive jobs as lines of JSON."""

import contextlib
import datetime
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from common import Row, steady
from namespaces import SUBNET, Link

PORT = 29500  # of the first node, in its namespace


def run_worker(worker: Callable[..., None]) -> None:
    """Connect to the other ranks over the link, and call `worker` with this rank's arguments. Runs in a process of
    `LinkRanks`."""
    place = json.loads(sys.argv[1])
    group = {"rank": place["rank"], "world_size": place["world_size"], "timeout": datetime.timedelta(minutes=30)}
    with steady(place["rank"]):
        dist.init_process_group("gloo", init_method=f"tcp://{SUBNET}.1:{PORT}", **group)
        worker(**place)


def bytes_sent(interface: str) -> int:
    """Return the bytes that a network interface has sent so far, including headers."""
    return int(Path("/sys/class/net", interface, "statistics", "tx_bytes").read_text())


def serve(rank: int, ready: Row, job: Callable[..., Row]) -> NoReturn:
    """Run the jobs of `LinkRanks`. Rank 0 writes `ready` at once, and the result of `job` for each job."""
    answer = ready
    while True:
        if rank == 0:
            print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # gloo sometimes aborts at interpreter shutdown, with or without a hook
        answer = job(**json.loads(line))


class LinkRanks:
    """Context manager: processes that run `worker`, each in the namespace of its node.

    Args:
        worker: a script. Its argument is JSON: rank, world_size, ranks_per_node, interface, and `order`. It reads a job
            per line from its standard input. Rank 0 writes a line of JSON when all are ready, and one for each job.
    """

    def __init__(self, link: Link, worker: Path, ranks_per_node: int = 1, **order: Any) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        world_size = len(link.namespaces) * ranks_per_node
        self._folder = tempfile.TemporaryDirectory()
        self.errors = [Path(self._folder.name, f"rank_{rank}.txt") for rank in range(world_size)]
        for rank, (namespace, interface) in enumerate(each for each in link.ends() for _ in range(ranks_per_node)):
            place = {"rank": rank, "world_size": world_size, "ranks_per_node": ranks_per_node, "interface": interface}
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
            self.processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", namespace, sys.executable, str(worker), json.dumps(place | order)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=open(self.errors[rank], "w"),
                    text=True,
                )
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            if not line.startswith("[Gloo]"):  # torch 2.8's says here who is connected
                self._answers.put(line)

    def answer(self, timeout_s: float) -> Row:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(queue.Empty):
                return json.loads(self._answers.get(timeout=0.5))
            ended = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                what = f"rank {ended[0]} has ended" if ended else f"no answer in {timeout_s:.0f} s"
                tail = "\n".join(self.errors[ended[0] if ended else 0].read_text().splitlines()[-15:])
                raise RuntimeError(f"{what}; the last that it said:\n{tail}")

    def job(self, timeout_s: float, **order: Any) -> Row:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        return self.answer(timeout_s)

    def __enter__(self) -> "LinkRanks":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._folder.cleanup()
