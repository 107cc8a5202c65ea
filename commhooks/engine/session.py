"""One use of a PowerSGD state on one DDP model: names, plans, scratch buffers and the pipeline, none of it learned."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commhooks.comm.collective import resolve_group
from commhooks.comm.counters import Stats
from commhooks.comm.wire import wire_dtype_of
from commhooks.compressors.config import BatchedPowerSGD, PowerSGD
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.alternating_exchange import AlternatingExchange
from commhooks.compressors.powersgd.device_exchange import MaskedExchange
from commhooks.compressors.powersgd.host_exchange import LowRankExchange
from commhooks.compressors.powersgd.matrix import Matrix
from commhooks.compressors.powersgd.plan_rows import plan_bucket, plan_parameter
from commhooks.compressors.powersgd.workspace import LowRankOptions, LowRankScratch
from commhooks.engine.agreement import agree, fingerprint
from commhooks.engine.driver import Exchange, Flight, Pipeline
from commhooks.engine.plain_exchange import PlainExchange
from commhooks.engine.state import Memory
from commhooks.errors import HookRunError
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, layout_key, read_layout
from commhooks.gradients.loss_scale import LossScale, is_one, read_scale, usable
from commhooks.gradients.names import Names
from commhooks.gradients.precision import check_one_device, compute_dtype
from commhooks.hook.plan import ModelPlan, ParameterPlan

logger = logging.getLogger(__name__)


@dataclass
class _Bucket:
    """What is kept per bucket layout."""

    layout: BucketLayout
    names: list[str]
    plans: list[ParameterPlan]
    scratch: LowRankScratch | None
    """None where nothing in the bucket is compressed."""
    used: bool = True


class Registration:
    """Runs PowerSGD for one DDP model.

    Args:
        options: the configuration, with a start step that is a number.
        memory: the learned state, changed at commits only.
        stats: counters to add to.
        names: by which name the memory of a parameter is kept.
        group: the process group, asked for at each backward pass (None: the default group).
        wrapper_dtype: dtype that travels, if a wrapper lowers it.
        batched: compress whole buckets instead of single parameters.
        loss_scale: the factor by which the loss is multiplied now, if there is a GradScaler.
    """

    def __init__(
        self,
        options: PowerSGD | BatchedPowerSGD,
        memory: Memory,
        stats: Stats,
        names: Names,
        group: Callable[[], dist.ProcessGroup | None],
        *,
        wrapper_dtype: torch.dtype | None = None,
        batched: bool = False,
        loss_scale: Callable[[], LossScale] | None = None,
    ) -> None:
        assert isinstance(options.start_powerSGD_iter, int)
        self.options = options
        self.start_step: int = options.start_powerSGD_iter
        self.memory = memory
        self.stats = stats
        self.names = names
        self.wrapper_dtype = wrapper_dtype
        self.batched = batched
        self.loss_scale = loss_scale
        self.checked = False
        self.nonce: int | None = None
        self.pipeline = Pipeline(
            memory, stats, self._begin, self._make_exchange, self._end, abandon=lambda: self._buckets.clear()
        )
        self._group = group
        self._buckets: dict[tuple[int, ...], _Bucket] = {}
        self._low_rank = LowRankOptions(
            use_error_feedback=options.use_error_feedback,
            draw_q=self._draw_q,
            draw_refill=self._draw_refill,
            warm_start=options.warm_start,
        )
        self._next_stats_report = 0
        self._dead_matrices: list[str] = []

    def run(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self.pipeline.run(bucket)

    def memory_replaced(self, options: PowerSGD | BatchedPowerSGD) -> None:
        """Call after a load: the memory is looked at anew, and the ranks compare theirs at the next backward pass."""
        assert isinstance(options.start_powerSGD_iter, int)
        self.options, self.start_step = options, options.start_powerSGD_iter
        self.checked = False
        self._buckets.clear()

    def plan(self) -> ModelPlan:
        """What is compressed, from the buckets of the latest backward pass."""
        plans = [plan for bucket in self._buckets.values() for plan in bucket.plans]
        order = {name: place for place, name in enumerate(self.names.known())}
        plans.sort(key=lambda plan: order.get(plan.name, 0))
        name = "batched_powerSGD" if self.batched else "powerSGD"
        return ModelPlan(name, tuple(plans), self.wrapper_dtype, self.start_step)

    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters in each bucket of the latest backward pass."""
        return tuple(tuple(known.names) for known in self._buckets.values())

    # ---- called by the pipeline ------------------------------------------------------------------------------------

    def _begin(self, bucket: dist.GradBucket) -> Flight:
        group = resolve_group(self._group())
        buffer = bucket.buffer()
        if not self.checked:
            self._agree(group, buffer.device)
        with self.pipeline.lock:  # another thread that saves may be about to count the steps that it has asked for
            # Where the host need not know the exact step, it does not wait for the device.
            before_start = self.memory.step < self.start_step <= self.memory.step + self.pipeline.unsettled_passes
            if before_start or not self.options.warm_start:
                self.pipeline.settle()
            step = self.memory.step
        compressing = step >= self.start_step
        if compressing and self.stats.numel_before == 0:
            logger.info("Start to apply PowerSGD after %s iterations.", self.memory.step)
        for known in self._buckets.values():
            known.used = False
        # Without a scaler now, residuals that were saved with one come back to the scale of the gradients.
        loss_scale = usable(read_scale(self.loss_scale), self.memory.loss_scale)
        return Flight(compressing, loss_scale / self.memory.loss_scale, loss_scale, step)

    def _make_exchange(self, bucket: dist.GradBucket, flight: Flight) -> Exchange:
        known = self._bucket(bucket, first=not flight.exchanges)
        buffer = bucket.buffer()
        group = resolve_group(self._group())
        if flight.exchanges and buffer.device != flight.exchanges[0].buffer.device:
            check_one_device([flight.exchanges[0].buffer.device, buffer.device])
        numel = buffer._values().numel() if buffer.is_sparse else buffer.numel()
        self.stats.bytes_uncompressed += buffer.element_size() * numel
        if flight.compressing:
            self.stats.numel_before += known.layout.numel
            self.stats.numel_after += sum(plan.numel_sent for plan in known.plans)
        label = f"bucket {bucket.index()} at step {self.memory.step}"
        if known.scratch is None or not flight.compressing:
            return PlainExchange(buffer, group, wire_dtype_of(buffer.dtype, self.wrapper_dtype), self.stats, label)
        factor, exchange = flight.residual_factor, LowRankExchange
        if known.scratch.stacks:
            exchange = MaskedExchange
        else:
            factor = float(factor)
            exchange = AlternatingExchange if self.options.alternate else LowRankExchange
        return exchange(buffer, known.scratch, self.memory, self._low_rank, group, self.stats, factor, label)

    def _end(self, flight: Flight) -> None:
        for name in self._dead_matrices:
            self.memory.q.pop(name, None)
        self._dead_matrices.clear()
        if flight.rescaled and not is_one(flight.residual_factor):
            in_flight = {name for known in self._buckets.values() if known.used for name in known.names}
            for name, residual in self.memory.residuals.items():
                if name not in in_flight:
                    residual.mul_(flight.residual_factor)
        if flight.compressing and flight.step >= self._next_stats_report:
            self._next_stats_report = flight.step + max(1, self.options.compression_stats_logging_frequency)
            before, after = self.stats.numel_before, self.stats.numel_after
            logger.info(
                "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
                flight.step,
                before,
                after,
                before / after if after else 0,
            )

    # ---- layouts and plans -----------------------------------------------------------------------------------------

    def _bucket(self, bucket: dist.GradBucket, first: bool) -> _Bucket:
        key = layout_key(bucket)
        known = self._buckets.get(key)
        if known is None:
            layout = read_layout(bucket)
            self._forget_dead(layout)
            names = self.names.of_bucket(layout.parameters, first)
            plans, matrices = (self._plan_batched if self.batched else self._plan_each)(layout, names)
            wire = wire_dtype_of(layout.dtype, self.wrapper_dtype)
            self._check_memory(layout, names, matrices)
            scratch = self._new_scratch(layout, matrices, wire) if matrices else None
            known = self._buckets[key] = _Bucket(layout, names, plans, scratch)
        known.used = True
        return known

    def _new_scratch(self, layout: BucketLayout, matrices: list[Matrix], wire: torch.dtype) -> LowRankScratch:
        return LowRankScratch(
            layout,
            matrices,
            wire,
            fused=self.options.fused,
            stacked=not precision.host_may_look(layout.device) and not self.options.alternate,
            stack_deltas=self.options.batch_tensors_with_same_shape,
        )

    def _forget_dead(self, new: BucketLayout) -> None:
        """A layout is dead when its parameters lie in another one: DDP rebuilds its buckets once and never goes back.
        Forgotten before the new one gets its memory; one that was not used may only have been skipped."""
        parameters = {id(p) for p in new.parameters}
        for key, known in list(self._buckets.items()):
            if known.used or not any(id(p) in parameters for p in known.layout.parameters):
                continue
            del self._buckets[key]
            if self.batched and known.scratch is not None:  # no other layout makes the same matrix
                self._dead_matrices += [matrix.name for matrix in known.scratch.matrices]

    def _plan_each(self, layout: BucketLayout, names: list[str]) -> tuple[list[ParameterPlan], list[Matrix]]:
        plans = [
            plan_parameter(
                name,
                slot.parameter,
                self.options,
                sparse=layout.sparse,
                excluded_by=self.names.excluded_by(name, self.options.exclude),
            )
            for name, slot in zip(names, layout.slots, strict=True)
        ]
        matrices = [
            Matrix(plan.name, ((plan.name, slot),), plan.n, plan.m, plan.rank)
            for plan, slot in zip(plans, layout.slots, strict=True)
            if plan.compressed
        ]
        return plans, matrices

    def _plan_batched(self, layout: BucketLayout, names: list[str]) -> tuple[list[ParameterPlan], list[Matrix]]:
        plan = plan_bucket(
            names,
            layout.numel,
            layout.dtype,
            rank=self.options.matrix_approximation_rank,
            sparse=layout.sparse,
            complex_numbers=any(parameter.is_complex() for parameter in layout.parameters),
        )
        if not plan.compressed:
            return [plan], []
        # The matrix is made of this very sequence of parameters: another bucket layout makes another matrix.
        name = f"batched.{fingerprint(names):016x}"
        slots = tuple(zip(names, layout.slots, strict=True))
        return [plan], [Matrix(name, slots, plan.n, plan.m, plan.rank)]

    def _check_memory(self, layout: BucketLayout, names: list[str], matrices: list[Matrix]) -> None:
        """Memory that was loaded under these names must fit the parameters that bear them."""
        dtype = compute_dtype(layout.dtype)
        for name, slot in zip(names, layout.slots, strict=True):
            residual = self.memory.residuals.get(name)
            if residual is not None and residual.numel() != slot.numel:
                raise HookRunError(
                    f"the saved state has a residual of {residual.numel()} numbers for parameter {name}, which has "
                    f"shape {tuple(slot.parameter.shape)}: it was saved for another model"
                )
            if residual is not None:
                self.memory.residuals[name] = residual.to(layout.device, dtype)
        for matrix in matrices:
            q = self.memory.q.get(matrix.name)
            if q is None:
                continue
            if q.shape[1] != matrix.m and self.batched:
                # Before there is a bucket, nobody knows how large its matrix is, so loading could not refuse this.
                del self.memory.q[matrix.name]
                if dist.get_rank(resolve_group(self._group())) == 0:
                    logger.warning(
                        "the saved Q of %s has %s rows, it needs %s: it starts from a fresh Q",
                        matrix.name,
                        q.shape[1],
                        matrix.m,
                    )
                continue
            if q.shape[1] != matrix.m:
                raise HookRunError(
                    f"the saved state has a Q with {q.shape[1]} rows for {matrix.name}, which needs {matrix.m}: "
                    "it was saved for another model"
                )
            if q.shape[0] != matrix.rank:
                refitted = self._draw_q(matrix, 0, q.dtype)
                rows = min(q.shape[0], matrix.rank)
                refitted[:rows] = q[:rows]
                q = refitted
            self.memory.q[matrix.name] = q.to(layout.device, dtype)
        for matrix in matrices:
            p = self.memory.p.get(matrix.name)
            if p is not None:  # pickled states are not checked when they are loaded
                if p.shape != (matrix.rank, matrix.n):
                    raise HookRunError(
                        f"the saved state has a P of shape {tuple(p.shape)} for {matrix.name}, which needs "
                        f"{(matrix.rank, matrix.n)}: it was saved for another model"
                    )
                self.memory.p[matrix.name] = p.to(layout.device, dtype)

    # ---- agreement and random numbers --------------------------------------------------------------------------------

    def _agree(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.pipeline.settle()
        shapes = {name: tuple(parameter.shape) for name, parameter in self.names.known().items()}
        configuration = fingerprint(self.options, self.wrapper_dtype, self.batched, sorted(shapes.items()))
        agreement = agree(self.memory, configuration, group, device, self.stats)
        if self.nonce is None:
            self.nonce = agreement.nonce
        if not agreement.residuals_complete and dist.get_rank(group) == 0 and not self.memory.missing_was_said:
            logger.warning(
                "PowerSGD: the residual of at least one rank is missing or belongs to another rank; all ranks start "
                "from residuals of zero. Step and Q are kept."
            )
        self.checked = True

    def _draw_q(self, matrix: Matrix, step: int, dtype: torch.dtype) -> torch.Tensor:
        purpose = "Q" if self.options.warm_start else f"Q at step {step}"
        return codec.draw(self.options.random_seed, matrix.name, purpose, matrix.rank, matrix.m, dtype)

    def _draw_refill(self, matrix: Matrix, side: str, dtype: torch.dtype) -> torch.Tensor:
        length = matrix.n if side == "P" else matrix.m
        return codec.draw(self.options.random_seed, matrix.name, f"refill {side}", matrix.rank, length, dtype)
