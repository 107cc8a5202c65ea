"""This rank's shards of the parameters of a model that `fully_shard` (FSDP2) has split, and the buffers that they are
reduced in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from commhooks.errors import AttachError, HookRunError
from commhooks.gradients.source import Extent, Future

NOTHING_SHARDED = (
    "no parameter of this model is both trainable and sharded by fully_shard, so a communication hook would have "
    "nothing to do: leave out the hook, or attach it after unfreezing parameters"
)


def as_dtensor(parameter: torch.nn.Parameter) -> DTensor:
    """`parameter`, which is a DTensor. (Not its `.data`: torch 2.13 caches the results of operations by mesh, and may
    return a mesh of a process group that was destroyed.)"""
    assert isinstance(parameter, DTensor)
    return parameter


def local_values(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's shard of the values, which it shares."""
    return as_dtensor(parameter).to_local().detach()


@dataclass(frozen=True, eq=False)
class LocalShard:
    """This rank's shard of a parameter.

    Attributes:
        local: has the shape and dtype of the shard; stands for the parameter in buckets.
        extent: where the shard lies in the parameter.
        numel_padded: elements in FSDP's buffers, those of the largest shard.
    """

    name: str
    parameter: torch.nn.Parameter
    local: torch.Tensor
    extent: Extent
    numel_padded: int

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter) -> "LocalShard":
        sharded, local = as_dtensor(parameter), local_values(parameter)
        (placement,), mesh = sharded.placements, sharded.device_mesh
        dim = placement.dim if isinstance(placement, Shard) else 0  # Replicate: on a mesh of one rank
        size = sharded.size(dim)
        largest = -(-size // mesh.size())
        start = min(mesh.get_local_rank() * largest, size)
        extent = Extent(tuple(sharded.shape), tuple(local.shape), dim, start)
        return cls(name, parameter, local, extent, sharded.numel() // size * largest if size else 0)

    def as_whole(self, part: torch.Tensor) -> DTensor:
        """`part`, of the shard's shape, as a DTensor that is placed like the parameter."""
        sharded = as_dtensor(self.parameter)
        shape, stride = sharded.shape, sharded.stride()
        return DTensor.from_local(
            part, sharded.device_mesh, sharded.placements, run_check=False, shape=shape, stride=stride
        )

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's shard of the gradient."""
        grad = self.parameter.grad
        return grad.to_local() if isinstance(grad, DTensor) else grad


@dataclass(eq=False)
class UnitBuffer:
    """The buffer in which FSDP has reduced a unit: filled parameter by parameter, then sent.

    Attributes:
        flat: as FSDP passed it.
        sent: the bucket's buffer: `flat`, or a copy of it without the padding.
        average: of `sent`.
    """

    flat: torch.Tensor
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

    def pieces(self, buffer: torch.Tensor, *, padded: bool) -> list[tuple[LocalShard, torch.Tensor]]:
        """The part of `buffer` that belongs to each shard, 1-D."""
        found, offset = [], 0
        for shard in self.shards:
            found.append((shard, buffer[offset : offset + shard.local.numel()]))
            offset += shard.numel_padded if padded else shard.local.numel()
        return found


@dataclass(eq=False)
class RunningPass:
    """A running backward pass.

    Attributes:
        task: see `current_task`.
        units: those that have been sent.
        filling: the one whose parameters FSDP is naming.
        earlier: gradients that earlier backward passes have accumulated, taken out of `.grad`.
    """

    task: int
    units: list[UnitBuffer] = field(default_factory=list)
    filling: UnitBuffer | None = None
    earlier: list[tuple[LocalShard, torch.Tensor]] = field(default_factory=list)

    def check_filled(self) -> None:
        if self.filling is not None:
            raise HookRunError(
                "fully_shard reduces parameters that the model did not have when the hook was attached, or that were "
                "frozen then: call hook.detach(), and attach a hook again after loading and unfreezing parameters. "
                "With Accelerate call prepare(model, optimizer) again; in Lightning unfreeze before fit"
            )

    def check_new(self, unit: UnitBuffer) -> None:
        sent = {shard.name for each in self.units for shard in each.shards}
        again = next((shard.name for shard in unit.shards if shard.name in sent), None)
        if again is not None:
            raise HookRunError(
                f"fully_shard has reduced {again} twice in one backward pass: its module is called more than once "
                "before the backward pass. Apply fully_shard to a module around all of these calls instead"
            )

    def take_out_earlier(self, shards: Iterable[LocalShard]) -> None:
        """FSDP would add to these gradients what is not averaged yet."""
        for shard in shards:
            if shard.parameter.grad is not None:
                self.earlier.append((shard, shard.parameter.grad))
                shard.parameter.grad = None

    def take_over_averages(self) -> None:
        """Wait for the averages and make them the gradients, added to the earlier ones."""
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
    """Whether hooks reduce this parameter; no for those that fully_shard ignores.

    Raises:
        AttachError: it is sharded in a way that hooks cannot serve.
    """
    data: object = parameter
    if not isinstance(data, DTensor):
        return False
    ranks = data.device_mesh.size()
    if data.device_mesh.ndim == 2 and isinstance(data.placements[0], Replicate):
        raise AttachError(
            "this model was sharded with a mesh of two dimensions, for which fully_shard itself averages over the "
            "replicas, uncompressed, before it calls a hook. Change two lines: "
            "fully_shard(module, mesh=mesh['shard']) instead of mesh=mesh, with the names that your mesh has, and "
            "commhooks.attach(model, hook, replicate_group=mesh['replicate'])"
        )
    if data.device_mesh.ndim == 1 and isinstance(data.placements[0], Replicate) and ranks > 1:
        raise AttachError(
            f"this model was replicated over a mesh of {ranks} ranks, over which replicate itself averages, "
            "uncompressed, before it calls a hook. Change two lines, with mesh = init_device_mesh(device_type, "
            f"({ranks}, 1), mesh_dim_names=('replicate', 'shard')): replicate(module, mesh=mesh['shard']), and "
            "commhooks.attach(model, hook, replicate_group=mesh['replicate'])"
        )
    if data.device_mesh.ndim != 1 or not isinstance(data.placements[0], (Shard, Replicate)):
        raise AttachError(
            f"parameter {name} is placed as {data.placements}: a hook needs parameters that fully_shard has split over "
            "a mesh of one dimension; tensor parallelism is not supported"
        )
    if data.is_meta:
        raise AttachError(f"parameter {name} is on the meta device: attach the hook after materialising the model")
    return True


def common_mesh(parameters: Mapping[str, torch.nn.Parameter]) -> DeviceMesh:
    """The mesh over which all of `parameters` are sharded.

    Raises:
        AttachError: there are several, or none.
    """
    meshes = {as_dtensor(parameter).device_mesh: name for name, parameter in parameters.items()}
    if len(meshes) > 1:
        raise AttachError(
            f"parameters {' and '.join(list(meshes.values())[:2])} are sharded over different meshes; a hook needs one "
            "mesh for the whole model"
        )
    if not meshes:
        raise AttachError(NOTHING_SHARDED)
    return next(iter(meshes))
