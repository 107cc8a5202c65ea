"""Process groups: which backend one uses, and new ones of its ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks.errors import HookRunError
from commhooks.gradients.torch_private import groups_here, timeout_of


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend for `device`: a group may have one per device type ("cpu:gloo,cuda:nccl")."""
    kinds = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)
    name: str = kinds.get(device.type, dist.get_backend(group))
    return name


GLOO_INTERFACE = (
    "on several machines set GLOO_SOCKET_IFNAME to the network interface between them; an exclusion such as ^lo works "
    "with NCCL only"
)
"""What to do where ranks cannot connect over gloo."""


def new_group(ranks: Sequence[int], within: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of some ranks of `within`, or of all, with its time-out. All ranks of `within` call this, each for
    a group that it is in. torch keeps the group until `destroy_process_group`.

    Raises:
        HookRunError: the ranks cannot connect.
    """
    everywhere = dist.get_process_group_ranks(within)
    device = torch.device(dist.get_backend_config(within).split(":", 1)[0])
    _count_alike(within, device)
    timeout = timeout_of(within, device)
    try:
        made: dist.ProcessGroup = dist.new_group(
            [everywhere[rank] for rank in ranks], timeout=timeout, use_local_synchronization=True
        )
    except RuntimeError as error:
        raise HookRunError(f"the ranks make no further process group ({GLOO_INTERFACE}): {error}") from error
    return made


def _count_alike(within: dist.ProcessGroup, device: torch.device) -> None:
    """Let all ranks of `within` be in equally many groups: torch 2.13 makes this number a part of the name under which
    the ranks of a new group find each other, and with different ones they wait until the time-out. A rank of fewer
    groups gets some of its own, of which nobody makes use."""
    own = groups_here()
    most = torch.tensor([own], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=within)
    for _ in range(int(most) - own):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
