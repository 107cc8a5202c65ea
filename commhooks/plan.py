"""Plan a model: what is compressed, the bytes sent, and the memory needed, with a table."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.compressors.base import Compressor
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, Unit, UnitPlan
from commhooks.engine.reduction import FLAT, FlatReduction
from commhooks.engine.session import ExchangeDriver
from commhooks.errors import HookConfigError
from commhooks.gradients.names import ModelNames, ParameterNames, all_names
from commhooks.gradients.precision import dtype_name
from commhooks.gradients.source import GradientSource, sparse_parameters
from commhooks.request import HookRequest

NAMED_SAVE_BYTES = 10**9
"""The summary mentions the residuals in a checkpoint if they take at least this many bytes."""


@dataclass(frozen=True)
class BucketPlan:
    parameters: tuple[str, ...]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class ModelPlan:
    """Says what a hook does to a model. `print(plan)` shows a table with one line per parameter."""

    hook: str
    parameters: tuple[UnitPlan, ...]
    wire_dtype: torch.dtype | None = None
    """The dtype to which the hook or its wrapper casts what it sends; None: the gradients' dtype.
    """
    start_step: int = 0
    """The first compressed step."""
    selective: bool = True
    """Whether the hook decides for each parameter whether to compress it."""
    memory: MemoryPlan = MemoryPlan()
    """Bytes that the hook needs on each rank. With `ranks_per_node`, on this rank, which keeps a
    share of the residuals. `packed` and `copies` are upper bounds while the buckets are unknown.
    """
    arrangement: str = ""
    """With `ranks_per_node`: the nodes between which the bytes are sent. A node sends them as if it
    were one rank.
    """
    bucket_names: tuple[tuple[str, ...], ...] = ()
    """The parameters in each bucket; empty if the buckets are unknown, or if the rows of the plan
    are buckets.
    """
    bytes_per_save: int = 0
    """With local steps: bytes that a joint save sends for an optimizer with two numbers per weight,
    such as Adam.
    """
    saved_residuals: int = 0
    """Bytes of residuals in a checkpoint, summed over all ranks; 0 before the hook is attached."""
    buckets_are: str = "Buckets, as in the latest backward pass"
    """What `bucket_names` are, in the table."""
    shards: "ModelPlan | None" = None
    """What FSDP2's own collectives send, if they are compressed (`shards`)."""
    sends: bool | None = True
    """False for a hook that sends nothing; None for a user's hook, whose traffic is unknown."""

    @property
    def bytes_before(self) -> int:
        """Gradient bytes per rank and step without the hook."""
        return sum(p.size_bytes() for p in self.parameters)

    @property
    def bytes_after(self) -> int:
        """Bytes that the hook passes to collectives per rank and step once it compresses, without
        `flag_bytes`.
        """
        return sum(self.sent_bytes(p) for p in self.parameters)

    @property
    def flag_bytes(self) -> int:
        """Additional bytes per rank and step, such as a flag per matrix."""
        return sum(p.flags * p.wire_itemsize(self.wire_dtype) for p in self.compressed)

    @property
    def unit(self) -> Unit:
        return Unit.of(self.bytes_before)

    @property
    def compressed(self) -> tuple[UnitPlan, ...]:
        return tuple(p for p in self.parameters if p.compressed)

    @property
    def compressed_share(self) -> float:
        before = self.bytes_before
        return sum(p.size_bytes() for p in self.compressed) / before if before else 0.0

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        before = {p.name: p.size_bytes() for p in self.parameters}
        after = {p.name: self.sent_bytes(p) for p in self.parameters}
        return tuple(
            BucketPlan(
                names, sum(before[name] for name in names), sum(after[name] for name in names)
            )
            for names in self.bucket_names
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain types, for JSON. Bytes are per rank and step."""
        sent = None if self.sends is None else self.bytes_after
        # All rows have the same keys, and "matrix" and "rank" for every hook.
        details = dict.fromkeys(
            ["matrix", "rank", *(key for p in self.parameters for key in p.details)]
        )
        return {
            "hook": self.hook,
            "start_step": self.start_step if self.selective else None,
            "wire_dtype": None if self.wire_dtype is None else dtype_name(self.wire_dtype),
            "known": not self._unknown,
            "bytes_before": self.bytes_before,
            "bytes_after": sent,
            "flag_bytes": self.flag_bytes,
            "bytes_per_save": self.bytes_per_save,
            "saved_residuals": self.saved_residuals,
            "compression_rate": self.bytes_before / sent if sent else None,
            "compressed_share": self.compressed_share,
            "memory_bytes": {
                name: getattr(self.memory, name)
                for name in ("residual", "factors", "packed", "copies", "total", "host")
            },
            "parameters": [
                {
                    "name": p.name,
                    "shape": list(p.shape),
                    "dtype": dtype_name(p.dtype),
                    "compressed": p.compressed,
                    "reason": p.reason,
                    **details,
                    **p.details,
                    "bytes_before": p.size_bytes(),
                    "bytes_after": None if self.sends is None else self.sent_bytes(p),
                }
                for p in self.parameters
            ],
            "buckets": [
                dataclasses.asdict(bucket) | {"parameters": list(bucket.parameters)}
                for bucket in self.buckets
            ],
            "shards": None if self.shards is None else self.shards.as_dict(),
        }

    @property
    def _unknown(self) -> bool:
        """Whether the plan is unknown before the first backward pass. An empty plan means that:
        every DDP model has parameters.
        """
        return self.selective and not self.parameters

    def sent_bytes(self, parameter: UnitPlan) -> int:
        """Return the bytes sent for one parameter per step. For a user's function, whose traffic is
        unknown, return the uncompressed size.
        """
        return 0 if self.sends is False else parameter.sent_bytes(self.wire_dtype)

    def summary(self) -> str:
        """Return one line: what is compressed, and the bytes per step and rank."""
        if self._unknown:
            return (
                f"{self.hook}: the plan follows DDP's buckets; it is known after the first backward"
                " pass"
            )
        unit = self.unit
        after = "what the hook sends" if self.sends is None else unit.text(self.bytes_after)
        sent = f"{unit.text(self.bytes_before)} -> {after} per step and rank"
        if self.bytes_per_save:
            sent += (
                f" on average, and {unit.text(self.bytes_per_save)} per save with an optimizer such"
                " as Adam"
            )
        if self.saved_residuals >= NAMED_SAVE_BYTES:
            sent += (
                f", {self.saved_residuals / 1e9:.1f} GB of residuals in a checkpoint of all ranks"
            )
        if not self.selective:
            return f"{len(self.parameters)} parameters, {sent}"
        return (
            f"{len(self.compressed)} of {len(self.parameters)} parameters compressed "
            f"({100 * self.compressed_share:.1f} % of the bytes), {sent}"
        )

    def __str__(self) -> str:
        text = self.summary() if self._unknown else self.table() + self.summary()
        return text if self.shards is None else f"{text}\n{self.shards}"

    def table(self) -> str:
        tables = [_parameter_table(self), *([_bucket_table(self)] if self.bucket_names else [])]
        return text_of(*tables) + self._memory_line()

    def _memory_line(self) -> str:
        memory = self.memory
        if self.sends is None or not memory.total:
            return ""
        parts = {
            "residuals": memory.residual,
            memory.factors_are: memory.factors,
            "packed to send": memory.packed,
        }
        parts |= {"copies of gradients": memory.copies}
        shown = ", ".join(
            f"{self.unit.number(size)} {name}" for name, size in parts.items() if size
        )
        whose = "of this rank" if self.arrangement else "per rank"
        host = f", and {self.unit.text(memory.host)} of host memory" if memory.host else ""
        saved = ""
        if self.saved_residuals:
            saved = (
                f"Residuals in a checkpoint of all ranks: {self.unit.text(self.saved_residuals)}\n"
            )
        return f"Memory {whose}: {self.unit.text(memory.total)} ({shown}){host}\n{saved}"


# ---- making one
# --------------------------------------------------------------------------------------------------


def parameter_plans(
    compressor: Compressor[Any], names: ParameterNames, sparse: Collection[int] = ()
) -> list[UnitPlan]:
    """Plan each parameter; [] if the compressor works on whole buckets. `sparse`: ids of parameters
    with sparse gradients.
    """
    config = compressor.config
    infos = [
        ParameterInfo.of(n, p, names, config, id(p) in sparse)
        for n, p in names.named_parameters().items()
    ]
    return [plan for plan in (compressor.plan(infos) if infos else ()) if not plan.state_name]


def whole_plan(
    hook: str,
    compressor: Compressor[Any],
    rows: Sequence[UnitPlan],
    buckets: Sequence[Sequence[str]] = (),
    reduction: FlatReduction = FLAT,
) -> ModelPlan:
    by_name = {row.name: row for row in rows}
    rows_by_bucket = [[by_name[name] for name in bucket] for bucket in buckets]
    return ModelPlan(
        f"{hook}: {compressor.label}" if compressor.label else hook,
        tuple(rows),
        compressor.wire_dtype,
        compressor.start_step,
        selective=compressor.selective,
        memory=reduction.memory_plan(compressor, rows, rows_by_bucket or [rows]),
        arrangement=reduction.description,
        bucket_names=tuple(map(tuple, buckets)),
        bytes_per_save=(
            sum(row.numel * 4 for row in rows) if compressor.config.averages_weights else 0
        ),
        sends=compressor.config.sends,
    )


@dataclass(frozen=True)
class SavedBy:
    """Says how a hook's residuals are saved.

    Attributes:
        form: "mean", "per_rank" or "drop".
        ranks: how many ranks save together; with a sharded model, hold the same shard.
        shards: the number of shards of the model.
    """

    form: str
    ranks: int
    shards: int

    @classmethod
    def of(cls, request: HookRequest, source: GradientSource) -> "SavedBy":
        sharded = source.shard_group is not None and request.save_residual == "per_rank"
        return cls(
            "mean" if sharded else request.save_residual, source.group.size(), source.place[1]
        )


def session_plan(
    hook: str, session: ExchangeDriver, sparse: Collection[int], saved_by: SavedBy
) -> ModelPlan:
    compressor = session.compressor
    consensus = session.consensus
    rows = parameter_plans(compressor, consensus.binding.names, sparse)
    if rows:
        buckets = consensus.buckets.names() if session.has_run else ()
        plan = whole_plan(hook, compressor, rows, buckets, consensus.reduction)
    else:  # each row is a bucket
        rows = consensus.buckets.plans()
        plan = whole_plan(hook, compressor, rows)
    saved = 0
    if saved_by.form == "mean":
        saved = compressor.memory_plan(rows, [rows]).residual
    elif saved_by.form == "per_rank":  # with nodes each rank has the residuals of its share
        saved = plan.memory.residual * saved_by.ranks
    return dataclasses.replace(plan, saved_residuals=saved * saved_by.shards)


def plan_model(
    module: torch.nn.Module, request: HookRequest, total_steps: int | None = None
) -> ModelPlan:
    """Plan what a hook will do to `module` in DDP. Parameters may be on the meta device, because
    their values are not read. Raises HookConfigError if the request is for a user's function or for
    no hook, its start is a fraction and `total_steps` is None, or no parameter is trained.
    """
    compressor = request.new_compressor(total_steps)
    if request.off:
        raise HookConfigError(
            "without a hook there is nothing to plan; hook 'allreduce' shows the plain average"
        )
    if compressor is None:
        raise HookConfigError(
            f"hook {request.name!r} is a function, whose traffic cannot be planned"
        )
    names = all_names(module)
    trained = [
        (names[id(parameter)][0], parameter)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    if not trained:
        raise HookConfigError("the model has no parameter that requires a gradient")
    rows = parameter_plans(compressor, ModelNames(trained, names), sparse_parameters(module))
    return whole_plan(request.name, compressor, rows)


# ---- tables
# --------------------------------------------------------------------------------------------------


def text_of(*parts: Any) -> str:
    """Format `parts` with rich. Text is printed literally, without markup or emoji (":x:")."""
    from rich.console import Console

    console = Console(width=120, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def new_table(title: str | None = None) -> Any:
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE)


def _parameter_table(plan: ModelPlan) -> Any:
    title = (
        f"{plan.hook}: compressed from step {plan.start_step} on" if plan.selective else plan.hook
    )
    title += f", {plan.arrangement}" if plan.arrangement else ""
    table = new_table(title)
    # Long names and reasons are wrapped, never truncated; numbers are not wrapped.
    table.add_column("parameter", overflow="fold")
    table.add_column("shape", overflow="fold")
    columns = max((type(p).columns for p in plan.parameters), key=len, default=())
    for name in columns:
        table.add_column(name, justify="left" if " x " in name else "right", no_wrap=True)
    table.add_column(plan.unit.name, justify="right", no_wrap=True)
    table.add_column(f"{plan.unit.name} sent", justify="right", no_wrap=True)
    if plan.selective:
        table.add_column("not compressed because", overflow="fold")
    for p in plan.parameters:
        cells = p.cells if p.compressed else ("",) * len(columns)
        table.add_row(
            p.name,
            "x".join(map(str, p.shape)) or "scalar",
            *cells,
            plan.unit.number(p.size_bytes()),
            "?" if plan.sends is None else plan.unit.number(plan.sent_bytes(p)),
            *([p.reason] if plan.selective else []),
        )
    return table


def _bucket_table(plan: ModelPlan) -> Any:
    table = new_table(plan.buckets_are)
    table.add_column("bucket", justify="right", no_wrap=True)
    table.add_column("parameters", overflow="fold")
    table.add_column(plan.unit.name, justify="right", no_wrap=True)
    table.add_column(f"{plan.unit.name} sent", justify="right", no_wrap=True)
    for place, bucket in enumerate(plan.buckets):
        names = bucket.parameters
        shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
        sent = "?" if plan.sends is None else plan.unit.number(bucket.bytes_after)
        table.add_row(str(place), shown, plan.unit.number(bucket.bytes_before), sent)
    return table
