"""A model sharded by `fully_shard` with prescribed gradients, on a mesh of replicas and shards."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

import commhooks
from commhooks import CommHook
from tests.support.inside import learns, session_of

Gradients = dict[str, torch.Tensor]

SHAPES = {
    # Uneven on 2 and 3 shards; `tiny` leaves nothing for the second one.
    "first": {"weight": (33, 20), "bias": (33,)},
    "even": {"weight": (24, 4, 5), "scale": (24,)},
    "tiny": {"weight": (1, 12), "bias": (1,)},
    # Parameters of the root: fully_shard reduces them at the end of the backward pass.
    "": {"own": (17, 16), "own_bias": (5,)},
}
NAMES = {
    f"{unit}.{name}" if unit else name: shape
    for unit, of_unit in SHAPES.items()
    for name, shape in of_unit.items()
}


class _Unit(nn.Module):
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(shapes.items()):
            generator = torch.Generator().manual_seed(number)
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: torch.Tensor, gradients: Gradients, prefix: str) -> torch.Tensor:
        for name, parameter in self.named_parameters(recurse=False):
            if prefix + name in gradients:
                x = x + (parameter * gradients[prefix + name].to(parameter.dtype)).sum().to(x.dtype)
        return x * 1.0


class Prescribed(_Unit):
    """A model whose gradients are passed to `forward`; None for a parameter without one."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(SHAPES[""], dtype)
        for unit, shapes in SHAPES.items():
            if unit:
                self.add_module(unit, _Unit(shapes, dtype))

    def forward(self, gradients: Gradients) -> torch.Tensor:  # type: ignore[override]
        x = torch.zeros((), dtype=torch.float64)
        for unit, module in self.named_children():
            x = module(x, gradients, f"{unit}.")
        return super().forward(x, gradients, "")


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Make a unit of every child with parameters, and of the root."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


POWERSGD = {
    "matrix_approximation_rank": 2,
    "start_powerSGD_iter": 1,
    "min_compression_rate": 1.0,
    "random_seed": 3,
}


def attached(
    replicas: int,
    shards: int,
    hook: Any = "powerSGD",
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> tuple[nn.Module, CommHook]:
    """Make a sharded `Prescribed` and its hook. `more`: arguments of `attach`."""
    mesh = mesh_of(replicas, shards)
    model = shard(Prescribed(dtype), mesh["shard"])
    return model, commhooks.attach(model, hook, replicate_group=mesh["replicate"], **more)


def random_gradients(
    step: int, rank: int | None = None, dtype: torch.dtype = torch.float64
) -> Gradients:
    """Return the gradients of this step and rank, the same in every process."""
    generator = torch.Generator().manual_seed(
        1000 * step + (dist.get_rank() if rank is None else rank)
    )
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in NAMES.items()
    }


def backward(model: nn.Module, gradients: Gradients) -> dict[str, torch.Tensor]:
    """Run one backward pass into fresh gradients, and return the whole ones on every rank."""
    model.zero_grad(set_to_none=True)
    model(gradients).backward()
    return whole_gradients(model)


def whole_gradients(model: nn.Module) -> Gradients:
    """Return the gradients of all shards, by name. All ranks of a sharding group must call this."""
    gradients = {
        name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None
    }
    padded = []
    for gradient in gradients.values():
        assert isinstance(gradient, DTensor) and gradient.placements == (Shard(0),)
        group = gradient.device_mesh.get_group()
        local = gradient.to_local()
        missing = -(-len(gradient) // group.size()) - len(local)
        padded.append(torch.cat([local, local.new_zeros(missing, *local.shape[1:])]).flatten())
    if not padded:
        return {}
    # In one collective: `full_tensor` of each would take a third of the time of the tests.
    everyone = [torch.empty_like(torch.cat(padded)) for _ in range(group.size())]
    dist.all_gather(everyone, torch.cat(padded), group)
    pieces = zip(*(flat.split([part.numel() for part in padded]) for flat in everyone), strict=True)
    return {
        name: torch.cat(rows)[: gradient.numel()].view(gradient.shape)
        for (name, gradient), rows in zip(gradients.items(), pieces, strict=True)
    }


def rows_of(name: str, shards: int, index: int) -> slice:
    """Return the rows of the whole parameter in shard `index`."""
    rows = -(-NAMES[name][0] // shards)
    return slice(index * rows, (index + 1) * rows)


def mean_over_ranks(step: int, world_size: int) -> Gradients:
    every = [random_gradients(step, rank) for rank in range(world_size)]
    return {name: torch.stack([gradients[name] for gradients in every]).mean(0) for name in NAMES}


def learned(hook: CommHook) -> dict[str, torch.Tensor]:
    """Return copies of the hook's learned state and counters; empty if it learns nothing."""
    if not learns(hook):
        return {}
    session = session_of(hook)
    session.held.settle()
    state = session.state
    tensors = {
        f"{key} of {name}": t.clone()
        for key, of_key in state.entries.items()
        for name, t in of_key.items()
    }
    return tensors | {
        "step": torch.tensor(state.step),
        "nonfinite": torch.tensor(state.nonfinite_steps),
    }


def whole_residuals(hook: CommHook) -> Gradients:
    """Return the mean residuals over the replicas, assembled from the shards. Changes the residuals
    as a save does.
    """
    saved = hook.state_dict("distributed").get("residual", {})
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in saved.items()
    }


@contextlib.contextmanager
def accumulating(model: nn.Module, setter: str = "set_requires_gradient_sync") -> Any:
    """Context manager: accumulate gradients. `setter`: the method of FSDPModule that turns
    communication off.
    """
    assert isinstance(model, FSDPModule)
    getattr(model, setter)(False)
    try:
        yield
    finally:
        getattr(model, setter)(True)
