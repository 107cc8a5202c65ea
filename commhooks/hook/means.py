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
        integers taken from rank 0. What has changed on no rank is not sent, such as a mask."""
        module, what = self._source.module, "the model's buffers"
        pairs = [] if module is None else self._shared.pairs(module)
        if not pairs:
            return
        own = torch.stack([(now != common).any().to(self._source.device) for now, common in pairs]).to(torch.uint8)
        changed = gather_rows(own, self._source.group, self._counters, what).any(0).tolist()
        pairs = [pair for pair, has_changed in zip(pairs, changed, strict=True) if has_changed]
        numbers = [(now, common) for now, common in pairs if now.is_floating_point()]
        # Where both are infinite, too, there is no change.
        changes = [torch.where(now == common, 0, now - common) for now, common in numbers]
        if changes:
            self.average(changes, what)
        for (now, common), change in zip(numbers, changes, strict=True):
            now.copy_(torch.where(change == 0, common, common + change))
        integers = [now for now, _ in pairs if not now.is_floating_point() and not now.is_complex()]
        if integers:
            row = torch.cat([now.reshape(-1).to(self._source.device, torch.int64) for now in integers])
            first = gather_rows(row, self._source.group, self._counters, what)[0]
            for now, part in zip(integers, first.split([now.numel() for now in integers]), strict=True):
                now.copy_(part.view(now.shape))
        for now, common in pairs:
            common.copy_(now)
