"""`ShardsHook`: compressed collectives of FSDP2 as a `Hook`, if no other hook averages."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from commhooks.checkpoint.user_state import UserStateCheckpointer
from commhooks.comm.groups import is_logging_rank
from commhooks.compressors.unit_plan import MemoryPlan, Unit, UnitPlan
from commhooks.engine.consensus import Binding
from commhooks.engine.kernel_choice import KernelChoice
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import Future, GradientSource, PassListener
from commhooks.hook.kinds import Prepared
from commhooks.hook.protocol import Residuals
from commhooks.hook.sharded_source import sharded_source
from commhooks.plan import ModelPlan
from commhooks.report import Status, Summary
from commhooks.request import HookRequest
from commhooks.sharded.attached import AttachedShards, Rows
from commhooks.sharded.layout import Piece, RowLayout, UnitParameter
from commhooks.sharded.source import OneReplica

NAME = "shards"


def prepare(
    request: HookRequest, source: GradientSource, binding: Binding, total_steps: int | None
) -> Prepared:
    def build(choice: KernelChoice) -> ShardsHook:
        assert isinstance(source, OneReplica)
        hook = ShardsHook(attach_shards(request, source), source)
        source.passes = hook.shards.attached.passes
        return hook

    return Prepared(None, build)


def source_without_replicas(
    model: torch.nn.Module, process_group: dist.ProcessGroup | None
) -> GradientSource:
    assert isinstance(model, FSDPModule)
    return sharded_source(model, process_group, None, one_replica=True, kind=OneReplica)


def attach_shards(request: HookRequest, source: GradientSource) -> "ModelShards":
    """Replace the collectives of the model. All ranks that share it must call this."""
    assert request.shards is not None and source.module is not None
    assert source.shard_group is not None  # `check_arrangement`
    logs = is_logging_rank(source.group, source.shard_group)
    attached = AttachedShards(
        request.shards, source.module, source.shard_group, source.device, logs=logs
    )
    return ModelShards(attached, alone=request.shards_alone)


class ModelShards:
    """What `CommHook` asks of compressed collectives. `alone`: no other hook averages."""

    def __init__(self, attached: AttachedShards, *, alone: bool) -> None:
        self.attached = attached
        self._alone = alone
        self.stats = attached.stats
        self.detach = attached.detach

    def summary(self) -> str:
        return shards_summary(self.attached)

    def plan(self) -> ModelPlan:
        return shards_plan(self.attached)

    def with_plan(self, plan: ModelPlan) -> ModelPlan:
        return plan if self._alone else dataclasses.replace(plan, shards=self.plan())


class ShardsHook:
    members = None

    def __init__(self, shards: ModelShards, source: GradientSource) -> None:
        self.shards = shards
        self.counters = shards.attached.traffic.counters
        self._names = source.names
        self.checkpointer = UserStateCheckpointer(NAME, self._options, self.counters, source.group)

    @property
    def _options(self) -> dict[str, Any]:
        options = dataclasses.asdict(self.shards.attached.options)
        return options | {"exclude": list(options["exclude"])}

    def run(self, bucket: Bucket) -> Future:
        raise AssertionError("FSDP2 reduces the gradients")

    def end_pass(self) -> None:
        return None

    def listeners(self, *, logs: bool) -> list[PassListener]:
        return []

    def status(self) -> Status:
        return Status(self._options, use=None, counts_bytes=True)

    def stats(self) -> dict[str, Any]:
        return {"step": self.checkpointer.step, "kernel": self.shards.stats()["kernel"]}

    def summary(self) -> Summary:
        return Summary(alone=None)  # `CommHook` logs the line of the shards

    def warnings(self) -> list[str]:
        attached = self.shards.attached
        if not self.plan().compressed:
            return [
                f"{NAME} ({attached.options.label}) compresses no parameter of this model:"
                " print(hook.plan()) gives the reasons."
            ]
        return [f"{NAME} computes with the kernel 'torch'. {attached.slower}"] * bool(
            attached.slower
        )

    def plan(self) -> ModelPlan:
        return self.shards.plan()

    @contextlib.contextmanager
    def residuals(self) -> Iterator[Residuals]:
        yield Residuals({}, 1.0, self._names.named_parameters())

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        return True

    def close(self) -> None:
        return None


# ---- what it reports
# --------------------------------------------------------------------------------------------------


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


def shards_plan(shards: AttachedShards) -> ModelPlan:
    memory = shards.memory_bytes
    return ModelPlan(
        f"{NAME}: {shards.options.label}",
        tuple(
            _planned(parameter, rows, shards)
            for rows in shards.rows
            for parameter in rows.unit.parameters
        ),
        memory=MemoryPlan(
            packed=memory["gathered"] + memory["scattered"],
            copies=memory["copies"] + memory["grouped"],
        ),
        arrangement=shards.arrangement,
        bucket_names=tuple(
            tuple(parameter.name for parameter in rows.unit.parameters) for rows in shards.rows
        ),
        buckets_are="Units of fully_shard",
    )


def _planned(parameter: UnitParameter, rows: Rows, shards: AttachedShards) -> ShardPlan:
    weights = _piece(parameter, rows.weights)
    gradients = _piece(parameter, rows.gradients)
    gathers = rows.unit.gathers
    gathered = parameter.gathered_dtype.itemsize
    reduced = parameter.reduced_dtype.itemsize if parameter.trained else 0
    before = shards.ranks * parameter.numel * (gathers * gathered + reduced)
    after = gathers * _sent(parameter, gathered, rows.weights, shards)
    if parameter.trained:
        after += _sent(parameter, reduced, rows.gradients, shards)
    reasons = dict.fromkeys(piece.exact for piece in (weights, gradients) if piece and piece.exact)
    compressed = any(piece is not None and not piece.exact for piece in (weights, gradients))
    return ShardPlan(
        parameter.name,
        parameter.shape,
        parameter.numel * shards.ranks,
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
    parameter: UnitParameter, itemsize: int, layout: RowLayout | None, shards: AttachedShards
) -> int:
    """Return the bytes that the rows of all ranks take in one collective between nodes."""
    piece = _piece(parameter, layout)
    if piece is None or layout is None or not layout.compressed:
        return shards.ranks * parameter.numel * itemsize
    return shards.route.peers * layout.sent_bytes(piece)


def shards_summary(shards: AttachedShards) -> str:
    """Return the line that rank 0 logs after the first backward pass."""
    plan = shards_plan(shards)
    details = [shards.options.label]
    if "int8" in (shards.options.weights, shards.options.gradients):
        details.append(f"blocks of {shards.options.block_size}")
        details += ["native kernel"] if shards.native else []
    details += [shards.arrangement] if shards.arrangement else []
    begin = f"{NAME} ({'; '.join(details)}): "
    if shards.ranks == 1:
        return f"{begin}there is one shard, so nothing is sent"
    unit = Unit.of(plan.bytes_before)
    gathers = sum(rows.unit.gathers for rows in shards.rows)
    scatters = sum(bool(rows.unit.trained) for rows in shards.rows)
    return (
        f"{begin}{unit.text(plan.bytes_before)} -> {unit.text(plan.bytes_after)} per step and rank,"
        f" for {gathers} all-gathers and {scatters} reduce-scatters of {len(shards.rows)} units"
    )
