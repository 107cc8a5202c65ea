"""Find the units of a model, and refuse those whose collectives cannot be replaced."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from commhooks.errors import AttachError
from commhooks.gradients.names import all_names, own_name
from commhooks.gradients.torch_private import UnitOfFSDP, unit_of_fsdp
from commhooks.sharded.layout import UnitParameter

_SETTERS = ("set_custom_all_gather", "set_custom_reduce_scatter")


@dataclass(frozen=True, eq=False)
class UnitLayout:
    """Describes the parameters of a unit, in the order of FSDP2's buffers.

    Attributes:
        gathers: how often a step gathers the weights from all ranks.
        regathers: how often a step gathers them among fewer ranks (`reshard_after_forward=N`).
    """

    name: str
    parameters: tuple[UnitParameter, ...]
    gathers: int
    regathers: int = 0

    @property
    def trained(self) -> list[UnitParameter]:
        return [parameter for parameter in self.parameters if parameter.trained]

    def described(self) -> str:
        """Describe the unit in a line that is equal on two ranks if and only if its rows are."""
        rows = [(p.names, p.numel, p.gathered_dtype, p.trained) for p in self.parameters]
        return f"{self.name}: {rows}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Unit(UnitLayout):
    """Describes a module to which `fully_shard` was applied. `gather`, `scatter`: FSDP2's own
    objects, to put back.
    """

    module: "weakref.ref[FSDPModule]"
    gather: Any
    scatter: Any


def units_of(model: torch.nn.Module) -> list[Unit]:
    """Return the units of `model` that have parameters. Raises AttachError if the collectives of
    one cannot be replaced.
    """
    names = all_names(model)
    known = list(model.parameters())
    units = []
    for module_name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        unit = unit_of_fsdp(module, known, is_root=module is model)
        if unit is not None and unit.parameters:
            name = own_name(module_name) or type(model).__name__.removeprefix("FSDP")
            _check(name, module, unit)
            units.append(
                Unit(
                    name,
                    tuple(_described(p, names[id(p)], unit) for p in unit.parameters),
                    unit.gathers,
                    unit.regathers,
                    module=weakref.ref(module),
                    gather=unit.gather,
                    scatter=unit.scatter,
                )
            )
    return units


def usual_units(model: torch.nn.Module, ranks: int) -> list[UnitLayout]:
    """Divide a model that is not sharded as is usual: `fully_shard` over `ranks` ranks of every
    entry of the outermost `ModuleList` and `Sequential` modules, and of the rest, the root, whose
    weights a step gathers once.
    """
    names = all_names(model)
    taken: set[torch.nn.Parameter] = set()

    def unit_of(name: str, module: torch.nn.Module, gathers: int) -> UnitLayout:
        new = [parameter for parameter in module.parameters() if parameter not in taken]
        taken.update(new)
        return UnitLayout(name, tuple(_unsharded(p, names[id(p)], ranks) for p in new), gathers)

    layers = [unit_of(name, layer, 2) for name, layer in _layers(model, "")]
    units = [unit_of(type(model).__name__, model, 1), *layers]
    return [unit for unit in units if unit.parameters]


def _layers(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in module.named_children():
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            yield prefix + name, child
        else:
            yield from _layers(child, f"{prefix}{name}.")


def _unsharded(parameter: torch.nn.Parameter, names: Sequence[str], ranks: int) -> UnitParameter:
    shape = tuple(parameter.shape)
    dtype = parameter.dtype
    rows = shape[0] if shape else 1
    numel = parameter.numel() // rows * -(-rows // ranks) if rows else 0
    trained = parameter.requires_grad
    return UnitParameter(tuple(names), shape, dtype, dtype, dtype, numel, trained)


def _described(
    parameter: torch.nn.Parameter, names: Sequence[str], unit: UnitOfFSDP
) -> UnitParameter:
    policy = unit.policy
    dtype = parameter.dtype
    gathered = policy.param_dtype if policy.param_dtype and dtype.is_floating_point else dtype
    return UnitParameter(
        tuple(names),
        tuple(parameter.shape),
        dtype,
        gathered,
        policy.reduce_dtype or gathered,
        padded_numel(parameter),
        parameter.requires_grad,
    )


def padded_numel(parameter: torch.nn.Parameter) -> int:
    """Return the number of elements of the largest shard, which all ranks send."""
    sharded: Any = parameter
    placement = sharded.placements[0]
    ranks = sharded.device_mesh.size()
    dim = placement.dim if isinstance(placement, Shard) else 0  # Replicate: on a mesh of one rank
    size = sharded.size(dim)
    return sharded.numel() // size * -(-size // ranks) if size else 0


def _check(name: str, module: FSDPModule, unit: UnitOfFSDP) -> None:
    missing = next((setter for setter in _SETTERS if not hasattr(module, setter)), None)
    if missing is not None:
        raise AttachError(
            f"shards needs FSDPModule.{missing}, which torch {torch.__version__} lacks: install a"
            " newer version, or leave out shards"
        )
    for what, comm in {"all-gather": unit.gather, "reduce-scatter": unit.scatter}.items():
        if comm is not None and not type(comm).__name__.startswith("Default"):
            raise AttachError(
                f"unit {name} has an {what} of its own already, {type(comm).__name__}: shards"
                " cannot be combined with set_symm_mem_for_comm,"
                " set_allocate_memory_from_process_group_for_comm, set_custom_all_gather,"
                " set_custom_reduce_scatter, or an earlier hook with shards (call its detach())"
            )
    try:
        module.set_custom_all_gather(unit.gather)
        module.set_custom_reduce_scatter(unit.scatter)
    except ValueError as error:
        raise AttachError(f"unit {name} takes no shards: {error}") from error
    for parameter in unit.parameters:
        sharded: object = parameter
        local = sharded.to_local() if isinstance(sharded, DTensor) else parameter
        if hasattr(local, "fsdp_pre_all_gather"):
            raise AttachError(
                f"unit {name} has parameters of type {type(local).__name__}, which choose"
                " themselves what is gathered (fsdp_pre_all_gather, as with float8): leave out"
                " shards"
            )
