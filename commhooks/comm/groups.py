"""Process groups: which backend one uses, and new ones of its ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks.gradients.torch_private import timeout_of


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend for `device`: a group may have one per device type ("cpu:gloo,cuda:nccl")."""
    kinds = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)
    name: str = kinds.get(device.type, dist.get_backend(group))
    return name


def new_group(ranks: Sequence[int], within: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of some ranks of `within`, or of all, with its time-out. Only they call this. torch keeps it until
    `destroy_process_group`."""
    everywhere = dist.get_process_group_ranks(within)
    device = torch.device(dist.get_backend_config(within).split(":", 1)[0])
    made: dist.ProcessGroup = dist.new_group(
        [everywhere[rank] for rank in ranks], timeout=timeout_of(within, device), use_local_synchronization=True
    )
    return made
