"""Define the compressor of PowerSGD: what it compresses, its learned state and its kernels."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch

from commhooks.compressors.base import RESIDUAL, Compressor, StateField
from commhooks.compressors.native import library
from commhooks.compressors.powersgd import cpu
from commhooks.compressors.powersgd.accelerator import AcceleratorKernel, by_shape
from commhooks.compressors.powersgd.cpu import CpuKernel, NativeProducts, TorchProducts
from commhooks.compressors.powersgd.exchange import (
    LowRankKernel,
    Matrix,
    PowerSGDWorkspace,
    draw,
    low_rank_exchange,
)
from commhooks.compressors.powersgd.options import PowerSGD
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan, real_itemsize
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, matrix_shape, memory_order
from commhooks.gradients.precision import compute_dtype

AnyPowerSGD = TypeVar("AnyPowerSGD", bound=PowerSGD)


@dataclass(frozen=True)
class MatrixPlan(UnitPlan):
    n: int = 0
    m: int = 0
    rank: int = 0

    columns: ClassVar[tuple[str, ...]] = ("n x m", "rank")

    @property
    def numel_sent(self) -> int:
        return (self.n + self.m) * self.rank if self.compressed else self.numel

    @property
    def cells(self) -> tuple[str, ...]:
        return f"{self.n} x {self.m}", str(self.rank)

    @property
    def details(self) -> dict[str, Any]:
        return {"matrix": [self.n, self.m] if self.rank else None, "rank": self.rank or None}


class FactorField(StateField):
    def shape(self, plan: UnitPlan) -> tuple[int, int]:
        assert isinstance(plan, MatrixPlan)
        return plan.rank, plan.m

    def refit(
        self, value: torch.Tensor, plan: UnitPlan, initial: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Truncate to the new rank, or append rows of `initial`.

        Without `initial` they are zeros, which the kernel replaces.
        """
        rank, _ = self.shape(plan)
        rows = len(value)
        if not rank:
            return None
        if rows >= rank:
            return value[:rank].clone()
        refitted = value.new_zeros(rank, value.shape[1]) if initial is None else initial.to(value)
        refitted[:rows] = value
        return refitted


class ParameterQ(FactorField):
    """Saves Q as `r x (the other dimensions in logical order)`."""

    def to_saved(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        rest = memory_order(parameter)[1:]
        q = value.detach().to("cpu", copy=True)
        view = q.view(q.shape[0], *(parameter.size(dim) for dim in rest))
        return view.permute(0, *(1 + rest.index(dim) for dim in sorted(rest))).contiguous()

    def from_saved(
        self, saved: torch.Tensor, parameter: torch.Tensor, row_dim: int
    ) -> torch.Tensor | None:
        order = memory_order(parameter)
        # the memory format has changed, so the rows consist of other elements
        if row_dim != order[0]:
            return None
        rest = order[1:]
        ordered = sorted(rest)
        in_memory_order = saved.detach().permute(0, *(1 + ordered.index(dim) for dim in rest))
        return in_memory_order.reshape(saved.shape[0], -1)

    def problem(self, value: torch.Tensor, plan: UnitPlan) -> str | None:
        rank, m = self.shape(plan)
        if rank and value.shape[1] != m:
            return f"a Q with {value.shape[1]} rows for {plan.name}, which needs {m}"
        return None


class LowRankCompressor(Compressor[AnyPowerSGD]):
    title = "PowerSGD"
    collectives = ("sum", "sum")
    exchange = staticmethod(low_rank_exchange)
    q: ClassVar[StateField]
    Cpu: ClassVar[type[CpuKernel]] = CpuKernel
    Accelerator: ClassVar[type[AcceleratorKernel]] = AcceleratorKernel

    @property
    def needs_exact_step(self) -> bool:
        return not self.config.warm_start

    @property
    def stats_every(self) -> int:  # type: ignore[override]
        return max(1, self.config.compression_stats_logging_frequency)

    @property
    def summary(self) -> str:
        return f"rank {self.config.matrix_approximation_rank}"

    @property
    def state_fields(self) -> tuple[StateField, ...]:  # type: ignore[override]
        return (self.q, RESIDUAL) if self.config.use_error_feedback else (self.q,)

    def native_build(self, device: torch.device, dtype: torch.dtype) -> str:
        return library.build(device, cpu.results_of)

    def initial_value(
        self, field: StateField, plan: UnitPlan, dtype: torch.dtype
    ) -> torch.Tensor | None:
        if field.key != "q" or not isinstance(plan, MatrixPlan):
            return None
        # The same numbers as `PowerSGDWorkspace.draw_q` draws at the first step.
        purpose = "Q" if self.config.warm_start else "Q at step 0"
        return draw(self.config.random_seed, plan.key, purpose, plan.rank, plan.m, dtype)

    def memory_plan(
        self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]
    ) -> MemoryPlan:
        residual = factors = copies = 0
        for plan in cast(Sequence[MatrixPlan], plans):  # made by `plan`
            if not plan.compressed:
                continue
            n, m, rank = plan.n, plan.m, plan.rank
            itemsize = compute_dtype(plan.dtype).itemsize
            residual += plan.numel * itemsize if self.config.use_error_feedback else 0
            factors += (rank * m + max(rank, 2) * (n + m)) * itemsize
            if n * m != plan.numel or real_itemsize(plan.dtype) != itemsize:
                copies += n * m * itemsize
        packed = sum(_packed_bytes(bucket, self.wire_dtype) for bucket in buckets)
        return MemoryPlan(residual, factors, packed, "P and Q", copies)

    def kernel(self, layout: BucketLayout, matrices: list[Matrix]) -> LowRankKernel:
        wire_dtype = self.wire_dtype_for(layout.dtype)
        if not precision.is_host_readable(layout.device):
            work = PowerSGDWorkspace(layout, by_shape(matrices), self.config, wire_dtype)
            return self.Accelerator(work, stack_deltas=self.config.batch_tensors_with_same_shape)
        work = PowerSGDWorkspace(layout, matrices, self.config, wire_dtype)
        shapes = [(x.n, x.m, x.rank) for x in matrices]
        if self.native:
            refills = self.q.per == "parameter"
            return self.Cpu(work, NativeProducts(shapes, work.dtype, refills=refills))
        return self.Cpu(work, TorchProducts(shapes, work.dtype))


def _packed_bytes(bucket: Sequence[UnitPlan], wire_dtype: torch.dtype | None) -> int:
    if not any(plan.compressed for plan in bucket):
        return 0
    sent = [plan for plan in bucket if plan.compressed or plan.lowered]
    return sum(
        (plan.numel_sent + (plan.flags if plan.compressed else 0)) * plan.wire_itemsize(wire_dtype)
        for plan in sent
    )


class PowerSGDCompressor(LowRankCompressor[PowerSGD]):
    Config = PowerSGD
    q = ParameterQ("q")

    def plan_parameter(self, info: ParameterInfo) -> MatrixPlan:
        """Compress a matrix if `(n + m) * rank * max(1, min_compression_rate) < n * m`.

        torch's `_should_compress` has the same rule, without the 1.
        """
        parameter = info.parameter
        if parameter.dim() < 2:
            return MatrixPlan.uncompressed(info, "scalar" if parameter.dim() == 0 else "vector")
        n, m = matrix_shape(parameter)
        rank = min(n, m, self.config.matrix_approximation_rank)
        min_rate = self.config.min_compression_rate
        sent = (n + m) * rank
        if sent >= parameter.numel() or sent * min_rate >= parameter.numel():
            saved = parameter.numel() / sent
            reason = f"saves only {saved:.2g}x (min_compression_rate={min_rate:g})"
            return MatrixPlan.uncompressed(info, reason)
        plan = MatrixPlan.uncompressed(info, "")
        return dataclasses.replace(plan, compressed=True, flags=1, n=n, m=m, rank=rank)

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> LowRankKernel:
        pairs = zip(layout.slots, cast(Sequence[MatrixPlan], plans), strict=True)
        matrices = [
            Matrix(plan.name, (slot,), plan.n, plan.m, plan.rank)
            for slot, plan in pairs
            if plan.compressed
        ]
        return self.kernel(layout, matrices)
