"""Which backend a process group uses."""

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend for `device`: a group may have one per device type ("cpu:gloo,cuda:nccl")."""
    kinds = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)
    name: str = kinds.get(device.type, dist.get_backend(group))
    return name
