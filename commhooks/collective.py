"""Collectives: every all-reduce of a hook starts here, is counted here and is waited for here."""

import torch
import torch.distributed as dist

from commhooks.errors import HookRunError
from commhooks.stats import Stats


def resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group to use: the one given, else the default group."""
    if process_group is not None:
        return process_group
    if not dist.is_initialized():
        raise HookRunError("no process group: call torch.distributed.init_process_group before the first backward pass")
    group = dist.group.WORLD
    assert group is not None
    return group


class Pending:
    """An all-reduce (sum, in place) on its way."""

    __slots__ = ("tensor", "_work")

    def __init__(self, tensor: torch.Tensor, work: dist.Work) -> None:
        self.tensor = tensor
        self._work = work

    def wait(self) -> torch.Tensor:
        """The reduced tensor. On CUDA the current stream waits, not the host."""
        self._work.wait()
        return self.tensor


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, stats: Stats) -> Pending:
    """Begin to sum `tensor` over the ranks of `group` in place. All ranks must call this in the same order."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    numel = tensor._values().numel() if tensor.is_sparse else tensor.numel()
    stats.sent(numel, tensor.element_size())
    return Pending(tensor, work)


def new_future(device: torch.device) -> torch.futures.Future[torch.Tensor]:
    """A future for a tensor on `device`. On CUDA it must name the device: a plain one takes the tensor without
    complaint, and whoever waits for it reads too early."""
    if device.type == "cpu":
        return torch.futures.Future()
    return torch.futures.Future(devices=[device])
