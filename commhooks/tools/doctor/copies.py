"""What lets a training go on as before: temporary copies of its model, and the kept state of random numbers."""

import copy
import inspect
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import DoctorError


def copy_of(ddp_model: DistributedDataParallel, *, alone: bool = False) -> DistributedDataParallel:
    """A DDP model around a copy of `ddp_model.module` with the same DDP arguments, without a hook. Sends nothing.

    Args:
        alone: disable everything except gradients that DDP communicates, so that one rank can fail without blocking the
            others.
    """
    try:
        module = copy.deepcopy(ddp_model.module)
    except Exception as error:
        raise DoctorError(
            f"the model cannot be copied, and only copies are measured: copy.deepcopy says {type(error).__name__}: "
            f"{error}"
        ) from error
    taken = inspect.signature(DistributedDataParallel).parameters  # torch 2.8 takes fewer arguments than 2.13
    options: dict[str, Any] = {}
    if not alone:
        same = ["dim", "find_unused_parameters", "gradient_as_bucket_view"]
        same += ["batched_grad_copy", "skip_all_reduce_unused_params"]
        options = {name: getattr(ddp_model, name) for name in same if name in taken}
        # DDP stores limits in bytes. A default limit must be passed on as default: its first bucket is smaller.
        if limits := getattr(ddp_model, "bucket_bytes_cap_list", None):
            options["bucket_cap_mb_list"] = [limit / 2**20 for limit in limits]
        elif not ddp_model.bucket_bytes_cap_default:
            options["bucket_cap_mb"] = ddp_model.bucket_bytes_cap / 2**20
    # The older name is deprecated where the newer one is taken.
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in taken else "broadcast_buffers"
    options[buffers] = not alone and getattr(ddp_model, buffers)
    return DistributedDataParallel(
        module,
        device_ids=ddp_model.device_ids,
        output_device=ddp_model.output_device,
        process_group=ddp_model.process_group,
        static_graph=ddp_model.static_graph,
        init_sync=False,  # otherwise each copy would broadcast the whole model
        **options,
    )


def keep_random_state(devices: set[torch.device]) -> Callable[[], None]:
    """A function that restores the present state of the global random number generators: torch's on the CPU and on
    `devices`, Python's, numpy's."""
    numpy = sys.modules.get("numpy")
    restorers: list[Callable[[], Any]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        *(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(d), d) for d in devices if d.type == "cuda"),
        partial(random.setstate, random.getstate()),
        *([] if numpy is None else [partial(numpy.random.set_state, numpy.random.get_state())]),
    ]

    def restore() -> None:
        for each in restorers:
            each()

    return restore
