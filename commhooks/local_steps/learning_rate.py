"""Multiply the learning rates of an optimizer during its steps."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import Optimizer

from commhooks.errors import HookRunError


@dataclass
class _ScaledRate:
    """What the learning rate of a parameter group is during a step, and the user's."""

    group: dict[str, Any]
    factor: float
    users: Any
    multiplied: Any

    @classmethod
    def of(cls, group: dict[str, Any], factor: float, optimizer: Optimizer) -> "_ScaledRate":
        """Multiply the learning rate of a group of `optimizer`. Raises HookRunError if it has
        none."""
        users = group.get("lr")  # a number or a tensor
        if factor == 1.0:
            return cls(group, factor, users, users)
        if users is None:
            raise HookRunError(
                f"lr_factor multiplies the learning rate of {type(optimizer).__name__} by"
                f" {factor:.3g}, but the optimizer has none (lr=None): set lr, or leave out"
                " lr_factor"
            )
        # Do not change a tensor in place: schedulers may hold it.
        group["lr"] = users * factor
        return cls(group, factor, users, group["lr"])

    def restore(self) -> None:
        if self.group.get("lr") is self.multiplied and self.factor != 1.0:
            self.group["lr"] = self.users  # otherwise the step has set another learning rate


class ScaledRates:
    """Multiplies learning rates during a step, so that schedulers, logs and checkpoints see the
    user's. An optimizer may step several models with hooks, and share its groups with another
    one, whose step is within its own.

    Attributes:
        changed: what has been multiplied, by id of the group."""

    def __init__(self) -> None:
        self.changed: weakref.WeakKeyDictionary[Optimizer, dict[int, _ScaledRate]] = (
            weakref.WeakKeyDictionary()
        )

    def multiply(
        self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], factor: float
    ) -> None:
        """Multiply the learning rates of some groups, each once in a step. Raises HookRunError if
        another model has multiplied one by another factor, or if one has no learning rate."""
        if optimizer not in self.changed and factor != 1.0:
            optimizer.register_state_dict_post_hook(self.show_users)
        changed = self.changed.setdefault(optimizer, {})
        for group in groups:
            before = changed.get(id(group))
            if before is None:
                changed[id(group)] = _ScaledRate.of(group, factor, optimizer)
            elif before.factor != factor:
                raise HookRunError(
                    f"a parameter group of {type(optimizer).__name__} has weights of two models,"
                    f" whose hooks multiply its learning rate by {before.factor:.3g} and by"
                    f" {factor:.3g}: give each model a parameter group of its own"
                )

    def restore(self, groups: Sequence[dict[str, Any]]) -> None:
        """Give some groups the user's learning rates again."""
        for changed in list(self.changed.values()):
            for group in groups:
                if (rate := changed.pop(id(group), None)) is not None:
                    rate.restore()

    def show_users(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Replace multiplied learning rates in the state dict of an optimizer by the user's: a save
        may come in the middle of a step, or handle the exception that a step has raised."""
        changed = self.changed.get(optimizer, {})
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
            rate = changed.get(id(group))
            if rate is not None and saved.get("lr") is rate.multiplied:
                saved["lr"] = rate.users
