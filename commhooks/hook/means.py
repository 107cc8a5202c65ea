"""Means over the ranks of what a hook that averages weights averages beside them: buffers, optimizers' moments."""

import torch

from commhooks.comm import collective
from commhooks.comm.collective import Send, gather_rows
from commhooks.comm.counters import Counters
from commhooks.errors import logger_of
from commhooks.gradients.source import GradientSource
from commhooks.gradients.weights import SharedBuffers, packed, write_back

logger = logger_of(__name__)


class MeansOfRanks:
    """All ranks call `average` and `average_buffers`, at the same point of the training.

    Args:
        hook: its name, for messages.
        counters: count what is sent.
        says: this rank logs warnings.
    """

    def __init__(self, hook: str, source: GradientSource, counters: Counters, *, says: bool) -> None:
        self._hook, self._source, self._counters, self._says = hook, source, counters, says
        self._shared = SharedBuffers()

    @torch.no_grad()
    def average(self, tensors: list[torch.Tensor], what: str) -> None:
        """Replace each tensor by its mean over the ranks. If the ranks have not the same ones, with a warning, none."""
        group = self._source.group
        row = torch.tensor([sum(each.numel() for each in tensors)], device=self._source.device)
        sizes = {int(size) for size in gather_rows(row, group, self._counters, what)}
        if len(sizes) > 1:
            if self._says:
                logger.warning("hook %s: %s differ in size between ranks, and stay.", self._hook, what)
            return
        for bucket in packed(tensors):
            bucket.flat.div_(group.size())
            collective.start(Send(bucket.flat, what=what, last=True), group, self._counters, "").wait()
            write_back(bucket)

    def note_buffers(self) -> None:
        """The model's buffers are equal on all ranks now, unless they were noted before."""
        if self._source.module is not None:
            self._shared.note(self._source.module)

    def forget_buffers(self) -> None:
        self._shared.forget()

    @torch.no_grad()
    def average_buffers(self) -> None:
        """What a model keeps beside its weights, such as the running statistics of a BatchNorm: numbers are averaged,
        integers taken from rank 0."""
        module, what = self._source.module, "the model's buffers"
        if module is None:
            return
        self._shared.share(module, lambda tensors: self.average(tensors, what))
        for each in module.buffers():
            if not each.is_floating_point() and not each.is_complex() and each.numel():
                row = each.detach().reshape(-1).to(torch.int64)
                first = gather_rows(row, self._source.group, self._counters, what)[0]
                each.copy_(first.view(each.shape))
