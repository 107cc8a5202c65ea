"""The processes in which `compare_versions.py` runs its cases, one per rank."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.stress.compare_cases import all_cases
from tests.stress.compare_records import observed, tidy

CASE_LIMIT_S, GROUP_LIMIT_S = 120.0, 30.0


class Ranks:
    """Kept for all cases of one number of ranks; each case has a process group of its own."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._pools: list[ProcessPoolExecutor] = []
        self._folder = tempfile.TemporaryDirectory(prefix="compare-")
        self._tasks = 0

    def run(self, name: str) -> list[Any]:
        """What each rank noted; of a rank that failed or took too long, a text in place of it."""
        if not self._pools:
            spawn = multiprocessing.get_context("spawn")
            self._pools = [ProcessPoolExecutor(1, spawn, _begin) for _ in range(self.world_size)]
        self._tasks += 1
        where = (f"{self._folder.name}/{self._tasks}", self.world_size)
        futures = [pool.submit(_run, name, rank, *where) for rank, pool in enumerate(self._pools)]
        errors = [future.exception() for future in futures]
        if any(errors):
            self.close()  # a process is gone: the next case gets new ones
        return [
            repr(error) if error else future.result()
            for future, error in zip(futures, errors, strict=True)
        ]

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()
        self._pools = []


def _begin() -> None:
    """In a new process."""
    faulthandler.enable(open(os.dup(2), "w"))  # noqa: SIM115 - as long as the process lives
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what torch itself says
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(name: str, rank: int, store_path: str, world_size: int) -> Any:
    """One case on one rank."""
    # all ranks have answered: only now does any of them close its connections
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect(1)
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    try:
        store = dist.FileStore(store_path, world_size)
        limit = timedelta(seconds=GROUP_LIMIT_S)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        case = all_cases()[name]
        return observed(case.run, case.quiet)
    except Exception as error:
        # The others wait for this rank: let go of the group, so that they get an error and not a
        # time-out.
        traceback.clear_frames(error.__traceback__)
        answer = tidy(f"{type(error).__name__}: {error}")
        gc.collect()
        time.sleep(0.05)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        return answer
    finally:
        faulthandler.cancel_dump_traceback_later()
