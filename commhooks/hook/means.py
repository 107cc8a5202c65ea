"""Means over the ranks of what a hook that averages weights averages beside them: buffers, optimizers' moments."""

from collections.abc import Sequence

import torch

from commhooks.comm import collective
from commhooks.comm.collective import Send, agreement_key, gather_rows
from commhooks.comm.counters import Counters
from commhooks.errors import logger_of
from commhooks.gradients.source import GradientSource
from commhooks.gradients.training_events import OptimizerSteps
from commhooks.gradients.weights import SharedBuffers, packed, write_back
from commhooks.hook.replica_check import weights_checksum

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
        self._told_of_codes = False

    @torch.no_grad()
    def average(self, tensors: list[torch.Tensor], what: str, names: Sequence[str] = ()) -> None:
        """Replace each tensor by its mean over the ranks. If the ranks have not the same ones, by shapes and `names`,
        with a warning, none."""
        group = self._source.group
        key = agreement_key(*names, *(tuple(each.shape) for each in tensors))
        keys = gather_rows(torch.tensor([key], device=self._source.device), group, self._counters, what)
        if len(keys.unique()) > 1:
            if self._says:
                logger.warning(
                    "hook %s: the ranks do not have the same parts of %s, which is therefore not averaged.",
                    self._hook,
                    what,
                )
            return
        for bucket in packed(tensors):
            bucket.flat.div_(group.size())
            collective.start(Send(bucket.flat, what=what, last=True), group, self._counters, "").wait()
            write_back(bucket)

    def average_moments(self, optimizers: OptimizerSteps) -> None:
        """What the optimizers keep of the parameters, such as Adam's moments."""
        moments = optimizers.moments()
        self.average([each for _, each in moments], "the optimizers' state", [name for name, _ in moments])
        codes = optimizers.codes()
        if codes and self._says and not self._told_of_codes:
            self._told_of_codes = True
            logger.warning(
                "hook %s: for %s parameters the optimizers keep integers, as 8-bit optimizers do, which have no mean: "
                "what they keep for these stays each rank's own, and a run that resumes from that of one rank goes on "
                "with it on all.",
                self._hook,
                codes,
            )

    @torch.no_grad()
    def equalize(self, weights: list[torch.Tensor]) -> None:
        """Average weights that should be equal on all ranks, with a warning, if they are not."""
        what = "whether the weights are equal"
        sums = torch.stack([weights_checksum(each) for each in weights])
        rows = gather_rows(sums, self._source.group, self._counters, what)
        if bool((rows == rows[0]).all()):
            return
        if self._says:
            logger.warning(
                "hook %s: the weights differ between ranks at the first backward pass, as after a training that ended "
                "in mid-round: all ranks begin from their mean.",
                self._hook,
            )
        self._source.before_weights_change()
        self.average(weights, "the weights to begin from")

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
        own = [torch.stack([(now != common).any(), now.isfinite().all()]) for now, common in pairs]
        row = torch.stack([each.to(self._source.device) for each in own]).to(torch.uint8)
        found = gather_rows(row, self._source.group, self._counters, what).any(0).tolist()
        numbers, changes = [], []
        for (now, common), (changed, finite_somewhere) in zip(pairs, found, strict=True):
            if changed and now.is_floating_point():
                change = torch.where(now == common, 0, now - common)  # both may be infinite
                # A statistic of a batch that overflowed on some ranks: on these it has not changed.
                changes.append(change.nan_to_num(0, 0, 0) if finite_somewhere else change)
                numbers.append((now, common))
        pairs = [pair for pair, (changed, _) in zip(pairs, found, strict=True) if changed]
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
