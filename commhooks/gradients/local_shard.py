"""This rank's shards of the parameters of a model that `fully_shard` (FSDP2) has split."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from commhooks.errors import AttachError
from commhooks.gradients.source import Extent

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
        numel_padded: elements in FSDP's buffers, those of the largest shard.
    """

    name: str
    parameter: torch.nn.Parameter
    local: torch.Tensor
    numel_padded: int

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter) -> "LocalShard":
        sharded = as_dtensor(parameter)
        (placement,) = sharded.placements
        assert isinstance(placement, Shard)
        size = sharded.size(placement.dim)
        largest = -(-size // sharded.device_mesh.size())
        return cls(name, parameter, local_values(parameter), sharded.numel() // size * largest if size else 0)

    @property
    def extent(self) -> Extent:
        sharded = as_dtensor(self.parameter)
        (placement,) = sharded.placements
        assert isinstance(placement, Shard)
        dim, mesh = placement.dim, sharded.device_mesh
        largest = -(-sharded.size(dim) // mesh.size())
        start = min(mesh.get_local_rank() * largest, sharded.size(dim))
        return Extent(tuple(sharded.shape), tuple(self.local.shape), dim, start)

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


def is_sharded(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether hooks reduce this parameter; no for those that fully_shard ignores.

    Raises:
        AttachError: it is sharded in a way that hooks cannot serve.
    """
    data: object = parameter
    if not isinstance(data, DTensor):
        return False
    if data.device_mesh.ndim == 2 and isinstance(data.placements[0], Replicate):
        raise AttachError(
            "this model was sharded with a mesh of two dimensions, for which fully_shard itself averages over the "
            "replicas, uncompressed, before it calls a hook. Shard over the inner dimension only, "
            "fully_shard(module, mesh=mesh['shard']), and pass replicate_group=mesh['replicate']"
        )
    if data.device_mesh.ndim != 1 or not isinstance(data.placements[0], Shard):
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
