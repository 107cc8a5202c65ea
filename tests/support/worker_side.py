"""The worker's side of `workers.py`: runs one task after another, each in a group of its own."""

import contextlib
import faulthandler
import gc
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.support.registries import registries_as_before
from tests.support.surroundings import Surroundings
from tests.support.worker_messages import FINISH_TIMEOUT_S, RankFailure, from_bytes, to_bytes

GROUP_TIMEOUT_S = 30.0  # of a collective; below the default task limit, so that a lost rank shows as torch's own error
_SELF_DESTRUCT_S = 30.0  # beyond the task's limit: no worker stays behind for ever, not even one that hangs in C++


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
            leaks.append("the name of the next process group: the ranks of the next task would not find each other")
        forget_meshes()
        _collect_garbage()
        del group  # now: no `Reducer` of a DDP model without a hook may be the last to hold it, see gradients/ddp.py
        more_leaks, beyond_repair = before.restore()
        faulthandler.cancel_dump_traceback_later()
        connection.send(("leaks", leaks + more_leaks, beyond_repair or misnamed))


def _next_group_is_misnamed() -> bool:
    """Whether torch (2.8 to 2.15) would not call the next process group "0": it counts attempts to join one, begins
    anew when the default group is destroyed, and so never after an attempt that failed. The name is part of the keys by
    which ranks find each other. Private: torch has no public way to ask."""
    return dist.distributed_c10d._world.group_count != 0


def _collect_garbage() -> None:
    """Models and what users' functions keep of them refer to each other, and hold the task's process groups until then,
    with three threads for each.

    What was imported since the last time is exempted from this and later collections, to make them short."""
    time.sleep(
        0.001
    )  # gloo's threads end what they are at: while a group is destroyed, none may wait for the interpreter
    gc.collect()
    if len(sys.modules) > _modules[0]:
        _modules[0] = len(sys.modules)
        gc.freeze()


_modules = [0]


def forget_meshes() -> None:
    """DTensor caches results of operations by mesh, and takes a mesh of the next task, of the same shape but with other
    groups, for the one of this task. And its plans of redistributions keep meshes, and with them their groups, for
    ever."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, _redistribute, debug

        # Private, torch 2.11 to 2.15; torch 2.8 has only Python's cache.
        clear = getattr(debug, "_clear_sharding_prop_cache", None)
        if clear is None:
            clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
        clear()
        _redistribute._gen_transform_infos.cache_clear()
        getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()


def _leave_with_parent() -> None:
    parent = os.getppid()  # it ends when the tests end
    while os.getppid() == parent:  # a killed parent cannot end its workers, and in the middle of a task none listens
        time.sleep(1)
    os._exit(1)


def _call(
    payload: bytes, rank: int, world_size: int, path: str | None, timeout_s: float
) -> tuple[bytes | None, RankFailure | None]:
    """The pickled result and None, or None and the failure. `path` is of the store of the group to join, if any."""
    try:
        with warnings.catch_warnings():  # also forgets which warnings were shown, so that "warns once" can be tested
            store = None if path is None else dist.FileStore(path, world_size)
            try:
                fn, args, kwargs = from_bytes(payload)  # imports the test's module: on a busy machine half a minute
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
    except BaseException as error:  # SystemExit and pytest's own exceptions too: the worker must live on
        failure = RankFailure(type(error).__name__, str(error), traceback.format_exc())
        # A failed rank says goodbye at once: the ranks that wait for it in a collective get an error, not a time-out.
        if path is not None and dist.is_initialized():
            # torch 2.13: the end of a gloo group waits, with the GIL, for threads that may need the GIL to let go of
            # an all-reduce that is just over. A moment without the GIL lets them.
            time.sleep(0.05)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        return None, failure


def _meet(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Waits until every rank is as far, so that joining a group is not counted from the first rank's arrival."""
    store.set_timeout(timedelta(seconds=timeout_s))
    store.set(f"rank {rank}", "")
    store.wait([f"rank {other}" for other in range(world_size)])
