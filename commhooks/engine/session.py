"""One use of a compressor on one model: every backward pass is a transaction over all of its buckets.

The learned state is written at the end of a pass, after everything received was found finite. An abandoned backward
pass therefore leaves the state of the last committed step.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm import collective
from commhooks.comm.collective import Pending, Send, agreement_key, outlast, resolve_group
from commhooks.comm.counters import Counters
from commhooks.comm.messages import Messages
from commhooks.comm.shards import good_on_all_shards, speaks
from commhooks.compressors.adaptive import AdaptiveCompressor, Ranks
from commhooks.compressors.base import Compressor, StepInfo
from commhooks.compressors.plan import UnitPlan
from commhooks.engine.agreement import Terms, agree
from commhooks.engine.arrangement import Flat
from commhooks.engine.average import average
from commhooks.engine.backward_pass import BackwardPass, RunningExchange
from commhooks.engine.kernel_choice import Choice, Offer
from commhooks.engine.known_buckets import KnownBuckets
from commhooks.engine.leftovers import leftovers, with_leftovers
from commhooks.engine.observer import Observer
from commhooks.engine.outcomes import Outcomes
from commhooks.engine.state import LearnedState
from commhooks.engine.statistics_log import StatisticsLog
from commhooks.engine.streams import CommitMark, computing_on, keep_for_current_stream, wait_for_codec
from commhooks.engine.task import ExchangeTask
from commhooks.errors import logger_of
from commhooks.gradients import precision
from commhooks.gradients.after_backward import run_after_backward
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.loss_scale import LossScale, chosen, is_one, read_scale, usable
from commhooks.gradients.names import ParameterNames

logger = logger_of(__name__)

ABANDONED_LIMIT_S = 5.0
"""Seconds that the host waits, after an exception, for collectives that may still write into a bucket."""


@dataclass(frozen=True)
class Binding:
    """The model and the ranks that a session works for.

    Attributes:
        names: stable names of the parameters.
        group: called at each backward pass; returns the process group, or None for the default group.
        loss_scale: returns the current scale of the GradScaler; None without one.
        shards: returns, for a sharded model, the ranks that hold the other shards of this replica: a pass is committed
            on all of them or on none.
    """

    names: ParameterNames
    group: Callable[[], dist.ProcessGroup | None]
    loss_scale: Callable[[], LossScale] | None = None
    shards: Callable[[], dist.ProcessGroup | None] = lambda: None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        return self.shards()


class Session:
    """Runs a compressor for one model.

    Args:
        compressor: a load may replace it by one with other options (`replaced`).
        binding: see `Binding`.
        state: the learned state, changed at commits only.
        counters: the counters to update; None: new ones.

    Attributes:
        outcomes: the outcomes of the passes, and the lock of the learned state.
        nonce: a number that the ranks agreed on in the first backward pass; None before it.
        choice: the kernel that the ranks agreed on, in `attach` or in the first backward pass; None before.
        torn: the latest commit failed on this rank; not so after a load.
        remarks: what the compressor wants rank 0 to tell the user. Whoever tells it clears the list.
    """

    def __init__(
        self, compressor: Compressor[Any], binding: Binding, state: LearnedState, counters: Counters | None = None
    ) -> None:
        self.compressor = compressor
        self.binding = binding
        self.state = state
        self.counters = counters if counters is not None else Counters()
        self.outcomes = Outcomes(state, self.counters)
        self.nonce: int | None = None
        self.choice: Choice | None = None
        self.remarks: list[str] = []
        self.torn = False
        self._mark = CommitMark()
        self._messages = Messages()
        self._buckets = KnownBuckets(compressor, state, binding.names)
        self._agreed = False
        self._pass: BackwardPass | None = None
        self._closed = False
        self._log = StatisticsLog()
        self._observer = Observer(binding.names)

    def bind(self, binding: Binding) -> None:
        """Use another model. Allowed only before the first backward pass."""
        self.binding = binding
        self._buckets = KnownBuckets(self.compressor, self.state, binding.names)
        self._observer = Observer(binding.names)

    def compute_with(self, choice: Choice) -> None:
        """Use the kernel on which all ranks have agreed."""
        self.choice = choice
        if self.compressor.kernel != choice.kernel:
            self.compressor.kernel = choice.kernel
            self._buckets.clear()  # their workspaces were made for another one

    @property
    def arrangement(self) -> Flat:
        """How the ranks share the work."""
        return self._buckets.arrangement

    def arrange(self, arrangement: Flat) -> None:
        """Share the work in this way. All ranks must call this, before the first backward pass."""
        self._buckets.arrangement = arrangement

    @property
    def has_run(self) -> bool:
        """Whether the ranks have agreed on their state in a first backward pass."""
        return self.nonce is not None

    def run(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce one bucket in place. All ranks must call this, in the same order. The futures of all buckets complete
        together, when the backward pass was committed or skipped because a number was not finite.

        Raises:
            HookRunError: the ranks disagree, a collective failed, or the learned state belongs to another model.
            HookConfigError: the buckets are on several devices.
        """
        with self._computing(bucket.flat):
            current = self._pass
            # An unfinished pass ended in an exception and was never committed: drop it.
            if current is None or current.done or bucket.index <= current.last_index:
                current = self._pass = self._begin(bucket)
            current.last_index = bucket.index
            with self.counters.clocks.codec(bucket.flat.device):
                if not bucket.is_last:
                    self._drain_after_backward(current)
                exchange = self._new_exchange(bucket, current)
                current.add(exchange)
                if bucket.is_last:
                    self._drain(current)
        return exchange.future

    def end_pass(self) -> None:
        """End the running pass, whose latest bucket was not marked as the last: no further one will arrive."""
        if self._pass is not None:
            self._drain_if_open(self._pass)

    def close(self) -> None:
        """Free the buffers, and move the learned state to the host, until another training of the model begins."""
        self._drop_pass()
        self._closed = True
        for known in self._buckets:
            known.work = None
        with self.settled():
            for tensors in self.state.entries.values():
                tensors.update((name, tensor.cpu()) for name, tensor in tensors.items())

    def settle(self) -> None:
        """Bring `state.step` up to date, for which the host may wait for the latest commit on an accelerator. The
        caller's current stream waits for that commit, too, and so reads the learned state as written by it."""
        with self.outcomes.lock:
            self._mark.wait()
            with self._mark.reading():
                self.outcomes.read()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Context manager: hold the lock of the learned state, with `state.step` up to date. The body may copy tensors
        of the state to the host; this waits for the latest commit, and for nothing that the hook or the caller has
        queued since. Change them by `overwrite` only."""
        with self.outcomes.lock, self._mark.reading():
            self.outcomes.read()
            yield

    def overwrite(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Write `value`, on the CPU, into `tensor` of the learned state. Use only within the body of `settled`."""
        self._mark.overwrite(tensor, value)

    def replaced(self, compressor: Compressor[Any]) -> None:
        """Use `compressor` from now on. Call it after a load: at the next backward pass the ranks compare their states
        again, and the loaded state is checked and refitted."""
        self.compressor = self._buckets.compressor = compressor
        if self.choice is not None:
            compressor.kernel = self.choice.kernel
        self._agreed = self.torn = False
        self._buckets.clear()

    def plans(self) -> list[UnitPlan]:
        """The plans of all known buckets, in the order in which the parameters were registered."""
        plans = [plan for known in self._buckets for plan in known.plans]
        order = {name: place for place, name in enumerate(self.binding.names.known())}
        return sorted(plans, key=lambda plan: order.get(plan.name, 0))

    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters in each known bucket."""
        return tuple(tuple(known.layout.names) for known in self._buckets)

    # ---- a backward pass ---------------------------------------------------------------------------------------------

    def _begin(self, bucket: Bucket) -> BackwardPass:
        if self._pass is not None and not self._pass.done:
            self._drop_pass()
        if self._closed:
            self._buckets.clear()
            self._closed = False
        group = resolve_group(self.binding.group())
        self._agree_once(group, bucket.flat)  # before ranks at different steps decide on different collectives
        self._reconsider(group, bucket.flat.device)
        self._agree_once(group, bucket.flat)
        state, start = self.state, self.compressor.start_step
        with self.outcomes.lock:  # another thread that saves may be updating `state.step` and the unread passes
            # Synchronise only if the exact step matters.
            before_start = state.step < start <= self.outcomes.step_at_most
            if before_start or self.compressor.needs_exact_step:
                self.settle()
            step, step_at_most = state.step, self.outcomes.step_at_most
        compressing = step >= start
        if compressing and self.compressor.selective and self.counters.numel_before == 0:
            logger.info("Start to apply %s after %s iterations.", self.compressor.called, state.step)
        self._buckets.begin_pass()
        self._observer.begin_pass(step_at_most, self.compressor)
        # Without a scaler the scale is 1; residuals saved with one are rescaled to it.
        loss_scale = usable(read_scale(self.binding.loss_scale), state.loss_scale)
        self.counters.begin_pass()
        return BackwardPass(compressing, loss_scale / state.loss_scale, loss_scale, step, step_at_most)

    def _new_exchange(self, bucket: Bucket, current: BackwardPass) -> RunningExchange:
        flat, counters, arrangement = bucket.flat, self.counters, self.arrangement
        first = not current.running
        if not first:
            devices = [current.running[0].flat.device, flat.device]
            precision.check_one_device(devices, self.compressor.called)
        known = self._buckets.find(bucket, first=first)
        group = resolve_group(self.binding.group())
        counters.bytes_uncompressed += flat.element_size() * bucket.numel_here
        if current.compressing:
            counters.numel_before += known.layout.numel
            counters.numel_after += sum(plan.numel_sent for plan in known.plans)
        where = f"bucket {bucket.index} at step {current.step_label}"

        def issue(send: Send) -> Pending:
            return collective.start(send, arrangement.group(send.over, group), counters, where, self._messages)

        self._observer.add(known.layout)
        step = StepInfo(current.step, group.size(), current.residual_factor, group.rank())
        left = leftovers(known.layout, known.compressed, self.state) if self.state.local else []
        if not known.compresses or not current.compressing:
            # Residuals that any bucket of this pass sends are lost if the optimizer skips it for the sake of this one.
            judged = self.compressor.judges_averages or self.state.has_local()
            exchange = average(flat, self.compressor.wire_dtype_for(flat.dtype), group.size(), judged=judged)
        else:
            exchange = arrangement.exchange(self.compressor, flat, known.work, self.state, step)
        if left:
            task = ExchangeTask(exchange, flat, self.compressor.name)
            exchange = with_leftovers(task, flat, left, self.state, step)
        return RunningExchange(exchange, flat, issue, self.compressor.name)

    def _drain(self, current: BackwardPass) -> None:
        """End a pass: run all remaining rounds, then commit."""
        good = self.arrangement.agreed(current.drain())
        if self.binding.shard_group is not None:
            good = good_on_all_shards(good, self.binding.shard_group)
        state, outcomes = self.state, self.outcomes
        with outcomes.lock:
            outcomes.committing = True
            try:
                self._commit(current, good)
            except BaseException:
                # The tensors are a mix of this step and the one before: none of them may be saved.
                state.forget_local()
                state.local_missing = self.torn = True
                raise
            finally:
                self._mark.set(good.device)
                outcomes.committing = False
        self._messages.forget_abandoned()
        if self._observer.active:
            self.settle()  # `current.step` may be less than the step
            self._observer.show(self.state.step - 1, good, [each.result for each in current.running])
        current.fulfil()

    def _commit(self, current: BackwardPass, good: torch.Tensor) -> None:
        """Write the gradients and, if `good`, the learned state; count the step. Hold the lock."""
        state, on_host = self.state, precision.is_host_readable(good.device)
        verdict: torch.Tensor | bool = bool(good) if on_host else good
        if current.compressing:
            state.local_shared = False
        current.commit(verdict)
        state.loss_scale = chosen(verdict, current.loss_scale, state.loss_scale)
        if verdict is not False:
            # After a failed commit the residual started at zero; from this commit on it is valid again.
            state.local_missing = self.torn = False
        self.outcomes.add(good, current.compressing and self.compressor.selective)
        if on_host:
            self.settle()
        self._buckets.forget_dead_state()
        if verdict is not False and not is_one(current.residual_factor):
            self._rescale_the_rest(current, chosen(verdict, current.residual_factor, 1.0))
        if current.compressing:
            self._log.add(current, self.counters, self.compressor.stats_every)

    def _rescale_the_rest(self, current: BackwardPass, factor: LossScale) -> None:
        """Multiply by `factor` what follows the loss scale and was not compressed in this pass, where the exchange does
        it."""
        compressed = self._buckets.compressed() if current.compressing else ()
        for each in self.compressor.state_fields:
            for name, tensor in self.state[each.key].items() if each.scales_with_loss else ():
                if name not in compressed:
                    tensor.mul_(factor)

    def _drain_after_backward(self, current: BackwardPass) -> None:
        """Drain at the end of the backward pass if the last bucket never arrives, which happens when DDP skips the
        all-reduce of unused parameters. DDP waits for the futures in a callback of the same kind, queued later."""
        run_after_backward(lambda: self._drain_if_open(current))

    def _drain_if_open(self, current: BackwardPass) -> None:
        if not current.done and current is self._pass:
            flat = current.running[-1].flat
            with self._computing(flat), self.counters.clocks.codec(flat.device):
                self._drain(current)

    @contextlib.contextmanager
    def _computing(self, flat: torch.Tensor) -> Iterator[None]:
        """Run the body, a part of a pass, as the codec runs. An exception in it ends the pass: what the hook has begun
        for its buckets is waited for, because the caller may fill them again."""
        try:
            with computing_on(flat), precision.full_precision(flat.device):
                yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the device itself may have failed
                wait_for_codec(flat.device)
            outlast(self._drop_pass(), ABANDONED_LIMIT_S)
            raise

    def _drop_pass(self) -> list[Pending]:
        """Drop the pass, and if it is unfinished all workspaces, into which its collectives may still write. Returns
        those that may still write into a bucket."""
        writing: list[Pending] = []
        if self._pass is not None and not self._pass.done:
            writing = self._pass.abandon()
            self._buckets.clear()
        self._pass = None
        return writing

    def _reconsider(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Let the compressor decide anew at the end of its watch, on all ranks at the same committed step."""
        adaptive = self.compressor
        if not isinstance(adaptive, AdaptiveCompressor) or adaptive.watch is None:
            return
        if self.outcomes.step_at_most < adaptive.watch.end:
            return
        self.settle()
        if self.state.step < adaptive.watch.end:
            return
        # Without the lock: a save in another thread may hold it while it waits for the other ranks' saves.
        compressor, remark = adaptive.reconsidered(Ranks(group, device, self.counters), self.state.step)
        if compressor is not self.compressor:
            with self.outcomes.lock:  # no save may read what is half replaced
                self.state.keep_fields(compressor.state_fields)
                self.replaced(compressor)
        if remark:
            self.remarks.append(remark)

    def _agree_once(self, group: dist.ProcessGroup, flat: torch.Tensor) -> None:
        """Compare the states of the ranks after a start, a load, or a change of the compressor."""
        if self._agreed:
            return
        self.settle()
        # A load allocated them on its own stream.
        keep_for_current_stream(tensor for entries in self.state.entries.values() for tensor in entries.values())
        compressor = self.compressor
        shapes = {name: tuple(parameter.shape) for name, parameter in self.binding.names.known().items()}
        in_force = compressor.config, compressor.notes if isinstance(compressor, AdaptiveCompressor) else None
        configuration = agreement_key(compressor.name, in_force, compressor.wire, sorted(shapes.items()))
        self._buckets.speaker = speaks(group, self.binding.shard_group)
        chosen = self.choice
        offer = Offer.of(compressor, flat.device, [flat.dtype]) if chosen is None else chosen.as_offer()
        terms, shard_group = Terms(configuration, offer), self.binding.shard_group
        agreement = agree(self.state, terms, group, shard_group, flat.device, self.counters)
        if chosen is None:
            self.compute_with(agreement.choice)
            for remark in agreement.choice.remarks(compressor.called) if self._buckets.speaker else ():
                logger.warning("%s", remark)
        if self.nonce is None:
            self.nonce = agreement.nonce
        if not agreement.local_complete and self._buckets.speaker and not self.state.missing_was_said:
            logger.warning(
                "%s: the residual of at least one rank is missing or belongs to another rank; all ranks start "
                "from residuals of zero. Step and Q are kept.",
                compressor.called,
            )
        self.arrangement.rehome(self.state, self.binding.names.known())
        self._agreed = True
