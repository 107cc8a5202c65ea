"""Bring the trained weights of all ranks and the anchor together: at the start, after a load,
after a discarded round."""

from collections.abc import Mapping

import torch

from commhooks.comm import collectives
from commhooks.comm.collectives import Send, gather_rows, good_on_all
from commhooks.comm.packing import all_finite
from commhooks.errors import logger_of
from commhooks.gradients.layout import to_logical
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.common_state import checksums
from commhooks.local_steps.flat_weights import layouts, packed, set_weights, write_back
from commhooks.local_steps.outer_step import ANCHOR
from commhooks.local_steps.outer_steps import OuterSteps

logger = logger_of(__name__)


class CommonWeights:
    """Compares and sets the trained weights. All ranks must call each method at the same point of
    the training."""

    def __init__(self, hook: str, source: GradientSource, outer: OuterSteps, *, logs: bool) -> None:
        self._hook, self._logs = hook, logs
        self._source, self._outer = source, outer

    def begin_first_round(self) -> None:
        """Set the anchor of the parameters that have none: the run starts, or a distributed
        checkpoint was loaded, which does not distinguish zeros from no entry. If the ranks differ,
        as after a run that ended in mid-round, they begin from their mean."""
        anchor, known = self._outer.state[ANCHOR.key], self._source.names.named_parameters()
        missing = {name: parameter for name, parameter in known.items() if name not in anchor}
        if not missing:
            return
        if missing.keys() & set(self.differing()):
            self._average(missing)
        self._outer.set_anchor(missing)

    @torch.no_grad()
    def _average(self, parameters: Mapping[str, torch.Tensor]) -> None:
        if self._logs:
            logger.warning(
                "hook %s: the weights differ between ranks at the first backward pass, as after a"
                " training that ended in mid-round: all ranks begin from their mean.",
                self._hook,
            )
        self._source.before_weights_change()
        group = self._source.group
        for layout in layouts(parameters):
            send = Send(
                packed(layout).div_(group.size()), what="the weights to begin from", last=True
            )
            write_back(layout, collectives.start(send, group, self._outer.counters, "").wait())

    def begin_from_loaded(self) -> None:
        """Choose the weights to begin from if the model's weights differ from the loaded anchor:
        the model's weights if they are equal on all ranks, else the anchor."""
        anchor, known = self._outer.state[ANCHOR.key], self._source.names.named_parameters()
        self._source.before_weights_change()
        same = all(
            torch.equal(p.detach(), to_logical(anchor[n], p).to(p))
            for n, p in known.items()
            if n in anchor
        )
        if not self._on_some_rank(not same):
            return
        common = not self._on_some_rank(bool(self.differing()))
        if common:
            self._outer.set_anchor(known)
        else:
            self.go_to_anchor()
        if self._logs:
            logger.warning(
                "hook %s: the weights of the model differ from the common weights that were saved"
                " with the hook. The training goes on from %s.",
                self._hook,
                (
                    "the weights of the model"
                    if common
                    else "the common weights, because the ranks have different models"
                ),
            )

    def go_to_anchor(self) -> None:
        self._source.before_weights_change()
        set_weights(self._source.names.named_parameters(), self._outer.state[ANCHOR.key])

    def differing(self) -> list[str]:
        """Return the names of the trained weights that are not equal on all ranks."""
        return self.compare(False)[0]

    @torch.no_grad()
    def compare(self, changed: bool) -> tuple[list[str], bool]:
        """Return the names of the trained weights that are not equal on all ranks, and whether
        `changed` is true on some rank."""
        known = self._source.names.named_parameters()
        own = [*checksums(list(known.values())), int(changed)]
        row = torch.tensor(own, dtype=torch.int64, device=self._source.device)
        rows = gather_rows(
            row, self._source.group, self._outer.counters, "whether the weights are equal"
        )
        same = (rows == rows[0]).all(0).tolist()[:-1]
        differing = [name for name, is_same in zip(known, same, strict=True) if not is_same]
        return differing, bool(rows[:, -1].any())

    def all_will_step(self, good: torch.Tensor) -> bool:
        """Return whether no rank will skip the step of this pass; the same on all ranks. `good`:
        whether the gradients of this rank are finite (0-dim bool tensor). Also True if the weights
        of a rank are not finite, because its gradients will never be finite again."""
        finite = self._on_all_shards(good)
        lost = not finite and not self._on_all_shards(
            torch.stack(
                [
                    all_finite(parameter)
                    for parameter in self._source.names.named_parameters().values()
                ]
            ).all()
        )
        rows = self._rows(finite, lost, what="whether all gradients are finite")
        return bool(rows[:, 0].all() or rows[:, 1].any())

    # ---- agreement
    # ----------------------------------------------------------------------------------------------

    def _rows(self, *values: bool, what: str) -> torch.Tensor:
        row = torch.tensor(values, device=self._source.device, dtype=torch.int64)
        return gather_rows(row, self._source.group, self._outer.counters, what)

    def _on_some_rank(self, value: bool) -> bool:
        return not self._on_all_shards(
            ~self._rows(value, what="whether the weights are those of the anchor").any()
        )

    def _on_all_shards(self, good: torch.Tensor) -> bool:
        shards = self._source.shard_group
        return bool(good if shards is None else good_on_all(good, shards, "all shards"))
