"""Plan each bucket layout when it first occurs, and keep its plans and workspace."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from commhooks.compressors.base import Compressor, Exchange, StepInfo
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.engine.reduction import FlatReduction
from commhooks.engine.state import LearnedState
from commhooks.errors import HookRunError, logger_of
from commhooks.gradients.layout import Bucket, BucketLayout, read_layout
from commhooks.gradients.names import ParameterNames

logger = logger_of(__name__)


@dataclass(eq=False)
class KnownBucket:
    """Holds a bucket layout with its plans, one per unit.

    `work` and `make_exchange` are None if nothing is compressed.

    Attributes:
        numel_sent: number of elements that a rank sends once compression has begun, without flags.
        make_exchange: returns the exchange for `(flat, work, state, step)`.
        used: whether the layout occurs in the current or the latest backward pass.
    """

    layout: BucketLayout
    plans: list[UnitPlan]
    numel_sent: int
    work: Any = None
    make_exchange: Callable[[torch.Tensor, Any, LearnedState, StepInfo], Exchange] | None = None
    used: bool = True

    @property
    def compressed(self) -> set[str]:
        """Names of the compressed parameters, and keys of the compressed units."""
        keys = {plan.key for plan in self.plans if plan.compressed}
        return keys.union(self.layout.names) if keys and self.is_one_unit else keys

    @property
    def is_one_unit(self) -> bool:
        return any(plan.state_name for plan in self.plans)


class KnownBuckets:
    """Holds the known bucket layouts, derived from the buckets and the options; never saved.

    Attributes:
        dead_units: keys of units whose layouts no longer exist, and whose state is not deleted yet.
        no_longer_compressed: parameters whose residuals are not deleted yet.
    """

    def __init__(self, state: LearnedState, names: ParameterNames) -> None:
        self.is_logging_rank = True
        self._state = state
        self._names = names
        self._buckets: dict[tuple[int, ...], KnownBucket] = {}
        self.dead_units: list[str] = []
        self.no_longer_compressed: list[str] = []

    def __iter__(self) -> Iterator[KnownBucket]:
        return iter(list(self._buckets.values()))  # an outer step in a thread may add one

    def clear(self) -> None:
        self._buckets.clear()
        self.no_longer_compressed.clear()

    def plans(self) -> list[UnitPlan]:
        plans = [plan for bucket in self for plan in bucket.plans]
        order = {name: place for place, name in enumerate(self._names.named_parameters())}
        return sorted(plans, key=lambda plan: order.get(plan.name, 0))

    def names(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(bucket.layout.names) for bucket in self)

    def compressed(self) -> set[str]:
        return {name for bucket in self if bucket.used for name in bucket.compressed}

    def find(
        self,
        bucket: Bucket,
        compressor: Compressor[Any],
        reduction: FlatReduction,
        step: StepInfo,
        *,
        first: bool,
    ) -> KnownBucket:
        """Look up the layout of `bucket`; plan it and allocate its workspace if it is new.

        `first` is True for the first bucket of a backward pass. Raises HookRunError if the learned
        state belongs to another model.
        """
        if first:
            for earlier in self._buckets.values():
                earlier.used = False
        # ids stay unique, because the layouts keep the parameters alive
        key = tuple(map(id, bucket.parameters))
        planned = self._buckets.get(key)
        if planned is None:
            self._forget_dead(bucket)
            planned = self._planned(bucket, compressor, reduction, step, first)
            self._buckets[key] = planned
        planned.used = True
        return planned

    def _planned(
        self,
        bucket: Bucket,
        compressor: Compressor[Any],
        reduction: FlatReduction,
        step: StepInfo,
        first: bool,
    ) -> KnownBucket:
        names = self._names.of_bucket(list(bucket.parameters), first)
        layout = read_layout(bucket.flat, bucket.parameters, names)
        infos = [
            ParameterInfo.of(
                slot.name, slot.parameter, self._names, compressor.config, layout.sparse
            )
            for slot in layout.slots
        ]
        plans = reduction.plans(compressor, compressor.plan(infos))
        planned = KnownBucket(layout, plans, sum(plan.numel_sent for plan in plans))
        self._fit_state(planned, infos, compressor)
        compressed = planned.compressed
        residuals = self._state["residual"] if self._state.local else {}
        self.no_longer_compressed += [
            name for name in names if name in residuals and name not in compressed
        ]
        if compressed:
            planned.work = reduction.workspace(compressor, layout, plans, step)
            planned.make_exchange = reduction.exchange(compressor)
        return planned

    def forget_dead_state(self, compressor: Compressor[Any]) -> None:
        fields = [field for field in compressor.state_fields if field.per == "bucket"]
        for unit in self.dead_units:
            for field in fields:
                self._state[field.key].pop(unit, None)
        self.dead_units.clear()

    def drop_residuals(self, compressor: Compressor[Any]) -> None:
        """Delete the residuals of parameters that are no longer compressed.

        Call this in the commit of a finite step: the ranks of a joint save are at the same step,
        and then have residuals of the same parameters.
        """
        for name in self.no_longer_compressed:
            self._state["residual"].pop(name, None)
        if self.is_logging_rank:
            logger.warning(
                "%s no longer compresses these parameters, and drops their residuals: %s",
                compressor.display_name,
                ", ".join(self.no_longer_compressed),
            )
        self.no_longer_compressed.clear()

    def _forget_dead(self, new: Bucket) -> None:
        """Delete layouts that share parameters with `new` and do not occur in this pass.

        DDP rebuilds its buckets once. Deleting the old ones frees their workspaces before the new
        one is allocated. Other unused layouts stay, because DDP may merely skip a bucket.
        """
        parameters = {id(parameter) for parameter in new.parameters}
        for key, old in list(self._buckets.items()):
            if not old.used and any(id(p) in parameters for p in old.layout.parameters):
                del self._buckets[key]
                # No other layout has the same unit.
                self.dead_units += [
                    plan.key for plan in old.plans if plan.compressed and plan.state_name
                ]

    def _fit_state(
        self, bucket: KnownBucket, infos: list[ParameterInfo], compressor: Compressor[Any]
    ) -> None:
        """Check loaded state against its parameters, move it to their device and refit it.

        The state takes the dtype in which this bucket is computed. Under FSDP's `reduce_dtype` it
        differs from the dtype of the weights.
        """
        of_parameters = bucket.plans
        if bucket.is_one_unit:
            of_parameters = [UnitPlan.uncompressed(info, "") for info in infos]
        for field in compressor.state_fields:
            for plan in bucket.plans if field.per == "bucket" else of_parameters:
                value = self._state[field.key].get(plan.key)
                if value is not None and (plan.compressed or not field.replicated):
                    plan = replace(plan, dtype=bucket.layout.dtype)
                    self._fit(field, plan, value, compressor, bucket.layout.device)

    def _fit(
        self,
        field: StateField,
        plan: UnitPlan,
        value: torch.Tensor,
        compressor: Compressor[Any],
        device: torch.device,
    ) -> None:
        problem = field.problem(value, plan)
        if problem is not None:
            raise HookRunError(f"the saved state has {problem}: it was saved for another model")
        fitted: torch.Tensor | None = value
        if plan.compressed and tuple(value.shape) != field.shape(plan):
            fitted = field.refit(value, plan, compressor.initial_value(field, plan, value.dtype))
        if fitted is not None:
            self._state[field.key][plan.key] = fitted.to(device, field.dtype(plan))
            return
        del self._state[field.key][plan.key]
        if self.is_logging_rank:
            logger.warning(
                "the saved %s of %s has shape %s, it needs %s: it starts afresh",
                field.key.capitalize(),
                plan.key,
                tuple(value.shape),
                field.shape(plan),
            )
