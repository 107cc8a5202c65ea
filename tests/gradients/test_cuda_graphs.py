"""Every hook refuses CUDA graphs, which cannot capture a backward pass with a Python hook."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from tests.support.cuda_stand_ins import cuda_stand_ins
from tests.support.ddp_steps import batch, mlp, process_group_of_one, wrap


def own(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


KINDS: dict[str, Callable[[DistributedDataParallel], Any]] = {
    "learning": lambda ddp: commhooks.attach(ddp, "powerSGD"),
    "stateless": lambda ddp: commhooks.attach(ddp, "fp16"),
    "user's": lambda ddp: commhooks.attach(ddp, own),
    "registered": lambda ddp: ddp.register_comm_hook(
        powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook
    ),
    "registered allreduce": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "registered noop": lambda ddp: ddp.register_comm_hook(None, debugging_hooks.noop_hook),
    "wrapped": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_wrapper(own)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_backward_pass_is_refused(kind: str) -> None:
    with process_group_of_one():
        ddp = wrap(mlp())
        KINDS[kind](ddp)
        ddp(batch(0)).square().mean().backward()
        with cuda_stand_ins() as cuda:
            cuda.capturing = True
            with pytest.raises(
                commhooks.HookRunError,
                match="being captured in a CUDA graph.*make_graphed_callables",
            ):
                ddp(batch(1)).square().mean().backward()
