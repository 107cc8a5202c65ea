"""Runs several trainings in one process, as Optuna does, with forked DataLoader workers."""

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

TRAININGS = 4


class CollectsGarbage(Dataset[Any]):
    """Regression data. Its worker collects the garbage of earlier trainings, as any allocation
    may.
    """

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if get_worker_info() is not None and index < 2:
            gc.collect()
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), torch.randn(8, generator=generator)


def loader() -> DataLoader[Any]:
    """Make a loader with a forked worker. A worker that hangs is an error after 30 s."""
    return DataLoader(
        CollectsGarbage(), 2, num_workers=1, multiprocessing_context="fork", timeout=30
    )


def thread_count() -> int:
    """Return the number of threads of this process, including C++ threads."""
    return len(os.listdir("/proc/self/task"))


def threads_after_each(train: Callable[[], object]) -> list[int]:
    """Return the number of threads after each call of `train`. Nothing may depend on the garbage
    collector, which here runs in the forked processes only.
    """
    gc.collect()
    gc.disable()
    try:
        return [(train(), thread_count())[1] for _ in range(TRAININGS)]
    finally:
        gc.enable()


def assert_nothing_piles_up(threads: list[int]) -> None:
    # A gloo group has three threads. One or two of torch or of the DataLoader come and go.
    assert min(threads[-3:]) < threads[0] + 3, threads


def tensor_bytes() -> int:
    """Return the bytes of all tensors that Python knows."""
    return sum(
        tracked.numel() * tracked.element_size()
        for tracked in gc.get_objects()
        if isinstance(tracked, torch.Tensor)
    )
