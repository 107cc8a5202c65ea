"""Replace `torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks`."""

from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import new_future
from commhooks.compressors.cast import Noop
from commhooks.gradients.ddp import checked_bucket
from commhooks.options import DROP_INS, DropIn

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communicate nothing: every rank keeps its own gradients, so replicas drift apart.

    For measurements only: if training is not much faster with this hook, the network is not the
    bottleneck, and no compression will help. Replaces torch's `noop_hook`.
    """
    buffer = checked_bucket(bucket).buffer()
    future = new_future(buffer.device)
    future.set_result(buffer)
    return future


DROP_INS[noop_hook] = DropIn(Noop.hook_name)
