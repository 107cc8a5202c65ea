"""`fully_shard` (FSDP2) as a source of gradients: the reduced shards of its units.

In the backward pass FSDP reduce-scatters the gradients of one unit after the other within the sharding group. For each
it calls (torch 2.13, `foreach_reduce`)

1. the all-reduce hook, with this rank's part: a flat buffer in which every parameter is padded to the size of the
   largest shard;
2. after dividing the buffer in place, and for each parameter in the order of the buffer: it makes the piece the
   parameter's `.grad`, and calls its post-accumulate hooks.

So 2 tells which parameters are in the buffer (those without a gradient in this pass are not), and with the last of them
the bucket is complete and can be sent. Its average is known at the end of the backward pass, when all buckets of the
step have been found finite: only then do the averages replace the `.grad`.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from commhooks.errors import AttachError, HookRunError
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.exclude import all_names, own_name
from commhooks.gradients.local_shard import (
    NOTHING_SHARDED,
    LocalShard,
    RunningPass,
    UnitBuffer,
    common_mesh,
    is_sharded,
    local_values,
)
from commhooks.gradients.names import ModelNames
from commhooks.gradients.source import Extent, GradientSource, Reducer, described_parameter, held_weakly
from commhooks.gradients.torch_private import count_accumulate_hooks, current_task, run_after_backward


class FullyShardGradients(GradientSource):
    """The gradients of a model that was sharded by `fully_shard` over a mesh of one dimension."""

    nothing_to_reduce = NOTHING_SHARDED
    gives_grad_buckets = False
    averages_alone = False

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
        """`group`: the ranks that hold the same shard.

        Raises:
            AttachError: the model is sharded in a way that hooks cannot serve.
        """
        self._module = weakref.ref(model)
        self.before_weights_change()
        sharded = {own_name(name): p for name, p in model.named_parameters() if is_sharded(name, p)}
        mesh = common_mesh(sharded)
        super().__init__(group)
        self._shard_group = held_weakly(mesh.get_group())
        self._mesh = mesh
        self.device = local_values(next(iter(sharded.values()))).device
        if self.device.type != mesh.device_type:
            raise AttachError(
                f"the parameters are on {self.device.type!r} and their mesh is on {mesh.device_type!r}: "
                "CPUOffloadPolicy is not supported"
            )
        self.sparse = set()
        self._sharded = sharded
        shards = [LocalShard.of(name, p) for name, p in sharded.items() if p.requires_grad]
        self._shards = {shard.name: shard for shard in shards}
        self._of_parameter = {id(shard.parameter): shard for shard in shards}
        names = all_names(model)
        self.names = ModelNames(
            [(shard.name, shard.local) for shard in shards],
            {id(shard.local): names[id(shard.parameter)] for shard in shards},
        )
        self._reducer: Reducer | None = None
        self._pass: RunningPass | None = None
        self._handles: list[RemovableHandle] = []
        self._checked: set[tuple[int, ...]] = set()

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return self._shard_group()

    @property
    def module(self) -> torch.nn.Module | None:
        return self._module()

    def described(self) -> list[str]:
        place = ", shard {} of {}".format(*self.place)
        return [described_parameter(name, parameter) + place for name, parameter in self._sharded.items()]

    def weights(self) -> Mapping[str, torch.Tensor]:
        if self.module is None:
            return {}
        return {name: local_values(parameter) for name, parameter in self._sharded.items()}

    def stepped(self) -> Sequence[torch.Tensor]:
        return [shard.parameter for shard in self._shards.values()]

    def before_weights_change(self) -> None:
        for unit in self._units():
            unit.reshard()  # after an evaluation the root's parameters may still be whole

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        return {shard.name: shard.grad for shard in self._shards.values()}

    @property
    def place(self) -> tuple[int, int]:
        return self._mesh.get_local_rank(), self._mesh.size()

    @property
    def whole(self) -> ModelNames:
        whole = {
            name: torch.empty(shard.parameter.shape, dtype=shard.local.dtype, device="meta")
            for name, shard in self._shards.items()
        }
        return ModelNames(whole.items(), {id(each): self.names.all_names(name) for name, each in whole.items()})

    def extent(self, name: str) -> Extent:
        return self._shards[name].extent

    def as_whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        return self._shards[name].as_whole(part)

    def register(self, reducer: Reducer, state: Any) -> None:
        model = self.module
        assert model is not None
        for shard in self._shards.values():
            # Such a hook would see the gradient of this replica, before it is averaged.
            if count_accumulate_hooks(shard.parameter):
                raise AttachError(
                    f"parameter {shard.name} has a post-accumulate-grad hook: an earlier communication hook, or an "
                    "optimizer that steps in the backward pass. Neither can be combined with "
                    f"{reducer.name!r}: call hook.detach() on the earlier hook, or use an ordinary optimizer"
                )
        self._reducer = reducer
        for unit in self._units():
            try:
                unit.set_all_reduce_hook(self._on_reduced)
            except ValueError as error:
                raise AttachError(f"fully_shard takes no hook for {type(unit).__name__}: {error}") from error
        self._handles = [model.register_forward_hook(self._on_forward)]
        # The garbage collector cannot look into a parameter's hooks (torch 2.13): one that held this object, which
        # holds the parameters, would keep all of them and the process group for ever.
        accumulated = weakref.WeakMethod(self._on_accumulated)

        def on_accumulated(parameter: torch.Tensor) -> None:
            method = accumulated()
            if method is not None:
                method(parameter)

        for shard in self._shards.values():
            self._handles.append(shard.parameter.register_post_accumulate_grad_hook(on_accumulated))

    def unregister(self) -> None:
        self._replace_by(None)

    def close(self) -> None:
        self._replace_by(_refuse_closed)

    def _replace_by(self, hook: Any) -> None:
        """Undo `register`, unless that was done before: the model may have another hook since then."""
        for unit in self._units() if self._handles else ():
            unit.set_all_reduce_hook(hook)
        while self._handles:
            self._handles.pop().remove()

    def _units(self) -> list[FSDPModule]:
        model = self.module
        return [] if model is None else [module for module in model.modules() if isinstance(module, FSDPModule)]

    # ---- what torch calls --------------------------------------------------------------------------------------------

    def _on_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if current_task() == -1:
            self._pass = None  # one that is left has ended in an exception
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, grad: torch.Tensor) -> None:
        """The backward pass has reached the output of the model."""
        if self._pass is not None and self._pass.task != current_task():
            self._pass = None  # it has ended in an exception
        self._running(within=_refuse_reentrant)

    def _on_reduced(self, flat: torch.Tensor) -> None:
        """The all-reduce hook of all units."""
        current = self._running()
        current.check_filled()
        if not current.units:
            current.take_out_earlier(self._shards.values())
        current.filling = UnitBuffer(flat)

    def _on_accumulated(self, parameter: torch.Tensor) -> None:
        """The post-accumulate hook of all parameters."""
        shard, current = self._of_parameter[id(parameter)], self._pass
        if count_accumulate_hooks(parameter) > 1:  # the other one runs after this
            raise HookRunError(
                f"parameter {shard.name} has got a post-accumulate-grad hook since the communication hook was "
                "attached, such as that of an optimizer that steps in the backward pass: it would see the gradient of "
                "one replica. Remove it, or call hook.detach()"
            )
        if current is None or current.filling is None or shard.numel_padded == 0:
            return
        unit = current.filling
        unit.shards.append(shard)
        if unit.complete:
            current.filling = None
            self._send(unit, current)

    # ---- a backward pass ---------------------------------------------------------------------------------------------

    def _running(self, within: Callable[[], None] | None = None) -> RunningPass:
        """The running pass, or a new one. `within`: see `run_after_backward`."""
        current = self._pass
        if current is None:
            current = self._pass = RunningPass(current_task())
        # FSDP has queued its own callback before, which reduces the units whose inputs need no gradient.
        run_after_backward(lambda: self._end(current), within)
        return current

    @torch.no_grad()
    def _send(self, unit: UnitBuffer, current: RunningPass) -> None:
        assert self._reducer is not None
        current.check_new(unit)
        self._check_pieces(unit)
        unit.sent = unit.without_padding()
        bucket = Bucket(unit.sent, [shard.local for shard in unit.shards], index=len(current.units), is_last=False)
        current.units.append(unit)
        unit.average = self._reducer.reduce(bucket)

    @torch.no_grad()
    def _end(self, current: RunningPass) -> None:
        """At the end of the backward pass: wait for the averages and make them the gradients."""
        if current is not self._pass:
            return
        self._pass = None
        current.check_filled()
        if not current.units:
            return
        assert self._reducer is not None
        self._reducer.end_pass()
        current.take_over_averages()

    def _check_pieces(self, unit: UnitBuffer) -> None:
        """Check at its first occurrence that the buffer has the layout that this module expects."""
        key = tuple(id(shard) for shard in unit.shards)
        if key in self._checked:
            return
        for shard, piece in unit.pieces(unit.flat, padded=True):
            grad = shard.grad
            expected = piece.view(shard.local.shape)
            if grad is None or not torch.equal(grad.nan_to_num(), expected.to(grad).nan_to_num()):
                raise HookRunError(
                    f"the gradient of {shard.name} is not where it is expected in the buffer of its unit: this version "
                    f"of torch ({torch.__version__}) packs buffers in a way that commhooks does not know"
                )
        self._checked.add(key)


def _refuse_closed(flat: torch.Tensor) -> None:
    raise HookRunError(
        "a backward pass after close() of this model's communication hook, which ended its training: the replicas "
        "would drift apart. Attach a hook to the model for another training"
    )


def _refuse_reentrant() -> None:
    raise HookRunError(
        "the whole model is inside of a reentrant checkpoint, which hides the end of the backward pass: use "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or checkpoint parts of the model"
    )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module returns, through mappings, lists, tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, item.name) for item in dataclasses.fields(value)]
    for each in inner:
        yield from _tensors_in(each)
