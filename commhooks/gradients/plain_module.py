"""A module that nothing wraps as a source of gradients: for hooks that average weights, with one process per machine.

Each gradient is a bucket of its own, passed to the hook at the end of the backward pass.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from commhooks.gradients.bucket import Bucket
from commhooks.gradients.ddp import sparse_parameters
from commhooks.gradients.exclude import all_names, own_name
from commhooks.gradients.names import ModelNames
from commhooks.gradients.source import GradientSource, Reducer, described_parameter
from commhooks.gradients.torch_private import current_task, run_after_backward


class PlainGradients(GradientSource):
    """The gradients of a module's parameters."""

    nothing_to_reduce = "no parameter of this model requires a gradient: a hook would have nothing to do"
    gives_grad_buckets = False
    averages_alone = False

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._module = weakref.ref(module)
        self.names = ModelNames(
            [(own_name(name), p) for name, p in module.named_parameters() if p.requires_grad], all_names(module)
        )
        self.sparse = sparse_parameters(module)
        self.device = next(iter([*self.names.known().values(), torch.empty(0)])).device
        self._reducer: Reducer | None = None
        self._handles: list[RemovableHandle] = []
        self._task = -1  # the backward pass whose end is waited for

    @property
    def module(self) -> torch.nn.Module | None:
        return self._module()

    def register(self, reducer: Reducer, state: Any) -> None:
        self._reducer = reducer
        # As in fully_shard.py: a parameter's hook must not hold this object.
        accumulated = weakref.WeakMethod(self._on_accumulated)

        def on_accumulated(parameter: torch.Tensor) -> None:
            method = accumulated()
            if method is not None:
                method()

        known = self.names.known().values()
        self._handles = [each.register_post_accumulate_grad_hook(on_accumulated) for each in known]
        module = self.module
        assert module is not None
        weakref.finalize(module, _keep, self).atexit = False  # it lives as long as the module

    def unregister(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def close(self) -> None:
        self.unregister()

    def described(self) -> list[str]:
        return [described_parameter(name, parameter) for name, parameter in self.weights().items()]

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {} if self.module is None else dict(self.module.named_parameters())

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in self.names.known().items()}

    def _on_accumulated(self) -> None:
        if self._task != current_task():
            self._task = current_task()
            run_after_backward(self._end_pass)

    @torch.no_grad()
    def _end_pass(self) -> None:
        self._task = -1
        assert self._reducer is not None
        found = [parameter for parameter in self.names.known().values() if parameter.grad is not None]
        futures = []
        for place, parameter in enumerate(found):
            grad = parameter.grad
            assert grad is not None
            flat = grad if grad.is_sparse else grad.contiguous().view(-1)
            bucket = Bucket(flat, [parameter], place, is_last=False)
            futures.append((grad, flat, self._reducer.reduce(bucket)))
        for grad, flat, future in futures:
            reduced = future.wait()
            if not grad.is_sparse and (reduced is not flat or flat.data_ptr() != grad.data_ptr()):
                grad.copy_(reduced.view(grad.shape))
        self._reducer.end_pass()


def _keep(source: PlainGradients) -> None:
    """Called when the module has ended."""
