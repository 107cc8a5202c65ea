"""Map models to their hooks. All references to models, hooks and accelerators are weak."""

import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks import CommHook
from commhooks.hook.for_plugins import compiled_from


class HookedModel:
    """Weak references to a DDP model and its hook, which lives as long as the model."""

    def __init__(self, ddp_model: DistributedDataParallel, hook: CommHook) -> None:
        self._ddp_model = weakref.ref(ddp_model)
        self._module = weakref.ref(_not_compiled(ddp_model.module))
        self._hook = weakref.ref(hook)

    @property
    def hook(self) -> CommHook | None:
        """The hook; None if its model was deleted."""
        return self._hook() if self._ddp_model() is not None else None

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether `model` is the DDP model, the module inside it, or a compiled form of one of them."""
        ddp_model = self._ddp_model()
        inner = _not_compiled(model)
        return ddp_model is not None and (inner is ddp_model or inner is self._module())

    def same_module(self, other: "HookedModel") -> bool:
        """Whether both are DDP models around the same module."""
        return self._module() is not None and self._module() is other._module()

    def is_inside(self, models: list[torch.nn.Module]) -> bool:
        """Whether the module, wrapped or not, is among `models`. It may outlive the DDP model."""
        module = self._module()
        return module is not None and any(_unwrapped(each) is module for each in models)


def alive(models: list[HookedModel]) -> list[HookedModel]:
    return [each for each in models if each.hook is not None]


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    inner = _not_compiled(model)
    return _not_compiled(inner.module) if isinstance(inner, DistributedDataParallel) else inner


def _not_compiled(model: torch.nn.Module) -> torch.nn.Module:
    """The original model of a model compiled by `torch.compile` or by Accelerate's regional compilation."""
    while (original := compiled_from(model)) is not None:
        model = original
    return model
