"""The two packages with a Trainer, `lightning.pytorch` and `pytorch_lightning`: each has classes of its own, and an
object of one of them is a stranger to the other's Trainer. The same holds for the two with a Fabric."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from commhooks import HookConfigError

# Bases of the classes here. At runtime lightning_pytorch.py and pytorch_lightning.py, fabric.py and lightning_fabric.py
# add those of their package.
if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
else:
    Callback = DDPStrategy = FabricDDPStrategy = ModelParallelStrategy = ParallelStrategy = object

_TWIN = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}
"""The packages by the first parts of their names."""
_NAME = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_OURS = {"lightning": "lightning_commhooks", "pytorch_lightning": "lightning_commhooks.pytorch_lightning"}
"""Where the classes of this package are imported from, for each."""


def check_twin(callback: object, trainer: object) -> None:
    """Raise HookConfigError if a callback of ours is for the other package's Trainer."""
    here, given = _package(trainer), _package(callback)
    if here is not None and given is not None and here != given:
        name = type(callback).__name__
        raise HookConfigError(
            f"this {name} is for the Trainer of {_NAME[given]}, and the Trainer is from {_NAME[here]}: write `from "
            f"{_OURS[here]} import {name}`"
        )


def for_the_other_trainer(strategy: object) -> str:
    """What the `repr` of a strategy of ours says beside its options where both packages are imported: the error of the
    other package's Trainer shows nothing of the strategy but its `repr`."""
    own = _package(strategy)
    if own is None or (other := _TWIN[own]) not in sys.modules:
        return ""
    return (
        f" (a strategy for `{_NAME[own]}.Trainer`; a `{_NAME[other]}.Trainer` cannot use it: write `from "
        f"{_OURS[other]} import {type(strategy).__name__}`, or replace every import of {_NAME[other]}: its modules, "
        f"callbacks and loggers are other classes than those of {_NAME[own]})"
    )


def unlike_the_trainer(trainer: object, objects: Iterable[object]) -> str | None:
    """A warning about those of `objects` that are of the package which is not the trainer's; None if there are none."""
    here = _package(trainer)
    if here is None:
        return None
    other = _TWIN[here]
    found = [f"{type(each).__name__} (a {base})" for each in objects if (base := _base(each, other)) is not None]
    if not found:
        return None
    return (
        f"this Trainer is from {_NAME[here]}, and these are from {_NAME[other]}: {', '.join(found)}. The Trainer does "
        f"not know them for what they are, a checkpoint callback for example: replace every import of {_NAME[other]}"
    )


def _package(thing: object) -> str | None:
    """Which of the two packages has a base class of `thing`; None if neither."""
    return next((package for package in _TWIN if _base(thing, package) is not None), None)


def _base(thing: object, package: str) -> str | None:
    """The full name of the most general class of `thing` that `package` defines."""
    classes = [base for base in type(thing).__mro__ if base.__module__.partition(".")[0] == package]
    return f"{classes[-1].__module__}.{classes[-1].__qualname__}" if classes else None
