"""For commands that measure on the ranks of a training: their process group, and a stopwatch."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from commhooks.comm.groups import GLOO_INTERFACE
from commhooks.errors import DoctorError


@contextlib.contextmanager
def process_group(backend: str | None, start_it: str) -> Iterator[None]:
    """Context manager: use the existing process group, or make one of the ranks that torchrun has started; on a GPU the
    device of LOCAL_RANK is set then.

    Args:
        backend: nccl, gloo; None: torch's choice.
        start_it: what to tell who has started no ranks.

    Raises:
        DoctorError: there are none, or they make no process group with this backend.
    """
    if dist.is_initialized():
        yield
        return
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise DoctorError(f"no process group: {start_it}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    try:
        dist.init_process_group(backend)
    except (AssertionError, ValueError, RuntimeError) as error:
        which = "" if backend is None else f" with backend {backend!r}"
        hint = f" ({GLOO_INTERFACE})" if backend in (None, "gloo") else ""
        raise DoctorError(f"the ranks make no process group{which}{hint}: {error}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes, with all that it queues on the device."""
    _synchronize(device)
    began = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
