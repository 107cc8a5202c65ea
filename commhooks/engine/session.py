"""One use of a compressor on one model: the way of a bucket through a backward pass.

With a compressor that learns, every pass is a transaction over all of its buckets: the learned state is written at the
end, after everything received was found finite. An abandoned pass therefore leaves the state of the last committed
step. Without learned state nothing depends on other buckets, and each one ends by itself; see `immediate.py`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm import collective
from commhooks.comm.clocks import Mark, mark, seconds_between
from commhooks.comm.collective import Pending, Send, wait_for_abandoned
from commhooks.comm.counters import Counters
from commhooks.comm.point_to_point import PointToPoint
from commhooks.comm.shards import good_on_all
from commhooks.compressors.adaptive import AdaptiveCompressor, ObservedPass
from commhooks.compressors.base import Compressor, StepInfo
from commhooks.engine.backward_pass import BackwardPass, Issue, RunningExchange
from commhooks.engine.consensus import Binding, SendComparison
from commhooks.engine.immediate import reduce_and_time
from commhooks.engine.learning import Learning
from commhooks.engine.nodes import FLAT
from commhooks.engine.state import LearnedState
from commhooks.engine.streams import computing_on, wait_for_codec
from commhooks.engine.task import ExchangeTask
from commhooks.errors import logger_of
from commhooks.gradients import precision
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.loss_scale import chosen, read_scale

logger = logger_of(__name__)

ABANDONED_LIMIT_S = 5.0
"""Seconds that the host waits, after an exception, for collectives that may still write into a bucket."""


class Session(Learning):
    """Runs the exchanges of a compressor in the backward passes of one model."""

    def __init__(
        self, compressor: Compressor[Any], binding: Binding, state: LearnedState, counters: Counters | None = None
    ) -> None:
        super().__init__(compressor, binding, state, counters)
        self._messages = PointToPoint()
        self._pass: BackwardPass | None = None
        self._closed = False
        self._statistics_due = 0
        self._timed_pass_ended: Mark = None  # where the next step begins, for an adaptive compressor

    def run(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce one bucket in place. All ranks must call this, in the same order. The futures of all buckets complete
        together, when the backward pass was committed or skipped because a number was not finite; without learned state
        each one as soon as its collective has ended.

        Raises:
            HookRunError: the ranks disagree, a collective failed, or the learned state belongs to another model.
            HookConfigError: the buckets are on several devices.
        """
        consensus, device = self.consensus, bucket.flat.device
        compressor = consensus.compressor
        if not compressor.transactional and consensus.arrangement is FLAT:
            if bucket.is_first:
                self.counters.begin_pass()
            self.counters.gradients(bucket.nbytes)
            group = consensus.binding.group()
            comparison = self._comparison(group, device) if consensus.compares_sends(bucket) else None
            return reduce_and_time(compressor, bucket, group, self.counters, comparison=comparison)
        with self._computing(bucket.flat):
            if bucket.is_first or self._pass is None:
                self._pass = self._begin(bucket)
            with self.counters.clocks.measure(device):
                exchange = self._new_exchange(bucket, self._pass)
                self._pass.add(exchange)
                if bucket.is_last:
                    self._drain(self._pass)
        return exchange.future

    def end_pass(self) -> None:
        """End the running pass, whose latest bucket was not marked as the last: no further one will arrive."""
        if self._pass is not None:
            flat = self._pass.running[-1].flat
            with self._computing(flat), self.counters.clocks.measure(flat.device):
                self._drain(self._pass)

    def close(self) -> None:
        """Free the buffers, and move the learned state to the host, until another training of the model begins."""
        self._drop_pass()
        self._closed = True
        for known in self.consensus.buckets:
            known.work = None
        super().close()

    def _begin(self, bucket: Bucket) -> BackwardPass:
        if self._pass is not None:  # it ended in an exception and was never committed
            self._drop_pass()
        if self._closed:
            self.consensus.buckets.clear()
            self._closed = False
        consensus, state = self.consensus, self.state
        binding = consensus.binding
        everyone = binding.group()
        agreement = consensus.reach(everyone, bucket.flat)
        compressor = consensus.compressor
        step, step_at_most = self.held.steps(agreement.start, exact=agreement.exact_step)
        compressing = step >= agreement.start
        if compressing and compressor.selective and self.counters.numel_before == 0:
            logger.info("Start to apply %s after %s iterations.", compressor.display_name, state.step)
        # Without a scaler the scale is 1; residuals saved with one are rescaled to it.
        loss_scale = 1.0 if binding.loss_scale is None else read_scale(binding.loss_scale, state.loss_scale)
        self.counters.begin_pass()
        group = consensus.group("all", everyone)
        info = StepInfo(step, group.size(), loss_scale / state.loss_scale, group.rank())
        label = f"{'' if step == step_at_most else '<= '}{step_at_most}"
        return BackwardPass(group, compressing, loss_scale, info, step_at_most, label)

    def _new_exchange(self, bucket: Bucket, current: BackwardPass) -> RunningExchange:
        flat, consensus, counters = bucket.flat, self.consensus, self.counters
        compressor = consensus.compressor
        if current.running and current.running[0].flat.device != flat.device:
            precision.check_one_device([current.running[0].flat.device, flat.device], compressor.display_name)
        known = consensus.buckets.find(bucket, compressor, consensus.arrangement, first=not current.running)
        counters.gradients(bucket.nbytes)
        if current.compressing:
            counters.numel_before += known.layout.numel
            counters.numel_after += known.numel_sent

        step = current.step
        if bucket.unused:
            step = dataclasses.replace(step, unused={known.layout.names[place] for place in bucket.unused})
        exchange = known.exchange(compressor, flat, self.state, step, compressing=current.compressing)
        issue: Issue = functools.partial(self._send, current, bucket.index)
        if current.compressing and consensus.compares_sends(bucket):
            if current.comparison is None:
                current.comparison = self._comparison(current.group, flat.device)
            issue = functools.partial(current.comparison.issue, bucket.index, issue)
        return RunningExchange(ExchangeTask(exchange, flat, compressor.name), flat, issue)

    def _comparison(self, everyone: dist.ProcessGroup, device: torch.device) -> SendComparison:
        consensus = self.consensus
        apart = consensus.arrangement.groups.get("node"), consensus.binding.shards
        others = [group() for group in apart if group is not None]
        exchanging = consensus.group("nodes", everyone)
        return SendComparison(exchanging, others, consensus.compressor.name, device, self.counters)

    def _send(self, current: BackwardPass, bucket: int, send: Send) -> Pending:
        where = f"bucket {bucket} at step {current.step_label}"
        group = current.group if send.over == "all" else self.consensus.group(send.over, current.group)
        return collective.start(send, group, self.counters, where, self._messages)

    def _drain(self, current: BackwardPass) -> None:
        """End a pass: run all remaining rounds, then commit."""
        good, shards = current.drain(), self.consensus.binding.shards
        node = self.consensus.arrangement.groups.get("node")
        if node is not None:  # its ranks receive different shares
            good = good_on_all(good, node(), "the node")
        if shards is not None:
            good = good_on_all(good, shards(), "all shards")
        with self.held.committing(good.device):
            self._commit(current, bool(good) if precision.is_host_readable(good.device) else good)
        self._messages.forget_abandoned()
        if isinstance(self.consensus.compressor, AdaptiveCompressor):
            self._observe(self.consensus.compressor, current, good)
        current.fulfil()
        self._pass = None

    def _commit(self, current: BackwardPass, verdict: torch.Tensor | bool) -> None:
        """Write the gradients and, where `verdict` is true, the learned state; count the step."""
        if current.compressing:
            self.state.local_shared = False
        current.commit(verdict)
        compressor, buckets = self.consensus.compressor, self.consensus.buckets
        self.held.add(verdict, current.loss_scale, compressed=current.compressing and compressor.selective)
        if buckets.dead_units:
            buckets.forget_dead_state(compressor)
        if buckets.no_longer_compressed and bool(verdict):
            buckets.drop_residuals(compressor)
        residual_factor = current.step.residual_factor
        if verdict is not False and (isinstance(residual_factor, torch.Tensor) or residual_factor != 1):
            # The exchanges do it for what they compress.
            compressed = buckets.compressed() if current.compressing else set()
            factor = chosen(verdict, residual_factor, 1.0)
            self.state.rescale(compressor.state_fields, factor, but=compressed)
        if current.compressing and current.step_at_most >= self._statistics_due:
            every = compressor.stats_every
            if every is not None:
                self._statistics_due = current.step_at_most + every  # the step at whose commit they are logged next
                rate, before, after = self.counters.compression_stats()
                stats = f"total before compression {before}, total after compression {after}, rate {rate}"
                logger.info("Compression stats: iter %s, %s", current.step_label, stats)

    def _observe(self, compressor: AdaptiveCompressor[Any], current: BackwardPass, good: torch.Tensor) -> None:
        """Show the pass that ends now to the compressor, if it watches that step. The pass before a watch is timed,
        too, because the first watched step begins at its end."""
        began, self._timed_pass_ended = self._timed_pass_ended, None
        if compressor.watch is None or current.step_at_most + 1 < compressor.watch.begin:
            return
        self._timed_pass_ended = ended = mark(good.device)
        self.held.settle()  # `current.step` may be less than the step
        if began is not None and self.state.step > compressor.watch.begin and bool(good):
            layouts = [known.layout for known in self.consensus.buckets if known.used]
            compressor.observe(ObservedPass(seconds_between(began, ended), layouts, self.consensus.binding.names))
            self._timed_pass_ended = mark(good.device)  # looking at the pass is no part of the next step

    @contextlib.contextmanager
    def _computing(self, flat: torch.Tensor) -> Iterator[None]:
        """Run the body, a part of a pass, as the codec runs. An exception in it ends the pass: what the
        hook has begun for its buckets is waited for, because the caller may fill them again."""
        try:
            on_stream = computing_on(flat) if precision.has_streams(flat.device) else contextlib.nullcontext()
            with on_stream, precision.full_precision(flat.device):
                yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the device itself may have failed
                wait_for_codec(flat.device)
            wait_for_abandoned(self._drop_pass(), ABANDONED_LIMIT_S)
            raise

    def _drop_pass(self) -> list[Pending]:
        """Drop an unfinished pass, and all workspaces, into which its collectives may still write. Returns those that
        may still write into a bucket."""
        writing: list[Pending] = []
        if self._pass is not None:
            writing = self._pass.abandon()
            self.consensus.buckets.clear()
            self._pass = None
        return writing
