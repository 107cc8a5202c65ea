"""PowerSGD as compressors: per parameter, and per bucket.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, Algorithms 1 and 2.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from commhooks.comm.collective import Op
from commhooks.compressors.base import RESIDUAL, Compressor, Exchange, State, StateField, StepInfo, Trial
from commhooks.compressors.config import from_options
from commhooks.compressors.kernel import KernelsHere
from commhooks.compressors.plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.compressors.powersgd import codec, fields, fused_codec, native_kernel
from commhooks.compressors.powersgd.alternating_exchange import AlternatingExchange
from commhooks.compressors.powersgd.config import BatchedPowerSGD, PowerSGD
from commhooks.compressors.powersgd.device_exchange import DeviceExchange
from commhooks.compressors.powersgd.device_workspace import DeviceWorkspace
from commhooks.compressors.powersgd.fused_exchange import FusedExchange
from commhooks.compressors.powersgd.fused_workspace import FusedWorkspace
from commhooks.compressors.powersgd.host_exchange import HostExchange
from commhooks.compressors.powersgd.matrix import Matrix
from commhooks.compressors.powersgd.plan import MatrixPlan, memory_plan, plan_bucket, plan_parameter
from commhooks.compressors.powersgd.workspace import Draws, Workspace, WorkspaceSetup
from commhooks.errors import HookConfigError
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout

AnyPowerSGD = TypeVar("AnyPowerSGD", bound=PowerSGD)


class _LowRank(Compressor[AnyPowerSGD]):
    """Common base of the per-parameter and the per-bucket form."""

    title = "PowerSGD"

    @property
    def needs_exact_step(self) -> bool:
        return not self.config.warm_start

    @property
    def collectives(self) -> Sequence[Op]:  # type: ignore[override]
        return ("sum",) if self.config.alternate else ("sum", "sum")

    @property
    def stats_every(self) -> int:  # type: ignore[override]
        return max(1, self.config.compression_stats_logging_frequency)

    @property
    def words(self) -> str:
        return f"rank {self.config.matrix_approximation_rank}, from step {self.start_step}"

    @property
    def phrase(self) -> str:
        return f"{self.title} at rank {self.config.matrix_approximation_rank}"

    def _fields(self, q: StateField) -> tuple[StateField, ...]:
        """Q, P with `alternate`, and the residual with error feedback."""
        kept = (q, fields.P) if self.config.alternate else (q,)
        return (*kept, RESIDUAL) if self.config.use_error_feedback else kept

    def fresh(self, field: StateField, plan: UnitPlan, dtype: torch.dtype) -> torch.Tensor | None:
        if field.key != "q" or not isinstance(plan, MatrixPlan):
            return None
        # The same numbers as `Draws.q` at the first step.
        purpose = "Q" if self.config.warm_start else "Q at step 0"
        return codec.draw(self.config.random_seed, plan.key, purpose, plan.rank, plan.m, dtype)

    def check_here(self, device: torch.device, dtype: torch.dtype) -> None:
        if self.config.fused:
            fused_codec.check_supported(device, precision.compute_dtype(dtype))
            try:
                fused_codec.load(precision.compute_dtype(dtype))
            except HookConfigError as error:
                raise HookConfigError(
                    f"fused=True: {error}. Without fused=True, torch would compute instead"
                ) from error

    def kernels_here(self, device: torch.device, dtype: torch.dtype) -> KernelsHere:
        if self.config.fused is False:
            return KernelsHere()
        return native_kernel.kernels_here(device, precision.compute_dtype(dtype), only=self.config.fused is True)

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        return memory_plan(
            plans,  # type: ignore[arg-type]  # made by `plan`
            buckets,  # type: ignore[arg-type]
            self.wire_dtype,
            error_feedback=self.config.use_error_feedback,
        )

    def exchange(self, flat: torch.Tensor, work: Workspace | DeviceWorkspace, state: State, step: StepInfo) -> Exchange:
        error_feedback = self.config.use_error_feedback
        if isinstance(work, DeviceWorkspace):
            return DeviceExchange(flat, work, state, step, error_feedback=error_feedback).run()
        kind: type[HostExchange] = AlternatingExchange if self.config.alternate else HostExchange
        if isinstance(work, FusedWorkspace):
            kind = FusedExchange
        return kind(flat, work, state, step, error_feedback=error_feedback).run()

    def _new_workspace(self, layout: BucketLayout, matrices: list[Matrix]) -> Workspace | DeviceWorkspace:
        setup = WorkspaceSetup(
            self.wire_dtype_for(layout.dtype),
            Draws(self.config.random_seed, self.config.warm_start),
            fused=self._computes_natively(layout),
            stack_deltas=self.config.batch_tensors_with_same_shape,
        )
        if not precision.is_host_readable(layout.device) and not self.config.alternate:
            return DeviceWorkspace(layout, matrices, setup)
        # The tables of the native kernel take matrices of one parameter, whose two factors are sent in every step.
        in_tables = setup.fused and not self.config.alternate and not self.per_bucket
        return (FusedWorkspace if in_tables else Workspace)(layout, matrices, setup)

    def _computes_natively(self, layout: BucketLayout) -> bool:
        if self.config.fused:
            return True
        # A bucket may have another dtype than those for which the kernel was chosen (bare register_comm_hook).
        supported = fused_codec.supports(layout.device, precision.compute_dtype(layout.dtype))
        return self.kernel.name == native_kernel.NAME and supported


class PowerSGDCompressor(_LowRank[PowerSGD]):
    """Low-rank factors P and Q of each matrix, with error feedback and warm start: two all-reduces per bucket."""

    Config = PowerSGD

    @property
    def state_fields(self) -> tuple[StateField, ...]:  # type: ignore[override]
        return self._fields(fields.Q)

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        made = super().plan_one(info)
        return made if isinstance(made, MatrixPlan) else MatrixPlan.left_alone(info, made.reason)

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        return plan_parameter(info, self.config)

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> Workspace | DeviceWorkspace:
        matrices = [
            Matrix(plan.name, (slot,), plan.n, plan.m, plan.rank)
            for plan, slot in zip(plans, layout.slots, strict=True)
            if isinstance(plan, MatrixPlan) and plan.compressed
        ]
        return self._new_workspace(layout, matrices)

    @classmethod
    def trials(cls, ranks: Sequence[int], options: Mapping[str, Any]) -> Sequence[Trial]:
        made = []
        for rank in dict.fromkeys(ranks):
            given = {"matrix_approximation_rank": rank, **options}
            from_options(PowerSGD, given)  # raises for options that it would not take: now, not in the middle
            label = f"powerSGD rank {rank}"
            made.append(
                Trial(
                    label,
                    {**given, "start_powerSGD_iter": 0},
                    changes=2 + 1 / rank,  # the higher ranks first
                    note="PowerSGD changes the gradients: compare the accuracy that you reach. Its first "
                    "start_powerSGD_iter steps (by default 10 % of the run, 1000 at most) are plain all-reduce.",
                    slow_note=f"{label} computes longer than it waits: on a CPU it is faster with the native kernel, "
                    "which needs a C compiler such as gcc on every machine, and fused not set to False.",
                )
            )
        return made


class BatchedPowerSGDCompressor(_LowRank[BatchedPowerSGD]):
    """Each bucket as one square matrix, padded with zeros."""

    Config = BatchedPowerSGD
    per_bucket = True

    @property
    def state_fields(self) -> tuple[StateField, ...]:  # type: ignore[override]
        return self._fields(fields.BUCKET_Q)

    def plan(self, parameters: Sequence[ParameterInfo]) -> list[UnitPlan]:
        return [plan_bucket(parameters, self.config.matrix_approximation_rank)]

    @classmethod
    def trials(cls, ranks: Sequence[int], options: Mapping[str, Any]) -> Sequence[Trial]:
        return ()  # usually less accurate than PowerSGD per parameter, and not faster

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> Workspace | DeviceWorkspace:
        (plan,) = plans
        assert isinstance(plan, MatrixPlan)
        return self._new_workspace(layout, [Matrix(plan.key, layout.slots, plan.n, plan.m, plan.rank)])
