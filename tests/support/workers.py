"""A pool of persistent worker processes: multi-rank tests without starting Python and torch for
each of them.

    # a fixture of conftest.py
    results = run_ranks(fn, *args, world_size=2, timeout_s=120, init=True, **kwargs)

Worker `i` is rank `i`; what it does is in `worker_side.py`. It is started when the first test asks
for it, forked from a process that has imported torch (`warm.py`; with `COMMHOOKS_TEST_CUDA=1` it is
started alone), uses one thread, and is kept for the tests that follow.
`worker_pool.import_first("lightning.pytorch")` has the same done for other modules, in new workers.
For one task every worker takes part in

    parent                             worker
    ("task", rank, ..., payload)  ->
                                       joins a fresh gloo group (file store in a temporary
                                       directory, no ports) calls fn(*args, **kwargs)
                                  <-   ("answer", result or failure)
    ("finish",)                   ->   sent once every rank has answered, or at once when one has
                                       failed destroys the group, looks for leaks, puts back what it
                                       can
                                  <-   ("leaks", list of sentences)

so that no rank closes its connections while another still talks to it, and a failed rank closes
them at once, which ends the collectives that the others wait in. Payloads travel as bytes of
`torch.save`: tensors by value, no shared memory. Whatever goes wrong ends in one `RanksFailed` in
the parent that shows all ranks.
"""

import atexit
import contextlib
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.repository import PYTHONPATH
from tests.support.worker_side import FINISH_TIMEOUT_S, RankFailure, from_bytes, to_bytes

MAX_WORLD_SIZE = 32
START_TIMEOUT_S = 120.0  # importing torch on a busy machine, not part of a task's limit
STACK_TIMEOUT_S = 5.0  # for the stacks of workers that hang, on a busy machine


_WORKER = "import sys; from tests.support.worker_side import worker_main; worker_main(sys.argv[1])"


class RanksFailed(AssertionError):
    """At least one rank raised, leaked, died or did not answer. The message shows all of them."""

    def __init__(self, message: str, errors: dict[int, RankFailure]) -> None:
        super().__init__(message)
        self.errors = errors  # only the ranks that raised


class WorkerPool:
    """The workers of one pytest session. Not thread-safe: one task at a time."""

    def __init__(self) -> None:
        # index = rank; see `warm.py` for what they are
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pids: list[int] = []
        self._modules: tuple[str, ...] = ()
        self._connections: list[multiprocessing.connection.Connection] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._task_count = 0
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers, by rank."""
        return list(self._pids)

    def import_first(self, *modules: str) -> None:
        """Start further workers with these modules imported, at no cost in each of them."""
        if not set(modules) <= set(self._modules):
            self.close()
            self._modules += modules

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout_s: float = 120.0,
        init: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` in `world_size` workers and returns what they returned, by
        rank.

        `fn` must be importable (a function at the top level of a test module). With `init=True` the
        default process group is a fresh gloo group of `world_size` ranks, destroyed afterwards;
        with `init=False` there is none, and `fn` must destroy what it creates. Every rank starts
        from the same seeds. `timeout_s` limits the whole task.

        Raises `RanksFailed` with the tracebacks of all ranks that raised, or which ranks leaked,
        died or did not answer in time (then the pool is killed, and the next call starts a new
        one).
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_WORLD_SIZE} workers")
        try:
            self._grow(world_size)
            return self._run_task(fn, args, kwargs, world_size, timeout_s, init)
        except RanksFailed:
            raise
        except (
            BaseException
        ):  # Ctrl-C or pytest-timeout: the workers are somewhere in the middle of a task
            self.kill()
            raise

    def close(self) -> None:
        """End the workers: idle ones exit when their pipe closes, others are killed."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill every worker. The next task starts new ones."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(
                        self._pids[rank] if rank < len(self._pids) else process.pid, signal.SIGKILL
                    )
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._pids = [], [], []
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _grow(self, world_size: int) -> None:
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(
                prefix="commhooks-tests-", ignore_cleanup_errors=True
            )
        new = range(len(self._processes), world_size)
        for index in new:
            ours, theirs = socket.socketpair()
            # Strings have other hashes in every second worker: an order that depends on them must
            # not go unnoticed.
            python = _cuda_python() or warm.python(*self._modules, server=index % 2)
            command = [python, "-c", _WORKER, str(self._stack_file(index))]
            environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
            self._processes.append(subprocess.Popen(command, stdin=theirs, env=environ))
            theirs.close()  # so that reading from a dead worker ends with EOFError
            self._connections.append(multiprocessing.connection.Connection(ours.detach()))
        answers = self._collect(list(new), START_TIMEOUT_S)
        if len(answers) < len(new):
            missing = sorted(set(new) - set(answers))
            self.kill()
            raise RanksFailed(f"workers {missing} did not start within {START_TIMEOUT_S:g} s", {})
        self._pids += [answers[index][1] for index in new]

    def _run_task(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        world_size: int,
        timeout_s: float,
        init: bool,
    ) -> list[Any]:
        assert self._scratch is not None
        self._task_count += 1
        store = os.path.join(self._scratch.name, f"store-{self._task_count}") if init else None
        headline = f"{getattr(fn, '__qualname__', fn)} on {world_size} ranks\n"
        ranks = list(range(world_size))
        payload = to_bytes((fn, args, kwargs))
        for rank in ranks:
            # a worker that died since the last task: found when reading from it
            with contextlib.suppress(OSError):
                self._connections[rank].send(
                    ("task", rank, world_size, store, timeout_s, list(sys.path), payload)
                )

        finishing = False

        def finish() -> None:
            nonlocal finishing
            if not finishing:
                finishing = True
                for rank in ranks:
                    with contextlib.suppress(OSError):
                        self._connections[rank].send(("finish",))

        answers = self._collect(
            ranks, timeout_s, on_message=lambda answer: answer[2] is not None and finish()
        )
        if len(answers) < world_size:
            raise self._lost(headline, ranks, answers, f"did not answer within {timeout_s:g} s")
        finish()
        leaks = self._collect(ranks, FINISH_TIMEOUT_S)
        if len(leaks) < world_size:
            raise self._lost(
                headline,
                ranks,
                answers,
                f"did not clean up within {FINISH_TIMEOUT_S:g} s",
                cleaned=leaks,
            )
        if store is not None:
            Path(store).unlink(missing_ok=True)

        errors = _errors(answers)
        problems = [_describe(rank, error) for rank, error in errors.items()]
        for rank in ranks:
            problems += [f"rank {rank} leaked: {leak}" for leak in leaks[rank][1]]
        if any(leaks[rank][2] for rank in ranks):
            self.kill()  # a leak that cannot be undone
        if problems:
            raise RanksFailed(headline + "\n\n".join(problems), errors)
        return [from_bytes(answers[rank][1]) for rank in ranks]

    def _collect(
        self, ranks: list[int], timeout_s: float, on_message: Callable[[Any], object] | None = None
    ) -> dict[int, Any]:
        """Return a message of each rank that has not died and sent one within `timeout_s`."""
        waiting = {self._connections[rank]: rank for rank in ranks}
        messages: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        lost = False
        while waiting:
            ready = multiprocessing.connection.wait(
                list(waiting), max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, multiprocessing.connection.Connection)
                rank = waiting.pop(connection)
                try:
                    messages[rank] = connection.recv()
                except (EOFError, OSError):
                    lost = True
                else:
                    if on_message is not None:
                        on_message(messages[rank])
            # the task has failed: what the others have to say is worth a moment, not the whole
            # limit
            if lost:
                deadline = min(deadline, time.monotonic() + 2.0)
        return messages

    def _lost(
        self,
        headline: str,
        ranks: list[int],
        answers: dict[int, Any],
        complaint: str,
        cleaned: dict[int, Any] | None = None,
    ) -> RanksFailed:
        """Name the ranks that are missing in the last round of messages, and kill the pool."""
        done = answers if cleaned is None else cleaned
        silent = [rank for rank in ranks if rank not in done]
        for rank in silent:
            # one that hangs says nothing
            ends = self._connections[rank].closed or self._connections[rank].poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[rank].wait(5 if ends else 0.2)
        alive = [rank for rank in silent if self._processes[rank].poll() is None]
        for rank in alive:  # faulthandler in the worker writes the stacks of all its threads
            with contextlib.suppress(OSError, AttributeError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        sizes: list[int] = []
        deadline = time.monotonic() + (STACK_TIMEOUT_S if alive else 0)
        while time.monotonic() < deadline:  # until all of them are written and grow no more
            time.sleep(0.25)
            before = sizes
            sizes = [self._stack_file(rank).stat().st_size for rank in alive]
            if all(sizes) and sizes == before:
                break
        if len(alive) < len(silent):
            complaint = "had not answered when another rank died"
        problems = []
        for rank in silent:
            end = (
                complaint
                if rank in alive
                else f"died (exit code {self._processes[rank].returncode})"
            )
            stack = self._stack_file(rank).read_text(errors="replace")
            problems.append(f"rank {rank} {end}" + (f"; it was here:\n{stack}" if stack else ""))
        errors = _errors(answers)
        problems += [_describe(rank, error) for rank, error in errors.items()]
        self.kill()
        return RanksFailed(
            f"{headline}{len(silent)} of the ranks lost\n" + "\n\n".join(problems), errors
        )

    def _stack_file(self, index: int) -> Path:
        assert self._scratch is not None
        return Path(self._scratch.name) / f"stack-{index}.txt"


def _cuda_python() -> str | None:
    """Return a Python without a server, because a fork of a process with a CUDA driver has none."""
    return sys.executable if os.environ.get("COMMHOOKS_TEST_CUDA") == "1" else None


def _errors(answers: dict[int, Any]) -> dict[int, RankFailure]:
    return {rank: answer[2] for rank, answer in sorted(answers.items()) if answer[2] is not None}


def _describe(rank: int, failure: RankFailure) -> str:
    return f"rank {rank} raised {failure.type_name}: {failure.message}\n{failure.traceback}"
