"""Learned state: what a compressor remembers from step to step, and all that a checkpoint has to hold."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from commhooks.compressors.state_field import StateField
from commhooks.gradients.loss_scale import LossScale

Entries = dict[str, dict[str, torch.Tensor]]


@dataclass
class LearnedState:
    """Keyed by names, never by places in a bucket. `state["residual"]["layer.weight"]` is one tensor.

    Attributes:
        step: committed synchronised backward passes, the same on every rank.
        nonfinite_steps: passes that were not committed.
        entries: per field (see `StateField`) a tensor per parameter or bucket. A missing tensor is one of zeros, or
            what the compressor begins with.
        local: keys of the fields that each rank has for itself, such as residuals.
        loss_scale: the factor by which the loss, and therefore what scales with it, was multiplied; on an accelerator
            a tensor until somebody asks.
        local_missing: this rank should have local tensors and has none, so that all ranks must do without.
        missing_was_said: a warning has told of it.
        local_shared: every rank has the same local tensors: the mean that was just saved or loaded, or none at all.
    """

    step: int = 0
    nonfinite_steps: int = 0
    entries: Entries = field(default_factory=dict)
    local: frozenset[str] = frozenset({"residual"})
    loss_scale: LossScale = 1.0
    local_missing: bool = False
    missing_was_said: bool = False
    local_shared: bool = True

    @classmethod
    def of(cls, fields: Iterable[StateField]) -> "LearnedState":
        """Empty state of a compressor with these fields."""
        return cls(local=frozenset(each.key for each in fields if not each.replicated))

    def __getitem__(self, key: str) -> dict[str, torch.Tensor]:
        return self.entries.setdefault(key, {})

    def apart(self) -> "LearnedState":
        """The same in tensors that own their memory: pickled, the slice of a stack would bring all of it along."""
        return replace(self, entries={key: _apart(tensors) for key, tensors in self.entries.items()})

    def forget_replicated(self) -> None:
        for key in self.entries.keys() - self.local:
            self.entries[key].clear()

    def forget_local(self) -> None:
        """Without a word about why; see `drop_local`."""
        for key in self.local:
            self[key].clear()

    def drop_local(self) -> None:
        """All ranks do without local tensors from here on."""
        self.forget_local()
        self.local_missing = False
        self.local_shared = True

    def has_local(self) -> bool:
        return any(self[key] for key in self.local)


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for n, t in tensors.items()}
