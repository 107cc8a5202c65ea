"""Learned state: the tensors and counters that a compressor keeps from step to step and that a checkpoint holds."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import torch

from commhooks.compressors.state_field import StateField
from commhooks.errors import HookConfigError
from commhooks.gradients.loss_scale import LossScale

Entries = dict[str, dict[str, torch.Tensor]]


@dataclass
class LearnedState:
    """Tensors by field and by name, independent of the bucket layout. `state["residual"]["layer.weight"]` is one.

    Attributes:
        step: committed synchronised backward passes, the same on every rank.
        nonfinite_steps: passes that were not committed.
        entries: per field (see `StateField`) a dict with a tensor per parameter or bucket. A missing entry stands for
            zeros, or for the initial value that the compressor draws.
        local: keys of the fields that differ between ranks, such as residuals.
        loss_scale: the loss scale with which fields with `scales_with_loss` were written. On an accelerator a 0-dim
            tensor until the host reads it.
        local_missing: this rank has lost its local tensors; at the next agreement all ranks drop theirs.
        missing_was_said: a warning about `local_missing` was logged.
        local_shared: the local tensors are equal on every rank: the mean that was just saved or loaded, or none.
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
        """Empty state of a compressor with these fields.

        Raises:
            HookConfigError: two fields have the same key.
        """
        fields = list(fields)
        keys = [each.key for each in fields]
        if len(set(keys)) < len(keys):
            raise HookConfigError(f"state_fields: the keys {keys} are not all different")
        return cls(local=frozenset(each.key for each in fields if not each.replicated))

    def __getitem__(self, key: str) -> dict[str, torch.Tensor]:
        return self.entries.setdefault(key, {})

    def apart(self) -> "LearnedState":
        """A copy in which no tensor is a slice of a larger storage: pickling a slice would save the whole storage."""
        return replace(self, entries={key: _apart(tensors) for key, tensors in self.entries.items()})

    def keep_fields(self, fields: Iterable[StateField]) -> None:
        """Delete the tensors of all other fields."""
        for key in self.entries.keys() - {each.key for each in fields}:
            del self.entries[key]

    def forget_replicated(self) -> None:
        for key in self.entries.keys() - self.local:
            self.entries[key].clear()

    def forget_local(self) -> None:
        """Delete the local tensors without changing the flags; compare `drop_local`."""
        for key in self.local:
            self[key].clear()

    def drop_local(self) -> None:
        """Delete the local tensors on agreement of all ranks: they continue as from zeros."""
        self.forget_local()
        self.local_missing = False
        self.local_shared = True

    def rescale(self, fields: Iterable[StateField], factor: LossScale, but: Collection[str]) -> None:
        """Multiply by `factor` the tensors of the fields that follow the loss scale, except those of the names in
        `but`."""
        for each in fields:
            for name, tensor in self[each.key].items() if each.scales_with_loss else ():
                if name not in but:
                    tensor.mul_(factor)

    def to_host(self) -> None:
        """Move all tensors to the CPU."""
        for tensors in self.entries.values():
            tensors.update((name, tensor.cpu()) for name, tensor in tensors.items())

    def has_local(self) -> bool:
        return any(self[key] for key in self.local)


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for n, t in tensors.items()}
