"""Read gradients from a model sharded by `fully_shard` (FSDP2): the reduced shards of its units.

In the backward pass FSDP reduce-scatters the gradients of one unit after another within the
sharding group. For each unit (torch 2.13, `foreach_reduce`)

1. it calls the all-reduce hook with this rank's part: a flat buffer in which every parameter is
   padded to the size of the largest shard;
2. it divides the buffer in place. Then, for each parameter in the order of the buffer, it makes the
   parameter's piece its `.grad` and calls its post-accumulate hooks.

The calls of step 2 reveal which parameters are in the buffer: those without a gradient are missing.
After the last of these calls the bucket is complete and is sent. At the end of the backward pass
the averages replace the `.grad`.

After `set_requires_all_reduce(False)` nothing is sent. As FSDP does on a two-dimensional mesh, the
reduced gradients of this replica are kept apart, and are added to the buffer of the next pass that
averages them.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.hooks import RemovableHandle

from commhooks.errors import AttachError, HookRunError
from commhooks.gradients.layout import Bucket
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.names import ModelNames, all_names, own_name
from commhooks.gradients.precision import keep_for_current_stream
from commhooks.gradients.source import (
    Extent,
    Future,
    GradientSource,
    HookCallbacks,
    call_after_accumulation,
    described_parameter,
    held_weakly,
)
from commhooks.gradients.torch_private import (
    all_reduces,
    count_accumulate_hooks,
    current_task,
    run_after_backward,
)

NOTHING_SHARDED = (
    "no parameter of this model is both trainable and sharded by fully_shard, so a communication"
    " hook would have nothing to do: leave out the hook, or attach it after unfreezing parameters"
)


def as_dtensor(parameter: torch.nn.Parameter) -> DTensor:
    """Return `parameter`, typed as a DTensor.

    `.data` will not do: torch 2.13 caches results of operations by mesh, and may return a DTensor
    whose mesh has a destroyed process group.
    """
    assert isinstance(parameter, DTensor)
    return parameter


def local_values(parameter: torch.nn.Parameter) -> torch.Tensor:
    return as_dtensor(parameter).to_local().detach()


@dataclass(frozen=True, eq=False)
class LocalShard:
    """Describes this rank's shard of a parameter.

    `local`: its values, which represent the parameter in buckets. `numel_padded`: number of
    elements in FSDP's buffers, the size of the largest shard.
    """

    name: str
    parameter: torch.nn.Parameter
    local: torch.Tensor
    extent: Extent
    numel_padded: int

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter) -> "LocalShard":
        sharded = as_dtensor(parameter)
        values = local_values(parameter)
        # not a view of a detached tensor, whose memory could not be replaced
        local = torch.empty(0, dtype=values.dtype, device=values.device)
        local.set_(values)  # type: ignore[call-overload]
        mesh = sharded.device_mesh
        (placement,) = sharded.placements
        # Replicate: on a mesh of one rank
        dim = placement.dim if isinstance(placement, Shard) else 0
        size = sharded.size(dim)
        largest = -(-size // mesh.size())
        start = min(mesh.get_local_rank() * largest, size)
        extent = Extent(tuple(sharded.shape), tuple(local.shape), dim, start)
        numel_padded = sharded.numel() // size * largest if size else 0
        return cls(name, parameter, local, extent, numel_padded)

    def follow_parameter(self) -> None:
        """Let `local` have the memory of the parameter. torch 2.8: the first forward pass, and each
        load, moves a shard that is smaller than those of other ranks into new memory.
        """
        values = local_values(self.parameter)
        if self.local.data_ptr() != values.data_ptr():
            self.local.set_(values)  # type: ignore[call-overload]

    def as_whole(self, part: torch.Tensor) -> DTensor:
        sharded = as_dtensor(self.parameter)
        return DTensor.from_local(
            part,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )

    @property
    def grad(self) -> torch.Tensor | None:
        grad = self.parameter.grad
        return grad.to_local() if isinstance(grad, DTensor) else grad


@dataclass(eq=False)
class UnitBuffer:
    """Holds the buffer in which FSDP has reduced a unit (`flat`).

    It is sent as soon as all of its parameters are known.

    Attributes:
        averaged: False after `set_requires_all_reduce(False)`.
        sent: the bucket's buffer: `flat`, or a copy without the padding.
        average: the future of the average of `sent`.
    """

    flat: torch.Tensor
    averaged: bool
    shards: list[LocalShard] = field(default_factory=list)
    sent: torch.Tensor = field(init=False)
    average: Future = field(init=False)

    @property
    def complete(self) -> bool:
        return sum(shard.numel_padded for shard in self.shards) == self.flat.numel()

    def without_padding(self) -> torch.Tensor:
        if all(shard.local.numel() == shard.numel_padded for shard in self.shards):
            return self.flat
        return torch.cat([piece for _, piece in self.pieces(self.flat, padded=True)])

    def pieces(
        self, buffer: torch.Tensor, *, padded: bool
    ) -> list[tuple[LocalShard, torch.Tensor]]:
        pieces = []
        offset = 0
        for shard in self.shards:
            numel = shard.local.numel()
            pieces.append((shard, buffer[offset : offset + numel]))
            offset += shard.numel_padded if padded else numel
        return pieces


@dataclass(eq=False)
class RunningPass:
    """Tracks a running backward pass.

    Attributes:
        task: see `current_task`.
        began: whether a unit has been reduced.
        units: the units that have been sent.
        filling: the unit whose parameters are becoming known.
        earlier: accumulated gradients of earlier backward passes, taken out of `.grad`.
    """

    task: int
    began: bool = False
    units: list[UnitBuffer] = field(default_factory=list)
    filling: UnitBuffer | None = None
    earlier: list[tuple[LocalShard, torch.Tensor]] = field(default_factory=list)

    def check_filled(self) -> None:
        if self.filling is not None:
            raise HookRunError(
                "fully_shard reduces parameters that the model did not have when the hook was"
                " attached, or that were frozen then: call hook.detach(), and attach a hook again"
                " after loading and unfreezing parameters. With Accelerate call prepare(model,"
                " optimizer) again; in Lightning unfreeze before fit"
            )

    def check_new(self, unit: UnitBuffer) -> None:
        sent = {shard.name for earlier in self.units for shard in earlier.shards}
        again = next((shard.name for shard in unit.shards if shard.name in sent), None)
        if again is not None:
            raise HookRunError(
                f"fully_shard has reduced {again} twice in one backward pass: its module is called"
                " more than once before the backward pass. Apply fully_shard to a module around"
                " all of these calls instead"
            )

    def take_out_earlier(self, shards: Iterable[LocalShard]) -> None:
        """Take accumulated gradients out of `.grad`, where FSDP would add unaveraged ones."""
        for shard in shards:
            if shard.parameter.grad is not None:
                self.earlier.append((shard, shard.parameter.grad))
                shard.parameter.grad = None

    def take_over_averages(self) -> None:
        for unit in self.units:
            for shard, piece in unit.pieces(unit.average.wait(), padded=False):
                grad = shard.grad
                assert grad is not None
                if grad.data_ptr() != piece.data_ptr():
                    grad.copy_(piece.view(grad.shape))
        for shard, earlier in self.earlier:
            if shard.parameter.grad is not None:
                earlier.add_(shard.parameter.grad)
            shard.parameter.grad = earlier


def is_sharded(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether hooks reduce this parameter; False if fully_shard ignores it.

    Raise AttachError if it is sharded in a way that hooks do not support.
    """
    data: object = parameter
    if not isinstance(data, DTensor):
        return False
    ranks = data.device_mesh.size()
    if data.device_mesh.ndim == 2 and isinstance(data.placements[0], Replicate):
        raise AttachError(
            "this model was sharded with a mesh of two dimensions, for which fully_shard itself"
            " averages over the replicas, uncompressed, before it calls a hook. Change two lines:"
            " fully_shard(module, mesh=mesh['shard']) instead of mesh=mesh, with the names that"
            " your mesh has, and commhooks.attach(model, hook, replicate_group=mesh['replicate'])"
        )
    if data.device_mesh.ndim == 1 and isinstance(data.placements[0], Replicate) and ranks > 1:
        raise AttachError(
            f"this model was replicated over a mesh of {ranks} ranks, over which replicate itself"
            " averages, uncompressed, before it calls a hook. Change two lines, with mesh ="
            f" init_device_mesh(device_type, ({ranks}, 1), mesh_dim_names=('replicate', 'shard')):"
            " replicate(module, mesh=mesh['shard']), and commhooks.attach(model, hook,"
            " replicate_group=mesh['replicate'])"
        )
    if data.device_mesh.ndim != 1 or not isinstance(data.placements[0], (Shard, Replicate)):
        raise AttachError(
            f"parameter {name} is placed as {data.placements}: a hook needs parameters that"
            " fully_shard has split over a mesh of one dimension; tensor parallelism is not"
            " supported"
        )
    if data.is_meta:
        raise AttachError(
            f"parameter {name} is on the meta device: attach the hook after materialising the model"
        )
    return True


def _units_of(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshard(units: Iterable[FSDPModule]) -> None:
    for unit in units:
        unit.reshard()  # after an evaluation the root's parameters may still be unsharded


def sharded_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Reshard the model, and return the parameters that hooks reduce.

    Raises AttachError if hooks do not support the sharding.
    """
    _reshard(_units_of(model))
    parameters = {own_name(name): p for name, p in model.named_parameters()}
    _refuse_some_replicated(parameters)
    return {name: p for name, p in parameters.items() if is_sharded(name, p)}


def _refuse_some_replicated(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise AttachError if some parameters are sharded and others replicated over several ranks."""
    kinds: dict[type, str] = {}
    for name, parameter in parameters.items():
        data: object = parameter
        if isinstance(data, DTensor) and data.device_mesh.ndim == 1 and data.device_mesh.size() > 1:
            kinds.setdefault(type(data.placements[0]), name)
    if Replicate in kinds and Shard in kinds:
        raise AttachError(
            f"parameter {kinds[Replicate]} is replicated, and {kinds[Shard]} is sharded:"
            " fully_shard itself averages what is replicated, uncompressed, before it calls a hook."
            " Shard all parameters: return Shard(0), not Replicate(), in shard_placement_fn, and do"
            " not call replicate for a part of the model"
        )


def common_mesh(parameters: Mapping[str, torch.nn.Parameter]) -> DeviceMesh:
    meshes = {as_dtensor(parameter).device_mesh: name for name, parameter in parameters.items()}
    if len(meshes) > 1:
        raise AttachError(
            f"parameters {' and '.join(list(meshes.values())[:2])} are sharded over different"
            " meshes; a hook needs one mesh for the whole model"
        )
    if not meshes:
        raise AttachError(NOTHING_SHARDED)
    return next(iter(meshes))


class FullyShardGradients(GradientSource):
    nothing_to_reduce = NOTHING_SHARDED
    from_ddp = False

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
        """Read the gradients of a sharded model; `group`: the ranks that hold the same shard.

        Raises AttachError if hooks do not support the sharding.
        """
        self._module = weakref.ref(model)
        sharded = sharded_parameters(model)
        mesh = common_mesh(sharded)
        super().__init__(group)
        self._shard_group = held_weakly(mesh.get_group())
        self._mesh = mesh
        self.device = local_values(next(iter(sharded.values()))).device
        if self.device.type != mesh.device_type:
            raise AttachError(
                f"the parameters are on {self.device.type!r} and their mesh is on"
                f" {mesh.device_type!r}: CPUOffloadPolicy is not supported"
            )
        self.sparse = set()
        self._sharded = sharded
        trained = {own_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        self._not_sharded = [name for name in trained if name not in sharded]
        shards = [LocalShard.of(name, p) for name, p in sharded.items() if p.requires_grad]
        self._shards = {shard.name: shard for shard in shards}
        self._of_parameter = {id(shard.parameter): shard for shard in shards}
        names = all_names(model)
        self.names = ModelNames(
            [(shard.name, shard.local) for shard in shards],
            {id(shard.local): names[id(shard.parameter)] for shard in shards},
        )
        self._callbacks: HookCallbacks | None = None
        self._pass: RunningPass | None = None
        # gradients reduced over the shards, not averaged over the replicas
        self._partial: dict[str, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._checked: set[tuple[int, ...]] = set()

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return self._shard_group()

    @property
    def module(self) -> torch.nn.Module | None:
        return self._module()

    def described(self) -> list[str]:
        shard, count = self.place
        return [
            f"{described_parameter(name, parameter)}, shard {shard} of {count}"
            for name, parameter in self._sharded.items()
        ]

    def weights(self) -> Mapping[str, torch.Tensor]:
        if self.module is None:
            return {}
        return {name: local_values(parameter) for name, parameter in self._sharded.items()}

    def not_averaged(self) -> list[str]:
        """Return the parameters that were trained and not sharded when the hook was attached.

        FSDP itself reduces the others, and `_end` finds those that were frozen then.
        """
        return self._not_sharded

    def stepped(self) -> Sequence[torch.Tensor]:
        return [shard.parameter for shard in self._shards.values()]

    def before_weights_change(self) -> None:
        _reshard(self._units())
        self._follow_parameters()

    def _follow_parameters(self) -> None:
        for shard in self._shards.values():
            shard.follow_parameter()

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
        names = {id(parameter): self.names.all_names(name) for name, parameter in whole.items()}
        return ModelNames(whole.items(), names)

    def extent(self, name: str) -> Extent:
        return self._shards[name].extent

    def as_whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        return self._shards[name].as_whole(part)

    def register(self, callbacks: HookCallbacks, state: Any) -> None:
        model = self.module
        assert model is not None
        for shard in self._shards.values():
            # Another post-accumulate hook would see the gradient of this replica before the
            # average.
            if count_accumulate_hooks(shard.parameter):
                raise AttachError(
                    f"parameter {shard.name} has a post-accumulate-grad hook: an earlier"
                    " communication hook, or an optimizer that steps in the backward pass. Neither"
                    f" can be combined with {callbacks.name!r}: call hook.detach() on the earlier"
                    " hook, or use an ordinary optimizer"
                )
        self._callbacks = callbacks
        for unit in self._units():
            try:
                unit.set_all_reduce_hook(functools.partial(self._on_reduced, weakref.ref(unit)))
            except ValueError as error:
                raise AttachError(
                    f"fully_shard takes no hook for {type(unit).__name__}: {error}"
                ) from error
        self._handles = [model.register_forward_hook(self._on_forward)]
        parameters = [shard.parameter for shard in self._shards.values()]
        self._handles += call_after_accumulation(parameters, self._on_accumulated)

    def unregister(self) -> None:
        self._replace_by(None)

    def close(self) -> None:
        self._replace_by(_refuse_closed)

    def _replace_by(self, hook: Any) -> None:
        """Undo `register`; a second call does nothing, because the model may have another hook."""
        for unit in self._units() if self._handles else ():
            unit.set_all_reduce_hook(hook)
        while self._handles:
            self._handles.pop().remove()

    def _units(self) -> list[FSDPModule]:
        return [] if self.module is None else _units_of(self.module)

    # ---- what torch calls ------------------------------------------------------------------------

    def _on_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if current_task() == -1:
            self._pass = None  # it has ended in an exception
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, grad: torch.Tensor) -> None:
        if self._pass is not None and self._pass.task != current_task():
            self._pass = None  # it has ended in an exception
        self._running(within=_refuse_reentrant)

    def _on_reduced(self, unit: Callable[[], FSDPModule | None], flat: torch.Tensor) -> None:
        current = self._running()
        module = unit()
        current.check_filled()
        if not current.began:
            current.began = True
            current.take_out_earlier(self._shards.values())
        current.filling = UnitBuffer(flat, averaged=module is None or all_reduces(module))

    def _on_accumulated(self, parameter: torch.Tensor) -> None:
        shard = self._of_parameter[id(parameter)]
        current = self._pass
        if count_accumulate_hooks(parameter) > 1:  # the other hook runs after this one
            raise HookRunError(
                f"parameter {shard.name} has got a post-accumulate-grad hook since the"
                " communication hook was attached, such as an optimizer's that steps in the"
                " backward pass: it would see the gradient of one replica. Remove it, or call"
                " hook.detach()"
            )
        if current is None or current.filling is None or shard.numel_padded == 0:
            return
        unit = current.filling
        unit.shards.append(shard)
        if unit.complete:
            current.filling = None
            if unit.averaged:
                self._send(unit, current)
            else:
                self._keep_partial(unit)

    # ---- a backward pass -------------------------------------------------------------------------

    def _running(self, within: Callable[[], None] | None = None) -> RunningPass:
        current = self._pass
        if current is None:
            current = self._pass = RunningPass(current_task())
            self._follow_parameters()
        # Begin a pass if none is running. FSDP has queued its own callback before this one; it
        # reduces the units whose inputs need no gradient.
        run_after_backward(lambda: self._end(current), within)
        return current

    @plain_mode()
    def _keep_partial(self, unit: UnitBuffer) -> None:
        for shard in unit.shards:
            assert shard.grad is not None
            gradient = shard.grad.view(-1)
            kept = self._partial.get(shard.name)
            self._partial[shard.name] = gradient if kept is None else kept.add_(gradient)
            keep_for_current_stream([shard.grad])  # FSDP has allocated it on another stream
            shard.parameter.grad = None

    @plain_mode()
    def _send(self, unit: UnitBuffer, current: RunningPass) -> None:
        assert self._callbacks is not None
        current.check_new(unit)
        self._check_pieces(unit)
        unit.sent = unit.without_padding()
        for shard, piece in unit.pieces(unit.sent, padded=unit.sent is unit.flat):
            partial = self._partial.pop(shard.name, None)
            if partial is not None:
                piece.add_(partial)
        parameters = [shard.local for shard in unit.shards]
        bucket = Bucket(unit.sent, parameters, index=len(current.units), is_last=False)
        current.units.append(unit)
        unit.average = self._callbacks.reduce(bucket)

    @plain_mode()
    def _end(self, current: RunningPass) -> None:
        if current is not self._pass:
            return
        self._pass = None
        current.check_filled()
        if current.units:
            assert self._callbacks is not None
            self._callbacks.end_pass()
        current.take_over_averages()

    def _check_pieces(self, unit: UnitBuffer) -> None:
        """Check each buffer's layout when it first occurs, because FSDP does not document it."""
        key = tuple(id(shard) for shard in unit.shards)
        if key in self._checked:
            return
        for shard, piece in unit.pieces(unit.flat, padded=True):
            grad = shard.grad
            expected = piece.view(shard.local.shape)
            if grad is None or not torch.equal(grad.nan_to_num(), expected.to(grad).nan_to_num()):
                raise HookRunError(
                    f"the gradient of {shard.name} is not where it is expected in the buffer of its"
                    f" unit: this version of torch ({torch.__version__}) packs buffers in a way"
                    " that commhooks does not support"
                )
        self._checked.add(key)


def _refuse_closed(flat: torch.Tensor) -> None:
    raise HookRunError(
        "a backward pass after close() of this model's communication hook, which ended its"
        " training: the replicas would drift apart. Attach a hook to the model for another training"
    )


def _refuse_reentrant() -> None:
    raise HookRunError(
        "the whole model is inside of a reentrant checkpoint, which hides the end of the backward"
        " pass: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or checkpoint"
        " parts of the model"
    )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
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
    for part in inner:
        yield from _tensors_in(part)
