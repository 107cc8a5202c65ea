"""Plan what compressed collectives of FSDP2 send, and describe it in a line."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from commhooks.compressors.unit_plan import MemoryPlan, Unit, UnitPlan
from commhooks.errors import HookConfigError, no_such
from commhooks.plan import ModelPlan
from commhooks.sharded.layout import Piece, RowLayout, UnitParameter
from commhooks.sharded.options import Shards
from commhooks.sharded.unit_codecs import Rows, UnitCodecs
from commhooks.sharded.units import usual_units

NAME = "shards"


@dataclass(frozen=True)
class ShardPlan(UnitPlan):
    """Describes a parameter of a unit. `weights`, `gradients`: what a step sends, in words."""

    weights: str = ""
    gradients: str = ""
    bytes_before: int = 0
    bytes_after: int = 0

    columns: ClassVar[tuple[str, ...]] = ("weights", "gradients")

    @property
    def cells(self) -> tuple[str, ...]:
        return self.weights, self.gradients

    @property
    def details(self) -> dict[str, Any]:
        return {"weights": self.weights, "gradients": self.gradients}

    def size_bytes(self) -> int:
        return self.bytes_before

    def sent_bytes(self, wire_dtype: Any) -> int:
        return self.bytes_after


UNITS_ARE = "Units of fully_shard"


def shards_plan(codecs: UnitCodecs, units_are: str = UNITS_ARE) -> ModelPlan:
    return ModelPlan(
        f"{NAME}: {codecs.options.label}",
        tuple(
            _planned(parameter, rows, codecs)
            for rows in codecs.rows
            for parameter in rows.unit.parameters
        ),
        # One buffer each. FSDP2 uses more than one at a time if it gathers ahead of the unit that
        # it computes next.
        memory=MemoryPlan(
            packed=codecs.gathered.size + codecs.scattered.size,
            copies=codecs.copies.size + codecs.grouped.size,
        ),
        arrangement=codecs.arrangement,
        bucket_names=tuple(
            tuple(parameter.name for parameter in rows.unit.parameters) for rows in codecs.rows
        ),
        buckets_are=units_are,
    )


def _planned(parameter: UnitParameter, rows: Rows, codecs: UnitCodecs) -> ShardPlan:
    weights = _piece(parameter, rows.weights)
    gradients = _piece(parameter, rows.gradients)
    gathers = rows.unit.gathers
    gathered = parameter.gathered_dtype.itemsize
    reduced = parameter.reduced_dtype.itemsize if parameter.trained else 0
    before = codecs.ranks * parameter.numel * (gathers * gathered + reduced)
    after = gathers * _sent(parameter, gathered, rows.weights, codecs)
    if parameter.trained:
        after += _sent(parameter, reduced, rows.gradients, codecs)
    reasons = dict.fromkeys(piece.exact for piece in (weights, gradients) if piece and piece.exact)
    compressed = any(piece is not None and not piece.exact for piece in (weights, gradients))
    return ShardPlan(
        parameter.name,
        parameter.shape,
        parameter.numel * codecs.ranks,
        parameter.dtype,
        compressed=compressed,
        reason="" if compressed else "; ".join(reasons) or "several dtypes in its unit",
        weights=f"{gathers} x {_form(weights, rows.weights, parameter.gathered_dtype)}",
        gradients=(
            _form(gradients, rows.gradients, parameter.reduced_dtype)
            if parameter.trained
            else "none"
        ),
        bytes_before=-(-before // 2),
        bytes_after=-(-after // 2),
    )


def _piece(parameter: UnitParameter, layout: RowLayout | None) -> Piece | None:
    pieces = () if layout is None else layout.pieces
    return next((piece for piece in pieces if piece.name == parameter.name), None)


def _form(piece: Piece | None, layout: RowLayout | None, dtype: Any) -> str:
    if piece is None or layout is None or piece.exact:
        return str(dtype).removeprefix("torch.")
    return layout.form


def _sent(
    parameter: UnitParameter, itemsize: int, layout: RowLayout | None, codecs: UnitCodecs
) -> int:
    """Return the bytes that the rows of all ranks take in one collective between nodes."""
    piece = _piece(parameter, layout)
    if piece is None or layout is None or not layout.compressed:
        return codecs.ranks * parameter.numel * itemsize
    return codecs.nodes * layout.sent_bytes(piece)


def shards_summary(codecs: UnitCodecs) -> str:
    """Return the line that rank 0 logs after the first backward pass."""
    plan = shards_plan(codecs)
    options = codecs.options
    details = [options.label]
    if "int8" in (options.weights, options.gradients):
        details.append(f"blocks of {options.block_size}")
        details += ["native kernel"] if codecs.native else []
    details += [plan.arrangement] if plan.arrangement else []
    begin = f"{NAME} ({'; '.join(details)}): "
    if codecs.ranks == 1:
        return f"{begin}there is one shard, so nothing is sent"
    unit = Unit.of(plan.bytes_before)
    gathers = sum(rows.unit.gathers for rows in codecs.rows)
    regathers = sum(rows.unit.regathers for rows in codecs.rows)
    scatters = sum(bool(rows.unit.trained) for rows in codecs.rows)
    among_fewer = f" ({regathers} more among fewer ranks, exactly)" if regathers else ""
    return (
        f"{begin}{unit.text(plan.bytes_before)} -> {unit.text(plan.bytes_after)} per step and rank,"
        f" for {_number(gathers, 'all-gather')}{among_fewer} and"
        f" {_number(scatters, 'reduce-scatter')} of {_number(len(codecs.rows), 'unit')}"
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


# ---- planning without a process group ------------------------------------------------------------

USUAL_UNITS = "Units, if fully_shard is applied to every layer and to the model"


def plan_unsharded(
    model: torch.nn.Module,
    form: str,
    options: Mapping[str, Any],
    ranks: int,
    ranks_per_node: int,
) -> tuple[ModelPlan, str]:
    """Plan a model that `fully_shard` would divide among `ranks` ranks, in units as `usual_units`
    says, and return the plan and its summary. Memory is that of an accelerator.

    Args:
        model: not sharded; its parameters may be on the meta device.
        form: "int8" or "bf16".
        options: of `Shards`.

    Raises:
        HookConfigError: an option is wrong, or the ranks do not fill the nodes.
    """
    names = [option.name for option in dataclasses.fields(Shards)]
    unknown = next((name for name in options if name not in names), None)
    if unknown is not None:
        raise no_such("Shards", "option", unknown, names)
    if ranks < 1 or ranks_per_node < 1 or ranks % ranks_per_node:
        raise HookConfigError(
            f"{ranks} ranks with {ranks_per_node} per node; expected a multiple, 1 or more"
        )
    nodes = ranks // ranks_per_node
    codecs = UnitCodecs(
        Shards(**{"weights": form, "gradients": form, **options}),
        usual_units(model, ranks),
        torch.device("meta"),
        ranks=ranks,
        nodes=ranks if nodes == 1 else nodes,
        native=False,
    )
    if not codecs.rows:
        raise HookConfigError("the model has no parameters")
    return shards_plan(codecs, USUAL_UNITS), shards_summary(codecs)
