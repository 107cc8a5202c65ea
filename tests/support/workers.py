"""A pool of persistent worker processes: multi-rank tests without starting Python and torch for each of them.

    results = run_ranks(fn, *args, world_size=2, timeout_s=60, init=True, **kwargs)     # a fixture of conftest.py

Worker `i` is rank `i`. It is started when the first test asks for it, forked from a process that has imported torch
(`warm.py`; with `COMMHOOKS_TEST_CUDA=1` it is started alone), uses one thread, and is kept for the tests that follow.
`worker_pool.import_first("lightning.pytorch")` has the same done for other modules, in new workers. For one task every
worker takes part in

    parent                             worker
    ("task", rank, ..., payload)  ->
                                       joins a fresh gloo group (file store in a temporary directory, no ports)
                                       calls fn(*args, **kwargs)
                                  <-   ("answer", result or failure)
    ("finish",)                   ->   sent once every rank has answered, or at once when one has failed
                                       destroys the group, looks for leaks, puts back what it can
                                  <-   ("leaks", list of sentences)

so that no rank closes its connections while another still talks to it, and a failed rank closes them at once, which
ends the collectives that the others wait in. Payloads travel as bytes of `torch.save`: tensors by value, no shared
memory. Whatever goes wrong ends in one `RanksFailed` in the parent that shows all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import io
import logging
import multiprocessing.connection
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import warm
from registries import registries_as_before

MAX_WORLD_SIZE = 6
COLLECT_EVERY = 8
"""Tasks of a worker between two garbage collections. Every gloo group that is not collected keeps three threads."""
START_TIMEOUT_S = 120.0  # importing torch on a busy machine, not part of a task's limit
GROUP_TIMEOUT_S = 30.0  # of a collective; below the default task limit, so that a lost rank shows as torch's own error
FINISH_TIMEOUT_S = 15.0  # for destroying the group and looking for leaks
STACK_TIMEOUT_S = 5.0  # for the stacks of workers that hang, on a busy machine
THREAD_GRACE_S = 2.0  # for threads that are about to end
_SELF_DESTRUCT_S = 30.0  # beyond the task's limit: no worker stays behind for ever, not even one that hangs in C++


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """What one rank raised: the name of the exception's class, its text, and the traceback as text."""

    type_name: str
    message: str
    traceback: str


class RanksFailed(AssertionError):
    """At least one rank raised, leaked, died or did not answer; the message shows every one of them."""

    def __init__(self, message: str, errors: dict[int, RankFailure]) -> None:
        super().__init__(message)
        self.errors = errors  # only the ranks that raised


# ----------------------------------------------------------------------------------------------------- in the parent


class WorkerPool:
    """The workers of one pytest session. Not thread-safe: one task at a time."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []  # index = rank; see `warm.py` for what they are
        self._pids: list[int] = []
        self._modules: tuple[str, ...] = ()
        self._connections: list[multiprocessing.connection.Connection] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._task_count = 0
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that are there, by rank."""
        return list(self._pids)

    def import_first(self, *modules: str) -> None:
        """From now on, workers have imported these already, without the cost of doing it in each."""
        if not set(modules) <= set(self._modules):
            self.close()
            self._modules += modules

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout_s: float = 60.0,
        init: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` in `world_size` workers and returns what they returned, by rank.

        `fn` must be importable (a function at the top level of a test module). With `init=True` the default process
        group is a fresh gloo group of `world_size` ranks, destroyed afterwards; with `init=False` there is none, and
        `fn` must destroy what it creates. Every rank starts from the same seeds. `timeout_s` limits the whole task.

        Raises `RanksFailed` with the tracebacks of all ranks that raised, or which ranks leaked, died or did not
        answer in time (then the pool is killed, and the next call starts a new one).
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_WORLD_SIZE} workers")
        try:
            self._grow(world_size)
            return self._run_task(fn, args, kwargs, world_size, timeout_s, init)
        except RanksFailed:
            raise
        except BaseException:  # Ctrl-C or pytest-timeout: the workers are somewhere in the middle of a task
            self.kill()
            raise

    def close(self) -> None:
        """Ends the workers: idle ones leave by themselves when their pipe closes, others are killed."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills every worker; the next task starts new ones."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[rank] if rank < len(self._pids) else process.pid, signal.SIGKILL)
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
            self._scratch = tempfile.TemporaryDirectory(prefix="commhooks-tests-", ignore_cleanup_errors=True)
        new = range(len(self._processes), world_size)
        for index in new:
            ours, theirs = socket.socketpair()
            # Strings have other hashes in every second worker: an order that depends on them must not go unnoticed.
            python = _cuda_python() or warm.python(*self._modules, server=index % 2)
            command = [python, str(Path(__file__).with_name("one_worker.py")), str(self._stack_file(index))]
            self._processes.append(subprocess.Popen(command, stdin=theirs))
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
        payload = _to_bytes((fn, args, kwargs))
        for rank in ranks:
            with contextlib.suppress(OSError):  # a worker that died since the last task: found when reading from it
                self._connections[rank].send(("task", rank, world_size, store, timeout_s, list(sys.path), payload))

        finishing = False

        def finish() -> None:
            nonlocal finishing
            if not finishing:
                finishing = True
                for rank in ranks:
                    with contextlib.suppress(OSError):
                        self._connections[rank].send(("finish",))

        answers = self._collect(ranks, timeout_s, on_message=lambda answer: answer[2] is not None and finish())
        if len(answers) < world_size:
            raise self._lost(headline, ranks, answers, f"did not answer within {timeout_s:g} s")
        finish()
        leaks = self._collect(ranks, FINISH_TIMEOUT_S)
        if len(leaks) < world_size:
            raise self._lost(headline, ranks, answers, f"did not clean up within {FINISH_TIMEOUT_S:g} s", cleaned=leaks)
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
        return [_from_bytes(answers[rank][1]) for rank in ranks]

    def _collect(
        self, ranks: list[int], timeout_s: float, on_message: Callable[[Any], object] | None = None
    ) -> dict[int, Any]:
        """One message of each rank; without those ranks that died or did not send one within `timeout_s`."""
        waiting = {self._connections[rank]: rank for rank in ranks}
        messages: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        lost = False
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
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
            if lost:  # the task has failed: what the others have to say is worth a moment, not the whole limit
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
        """Describes the ranks that are missing in the last round of messages, and kills the pool."""
        done = answers if cleaned is None else cleaned
        silent = [rank for rank in ranks if rank not in done]
        for rank in silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[rank].wait(0.2)
        alive = [rank for rank in silent if self._processes[rank].poll() is None]
        for rank in alive:  # faulthandler in the worker writes the stacks of all its threads
            with contextlib.suppress(OSError, AttributeError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        sizes: list[int] = []
        deadline = time.monotonic() + (STACK_TIMEOUT_S if alive else 0)
        while time.monotonic() < deadline:  # until all of them are written and grow no more
            time.sleep(0.25)
            before, sizes = sizes, [self._stack_file(rank).stat().st_size for rank in alive]
            if all(sizes) and sizes == before:
                break
        if len(alive) < len(silent):
            complaint = "had not answered when another rank died"
        problems = []
        for rank in silent:
            end = complaint if rank in alive else f"died (exit code {self._processes[rank].returncode})"
            stack = self._stack_file(rank).read_text(errors="replace")
            problems.append(f"rank {rank} {end}" + (f"; it was here:\n{stack}" if stack else ""))
        errors = _errors(answers)
        problems += [_describe(rank, error) for rank, error in errors.items()]
        self.kill()
        return RanksFailed(f"{headline}{len(silent)} of the ranks lost\n" + "\n\n".join(problems), errors)

    def _stack_file(self, index: int) -> Path:
        assert self._scratch is not None
        return Path(self._scratch.name) / f"stack-{index}.txt"


def _cuda_python() -> str | None:
    """Python without a server, for tests with CUDA: a process whose parent has asked the driver cannot use it."""
    return sys.executable if os.environ.get("COMMHOOKS_TEST_CUDA") == "1" else None


def _errors(answers: dict[int, Any]) -> dict[int, RankFailure]:
    return {rank: answer[2] for rank, answer in sorted(answers.items()) if answer[2] is not None}


def _describe(rank: int, failure: RankFailure) -> str:
    return f"rank {rank} raised {failure.type_name}: {failure.message}\n{failure.traceback}"


# ----------------------------------------------------------------------------------------------------- in the worker


def worker_main(stack_path: str) -> None:
    """What `one_worker.py` does; standard input is the connection to the parent."""
    connection = multiprocessing.connection.Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    stack_file = open(stack_path, "w")  # noqa: SIM115 - stays open as long as the worker lives
    faulthandler.enable(file=stack_file)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    connection.send(("ready", os.getpid()))
    tasks = 0
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):  # the parent is gone or has closed the pool
            return
        _, rank, world_size, store, timeout_s, sys_path, payload = message
        sys.path[:] = sys_path
        if hasattr(signal, "SIGUSR1"):
            # Anew for every task: Lightning installs a handler for this signal in a batch job, and takes out ours.
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        faulthandler.dump_traceback_later(timeout_s + FINISH_TIMEOUT_S + _SELF_DESTRUCT_S, exit=True, file=stack_file)
        before = _Surroundings.now()
        connection.send(("answer", *_call(payload, rank, world_size, store)))
        try:
            connection.recv()  # "finish"
        except (EOFError, OSError):
            return
        leaks = []
        if dist.is_initialized():
            if store is None:
                leaks.append("a process group (destroy what the function itself creates)")
            dist.destroy_process_group()
        _forget_meshes()
        tasks += 1
        if tasks % COLLECT_EVERY == 0:  # hook and model refer to each other: until then their groups' threads live on
            gc.collect()
        more_leaks, beyond_repair = before.restore()
        faulthandler.cancel_dump_traceback_later()
        connection.send(("leaks", leaks + more_leaks, beyond_repair))


def _forget_meshes() -> None:
    """DTensor (torch 2.13) caches results of operations by mesh, and takes a mesh of the next task, of the same shape
    but with other groups, for the one of this task."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _leave_with_parent() -> None:
    parent = os.getppid()  # it ends when the tests end
    while os.getppid() == parent:  # a killed parent cannot end its workers, and in the middle of a task none listens
        time.sleep(1)
    os._exit(1)


def _call(payload: bytes, rank: int, world_size: int, store: str | None) -> tuple[bytes | None, RankFailure | None]:
    """The pickled result and None, or None and the failure."""
    try:
        with warnings.catch_warnings():  # also forgets which warnings were shown, so that "warns once" can be tested
            fn, args, kwargs = _from_bytes(payload)
            random.seed(0)
            torch.manual_seed(0)
            if store is not None:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, world_size),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=GROUP_TIMEOUT_S),
                )
            with registries_as_before():
                return _to_bytes(fn(*args, **kwargs)), None
    except BaseException as error:  # SystemExit and pytest's own exceptions too: the worker must live on
        failure = RankFailure(type(error).__name__, str(error), traceback.format_exc())
        # A failed rank says goodbye at once: the ranks that wait for it in a collective get an error, not a time-out.
        if store is not None and dist.is_initialized():
            # torch 2.13: the end of a gloo group waits, with the GIL, for threads that may need the GIL to let go of
            # an all-reduce that is just over. A moment without the GIL lets them.
            time.sleep(0.05)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        return None, failure


@dataclasses.dataclass(frozen=True)
class _Surroundings:
    """What a task must leave as it found it."""

    environ: dict[str, str]
    settings: dict[str, Any]
    threads: frozenset[threading.Thread]
    log_handlers: tuple[logging.Handler, ...]

    @staticmethod
    def now() -> _Surroundings:
        return _Surroundings(
            dict(os.environ),
            {name: get() for name, (get, _) in _SETTINGS.items()},
            frozenset(threading.enumerate()),
            tuple(logging.getLogger().handlers),
        )

    def restore(self) -> tuple[list[str], bool]:
        """Puts everything back; returns a sentence per leak and whether one of them could not be undone."""
        leaks = []
        now = dict(os.environ)
        for name in sorted(now.keys() | self.environ.keys()):
            if name in _SET_BY_TORCH:
                continue
            if now.get(name) != self.environ.get(name):
                leaks.append(f"environment variable {name}: {self.environ.get(name)!r} became {now.get(name)!r}")
                if name in self.environ:
                    os.environ[name] = self.environ[name]
                else:
                    del os.environ[name]
        for name, (get, put) in _SETTINGS.items():
            if get() != self.settings[name]:
                leaks.append(f"{name}: {self.settings[name]} became {get()}")
                put(self.settings[name])
        if tuple(logging.getLogger().handlers) != self.log_handlers:
            leaks.append("handlers of the root logger")
            logging.getLogger().handlers[:] = self.log_handlers
        left = list(self._threads_left())
        leaks += [f"non-daemon thread {thread.name!r}" for thread in left]
        return leaks, bool(left)

    def _threads_left(self) -> Iterator[threading.Thread]:
        deadline = time.monotonic() + THREAD_GRACE_S
        for thread in threading.enumerate():
            if thread not in self.threads and not thread.daemon:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    yield thread


_SET_BY_TORCH = (
    "TORCHINDUCTOR_CACHE_DIR",  # when an optimizer first imports inductor
    "CUDA_MODULE_LOADING",  # up to torch 2.11, when CUDA is first used
)
"""Environment variables that torch sets for good."""

# Name -> how to read it and how to put it back.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "autocast on CPU": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda enabled: torch.set_autocast_enabled("cpu", enabled),
    ),
    "working directory": (os.getcwd, os.chdir),
}


# ------------------------------------------------------------------------------------------------------------ pickles


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
