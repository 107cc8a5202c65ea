"""The worker's side of `workers.py`: runs one task after another, each in a group of its own."""

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import io
import logging
import multiprocessing.connection
import os
import pkgutil
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import commhooks
from tests.support.registries import registries_as_before

# All modules, before a test replaces a name in one that another one imports from.
for _module in pkgutil.walk_packages(commhooks.__path__, "commhooks."):
    if not _module.name.endswith(("__main__", "triton_kernel")):
        importlib.import_module(_module.name)

FINISH_TIMEOUT_S = 15.0  # for destroying the group and looking for leaks
# of a collective; below the default task limit, so that a lost rank shows as torch's own error
GROUP_TIMEOUT_S = 30.0
_SELF_DESTRUCT_S = (
    30.0  # beyond the task's limit: no worker stays behind for ever, not even one that hangs in C++
)


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """An exception on one rank: the name of its class, its text, and the traceback as text."""

    type_name: str
    message: str
    traceback: str


def to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def worker_main(stack_path: str) -> None:
    """Run tasks until the parent closes the connection, which is standard input."""
    connection = multiprocessing.connection.Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    stack_file = open(stack_path, "w")  # noqa: SIM115 - stays open as long as the worker lives
    faulthandler.enable(file=stack_file)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    connection.send(("ready", os.getpid()))
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):  # the parent is gone or has closed the pool
            return
        _, rank, world_size, store, timeout_s, sys_path, payload = message
        sys.path[:] = sys_path
        if hasattr(signal, "SIGUSR1"):
            # Anew for every task: Lightning installs a handler for this signal in a batch job, and
            # takes out ours.
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        faulthandler.dump_traceback_later(
            timeout_s + FINISH_TIMEOUT_S + _SELF_DESTRUCT_S, exit=True, file=stack_file
        )
        before = Surroundings.now()
        connection.send(("answer", *_call(payload, rank, world_size, store, timeout_s)))
        try:
            connection.recv()  # "finish"
        except (EOFError, OSError):
            return
        leaks = []
        group = None
        if dist.is_initialized():
            group = dist.group.WORLD
            if store is None:
                leaks.append("a process group (destroy what the function itself creates)")
            dist.destroy_process_group()
        misnamed = _next_group_is_misnamed()
        if misnamed:
            leaks.append(
                "the name of the next process group: the ranks of the next task would not find each"
                " other"
            )
        forget_meshes()
        _collect_garbage()
        # now: no `Reducer` of a DDP model without a hook may be the last to hold it, see
        # gradients/ddp.py
        del group
        more_leaks, beyond_repair = before.restore()
        faulthandler.cancel_dump_traceback_later()
        connection.send(("leaks", leaks + more_leaks, beyond_repair or misnamed))


def _next_group_is_misnamed() -> bool:
    """Whether torch (2.8 to 2.15) would not call the next process group "0": it counts attempts to
    join one, begins anew when the default group is destroyed, and so never after an attempt that
    failed. The name is part of the keys by which ranks find each other. Private: torch has no
    public way to ask.
    """
    return dist.distributed_c10d._world.group_count != 0


def _collect_garbage() -> None:
    """Collect models and objects of users' functions, which refer to each other. Until then they
    hold the task's process groups, with three threads each. Everything imported since the last call
    is exempted from this and later collections, to make them short.
    """
    # gloo's threads end what they are at: while a group is destroyed, none may wait for the
    # interpreter
    time.sleep(0.001)
    gc.collect()
    if len(sys.modules) > _modules[0]:
        _modules[0] = len(sys.modules)
        gc.freeze()


_modules = [0]


def forget_meshes() -> None:
    """Clear DTensor's caches. It caches results of operations by mesh, and would confuse a mesh of
    the next task, with the same shape but other groups, with this task's mesh. And its plans of
    redistributions keep meshes, and so their groups, alive.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, _redistribute, debug

        # Private, torch 2.11 to 2.15; torch 2.8 has only Python's cache.
        clear = getattr(debug, "_clear_sharding_prop_cache", None)
        if clear is None:
            clear = (
                DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
            )
        clear()
        _redistribute._gen_transform_infos.cache_clear()
        getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()


def _leave_with_parent() -> None:
    parent = os.getppid()  # it ends when the tests end
    # a killed parent cannot end its workers, and in the middle of a task none listens
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _call(
    payload: bytes, rank: int, world_size: int, path: str | None, timeout_s: float
) -> tuple[bytes | None, RankFailure | None]:
    """Return the pickled result and None, or None and the failure. `path`: of the store of the
    group to join, if any.
    """
    try:
        # also forgets which warnings were shown, so that "warns once" can be tested
        with warnings.catch_warnings():
            store = None if path is None else dist.FileStore(path, world_size)
            try:
                # imports the test's module: on a busy machine half a minute
                fn, args, kwargs = from_bytes(payload)
            finally:
                if store is not None:
                    _meet(store, rank, world_size, timeout_s)
            random.seed(0)
            torch.manual_seed(0)
            if store is not None:
                dist.init_process_group(
                    "gloo",
                    store=store,
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=GROUP_TIMEOUT_S),
                )
            with registries_as_before():
                return to_bytes(fn(*args, **kwargs)), None
    except (
        BaseException
    ) as error:  # SystemExit and pytest's own exceptions too: the worker must live on
        failure = RankFailure(type(error).__name__, str(error), traceback.format_exc())
        # A failed rank says goodbye at once: the ranks that wait for it in a collective get an
        # error, not a time-out.
        if path is not None and dist.is_initialized():
            # torch 2.13: the end of a gloo group waits, with the GIL, for threads that may need the
            # GIL to let go of an all-reduce that is just over. A moment without the GIL lets them.
            time.sleep(0.05)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        return None, failure


def _meet(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait for every rank, so that the time to join a group does not count from the first one."""
    store.set_timeout(timedelta(seconds=timeout_s))
    store.set(f"rank {rank}", "")
    store.wait([f"rank {other}" for other in range(world_size)])


# ---- what a task must leave as it found it -------------------------------------------------------


_THREAD_GRACE_S = 2.0  # for threads that are about to end


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The global state that a task must restore."""

    environ: dict[str, str]
    settings: dict[str, Any]
    threads: frozenset[threading.Thread]
    log_handlers: tuple[logging.Handler, ...]

    @staticmethod
    def now() -> "Surroundings":
        return Surroundings(
            dict(os.environ),
            {name: get() for name, (get, _) in _SETTINGS.items()},
            frozenset(threading.enumerate()),
            tuple(logging.getLogger().handlers),
        )

    def restore(self) -> tuple[list[str], bool]:
        """Restore everything. Returns a sentence per leak, and whether one of them could not be
        undone.
        """
        leaks = []
        now = dict(os.environ)
        for name in sorted(now.keys() | self.environ.keys()):
            if name in _SET_BY_TORCH:
                continue
            if now.get(name) != self.environ.get(name):
                leaks.append(
                    f"environment variable {name}: {self.environ.get(name)!r} became"
                    f" {now.get(name)!r}"
                )
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
        deadline = time.monotonic() + _THREAD_GRACE_S
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
    "float32 matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "autocast on CPU": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda enabled: torch.set_autocast_enabled("cpu", enabled),
    ),
    "working directory": (os.getcwd, os.chdir),
}
