"""Collectives of PowerSGD: every all-reduce starts here, is counted here and is waited for here."""

import logging

import torch
import torch.distributed as dist

from commhooks.comm.counters import Stats
from commhooks.errors import HookRunError

logger = logging.getLogger(__name__)


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

    __slots__ = ("tensor", "_work", "_what", "_group", "_stats")

    def __init__(
        self, tensor: torch.Tensor, work: dist.Work, what: str, group: dist.ProcessGroup, stats: Stats
    ) -> None:
        self.tensor = tensor
        self._work = work
        self._what = what
        self._group = group
        self._stats = stats

    def wait(self) -> torch.Tensor:
        """The reduced tensor. On CUDA the current stream waits, not the host.

        Raises:
            HookRunError: another rank is gone, or did not come within the process group's timeout.
        """
        try:
            with self._stats.clocks.waiting(self.tensor.device):
                self._work.wait()
        except RuntimeError as error:
            raise lost(self._what, self._group, error) from error
        return self.tensor


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, stats: Stats, what: str) -> Pending:
    """Begin to sum `tensor` over the ranks of `group` in place. All ranks must call this in the same order.

    `what` says in messages and in `stats.last_issued` what is being sent.
    """
    stats.last_issued = what
    logger.debug("all-reduce: %s", what)
    # Now: the all-reduce of a sparse tensor puts another number of values into it when it is done.
    numel = tensor._values().numel() if tensor.is_sparse else tensor.numel()
    try:
        work = dist.all_reduce(tensor, group=group, async_op=True)
    except RuntimeError as error:
        raise lost(what, group, error) from error
    stats.sent(numel, tensor.element_size())
    return Pending(tensor, work, what, group, stats)


def gather_rows(own: torch.Tensor, group: dist.ProcessGroup, stats: Stats | None, what: str) -> torch.Tensor:
    """The `own` of every rank, one row each. A small exchange; all ranks of `group` must call this with equal shapes.

    Raises:
        HookRunError: another rank does not come within the process group's timeout.
    """
    rows = [torch.empty_like(own) for _ in range(group.size())]
    try:
        dist.all_gather(rows, own, group=group)
    except RuntimeError as error:
        raise lost(what, group, error) from error
    if stats is not None:
        stats.handshakes += 1
    return torch.stack(rows)


def lost(what: str, group: dist.ProcessGroup, error: RuntimeError) -> HookRunError:
    """The error to raise where a collective has failed on this rank."""
    return HookRunError(
        f"rank {group.rank()} of {group.size()}: the exchange of {what} failed. Another rank has probably ended, "
        f"hangs, or sends something else; look at the output of the other ranks. The backend says: {error}"
    )


def new_future(device: torch.device) -> torch.futures.Future[torch.Tensor]:
    """A future for a tensor on `device`. On CUDA it must name the device: a plain one takes the tensor without
    complaint, and whoever waits for it reads too early."""
    if device.type == "cpu":
        return torch.futures.Future()
    return torch.futures.Future(devices=[device])
