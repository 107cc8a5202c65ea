"""Accelerators in the worker pool, and a small training run with one, shared by the tests of `accelerate_commhooks`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState


@contextlib.contextmanager
def accelerate_launched() -> Iterator[None]:
    """As if `accelerate launch` had started this worker: real ranks of the pool's process group, on the CPU.

    Accelerate 1.15 keeps what it found out in the process; `_reset_state` is what its own tests use to start anew.
    """
    environ = {
        "ACCELERATE_USE_CPU": "true",
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody listens there: the process group exists already
    }
    with mock.patch.dict(os.environ, environ):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def new_accelerator(*handlers: Any, **kwargs: Any) -> Accelerator:
    """An accelerator that really is one of several ranks on the CPU."""
    accelerator = Accelerator(kwargs_handlers=list(handlers), **kwargs)
    assert accelerator.distributed_type.value == ("MULTI_CPU" if dist.get_world_size() > 1 else "NO")
    assert accelerator.num_processes == dist.get_world_size()
    return accelerator
