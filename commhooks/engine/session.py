"""Run the backward passes of one model, each as a transaction over all of its buckets.

The learned state is written at the end of a pass, after everything received was found finite. An
abandoned pass leaves the state of the last committed step. Without learned state each bucket is
reduced by itself; see `immediate.py`.
"""

import contextlib
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commhooks.comm import collectives
from commhooks.comm.collectives import Pending, PointToPoint, Send, good_on_all, wait_for_abandoned
from commhooks.comm.counters import Counters
from commhooks.compressors.base import Compressor, StepInfo
from commhooks.engine.backward_pass import BackwardPass, Issue, RunningExchange
from commhooks.engine.consensus import Binding, Consensus, SendComparison
from commhooks.engine.immediate import reduce_immediately
from commhooks.engine.state import HeldState, LearnedState
from commhooks.engine.streams import computing_on, wait_for_codec
from commhooks.engine.task import ExchangeTask
from commhooks.errors import logger_of
from commhooks.gradients import precision
from commhooks.gradients.layout import Bucket
from commhooks.gradients.loss_scale import LossScale, chosen, is_one, read_scale

logger = logger_of(__name__)

ABANDONED_LIMIT_S = 5.0
"""How long the host waits, after an exception, for collectives that may still write into a bucket.
"""


class ExchangeDriver:
    """Runs the exchanges of a compressor on the ranks of one model.

    `Session` averages gradients, `OuterSteps` weights. `state`, the learned state, changes at
    commits only, and `held` guards it. `consensus` is equal on all ranks.
    """

    def __init__(
        self,
        compressor: Compressor[Any],
        binding: Binding,
        state: LearnedState,
        counters: Counters | None = None,
    ) -> None:
        self.state = state
        self.counters = counters if counters is not None else Counters()
        self.held = HeldState(state, self.counters)
        self.consensus = Consensus(compressor, binding, self.held, self.counters)

    @property
    def compressor(self) -> Compressor[Any]:
        return self.consensus.compressor

    @property
    def has_run(self) -> bool:
        """Whether the ranks have compared their states in a first backward pass."""
        return self.consensus.nonce is not None

    def close(self) -> None:
        with self.held.settled():
            self.state.to_host()


class SessionState(ABC):
    """The state of a user's hook function that reduces its buckets by a session.

    `PowerSGDState` is one. `attach` gives such a hook the model's names, a plan and checkpoints,
    whichever function uses the state.
    """

    @abstractmethod
    def bind(
        self, binding: Binding, model: torch.nn.Module, function: Callable[..., Any]
    ) -> "Session":
        """Bind the state to `model`, the module that DDP wraps, and return its session.

        `attach` calls this on every rank. Raises AttachError if another model uses the state.
        """


class Listener(Protocol):
    """Listens to the backward passes of a session. All ranks have the same listener."""

    def before_pass(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Called between two passes on all ranks of `group`.

        They have the same compressor and are at the same committed step. May replace the compressor
        (`Session.replace_compressor`), equally on all ranks.
        """

    def after_pass(self, step_at_most: int, good: torch.Tensor) -> None:
        """Called after the commit.

        `step_at_most`: upper bound of the number of steps committed before this pass. `good`:
        whether this pass was committed (0-dim bool tensor on the device of the buckets).
        """


class Session(ExchangeDriver):
    """Averages the gradients of one model. `listener`: made by the compressor; None for most."""

    def __init__(
        self,
        compressor: Compressor[Any],
        binding: Binding,
        state: LearnedState,
        counters: Counters | None = None,
    ) -> None:
        super().__init__(compressor, binding, state, counters)
        self._messages = PointToPoint()
        self._pass: BackwardPass | None = None
        self._closed = False
        self._statistics_due = 0
        self.listener: Listener | None = compressor.listener(self)

    def run(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce one bucket in place. All ranks must call this, in the same order.

        The futures of all buckets complete together, once the backward pass was committed, or
        skipped because a number was not finite. Without learned state each future completes when
        its collective has ended. Raises HookRunError if the ranks disagree, a collective failed, or
        the learned state belongs to another model; HookConfigError if the buckets are on several
        devices.
        """
        # Without learned state there is no transaction, except with nodes, where an exchange has
        # several collectives.
        if not self.compressor.transactional and self.consensus.reduction.nodes is None:
            return self._run_alone(bucket)
        with self._computing(bucket.flat):
            if bucket.is_first or self._pass is None:
                self._pass = self._begin(bucket)
            with self.counters.clocks.measure(bucket.flat.device):
                exchange = self._new_exchange(bucket, self._pass)
                self._pass.add(exchange)
                if bucket.is_last:
                    self._finish_pass(self._pass)
        return exchange.future

    def _run_alone(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_first:
            self.counters.begin_pass()
        self.counters.bytes_uncompressed += bucket.nbytes
        consensus = self.consensus
        group = consensus.binding.group()
        comparison = None
        if consensus.compares_sends and consensus.is_new(bucket):
            comparison = SendComparison(consensus, group, bucket.flat.device, self.counters)
        return reduce_immediately(
            consensus.compressor, bucket, group, self.counters, comparison=comparison
        )

    def end_pass(self) -> None:
        """End the running pass if DDP has marked no bucket as the last."""
        if self._pass is not None:
            flat = self._pass.running[-1].flat
            with self._computing(flat), self.counters.clocks.measure(flat.device):
                self._finish_pass(self._pass)

    def replace_compressor(self, compressor: Compressor[Any], *, keep_local: bool) -> None:
        """Continue with another compressor from the next pass on.

        All ranks must call this between the same two passes. Learned state whose field the new
        compressor does not have is deleted, and without `keep_local` also what differs between
        ranks, such as residuals.
        """
        with self.held.lock:  # a save in another thread must not read a state that is half replaced
            self.state.keep_fields(compressor.state_fields)
            if not keep_local:
                self.state.drop_local()
            self.consensus.replace_compressor(compressor)

    def close(self) -> None:
        """Free the buffers, and move the learned state to the host until the model trains again."""
        self._drop_pass()
        self._closed = True
        for bucket in self.consensus.buckets:
            bucket.work = None
        super().close()

    def _begin(self, bucket: Bucket) -> BackwardPass:
        if self._pass is not None:  # the previous pass ended in an exception
            self._drop_pass()
        consensus = self.consensus
        binding = consensus.binding
        if self._closed:
            consensus.buckets.clear()
            self._closed = False
        agreement = consensus.agreement or consensus.reach(binding.group(), bucket.flat)
        if self.listener is not None:
            self.listener.before_pass(binding.group(), bucket.flat.device)
            agreement = consensus.agreement or consensus.reach(binding.group(), bucket.flat)
        compressor = consensus.compressor
        step, step_at_most = self.held.steps(agreement.start, exact=agreement.exact_step)
        compressing = step >= agreement.start
        if compressing and compressor.selective and self.counters.numel_before == 0:
            name = compressor.display_name
            logger.info("Start to apply %s after %s iterations.", name, self.state.step)
        # Without a scaler the loss scale is 1, and residuals saved with another scale are rescaled.
        saved_scale = self.state.loss_scale
        loss_scale: LossScale = 1.0
        if binding.loss_scale is not None:
            loss_scale = read_scale(binding.loss_scale, saved_scale)
        self.counters.begin_pass()
        group = binding.group()
        info = StepInfo(step, group.size(), loss_scale / saved_scale, group.rank())
        label = f"{'' if step == step_at_most else '<= '}{step_at_most}"
        return BackwardPass(group, compressing, loss_scale, info, step_at_most, label)

    def _new_exchange(self, bucket: Bucket, current: BackwardPass) -> RunningExchange:
        flat = bucket.flat
        consensus = self.consensus
        compressor = consensus.compressor
        if current.running:
            devices = {current.running[0].flat.device, flat.device}
            precision.check_one_device(devices, compressor.display_name)
        step = current.step
        planned = consensus.buckets.find(
            bucket, compressor, consensus.reduction, step, first=not current.running
        )
        self.counters.bytes_uncompressed += bucket.nbytes
        issue: Issue = functools.partial(self._send, current, bucket.index)
        if bucket.unused:
            unused = {planned.layout.names[place] for place in bucket.unused}
            step = dataclasses.replace(step, unused=unused)
        if current.compressing:
            self.counters.numel_before += planned.layout.numel
            self.counters.numel_after += planned.numel_sent
            if consensus.compares_sends and consensus.is_new(bucket):
                issue = self._comparing(current, bucket, issue)
        if current.compressing and planned.make_exchange is not None:
            current.compresses = True
            exchange = planned.make_exchange(flat, planned.work, self.state, step)
        else:
            exchange = compressor.average(flat, step.world_size)
        return RunningExchange(ExchangeTask(exchange, flat, compressor.name), flat, issue)

    def _comparing(self, current: BackwardPass, bucket: Bucket, issue: Issue) -> Issue:
        if current.comparison is None:
            nodes = self.consensus.reduction.nodes
            exchanging = current.group if nodes is None else nodes.inter_node
            current.comparison = SendComparison(
                self.consensus, exchanging, bucket.flat.device, self.counters
            )
        return functools.partial(current.comparison.issue, bucket.index, issue)

    def _send(self, current: BackwardPass, bucket: int, send: Send) -> Pending:
        where = f"bucket {bucket} at step {current.step_label}"
        group = current.group
        nodes = self.consensus.reduction.nodes
        if nodes is not None and send.over != "all":
            group = nodes.intra_node if send.over == "intra_node" else nodes.inter_node
        return collectives.start(send, group, self.counters, where, self._messages)

    def _finish_pass(self, current: BackwardPass) -> None:
        good = current.drain()
        nodes = self.consensus.reduction.nodes
        if nodes is not None:  # each rank of a node has checked another share of the bucket
            good = good_on_all(good, nodes.intra_node, "the node")
        if self.consensus.binding.shards is not None:
            good = good_on_all(good, self.consensus.binding.shards(), "all shards")
        with self.held.committing(good.device):
            self._commit(current, bool(good) if precision.is_host_readable(good.device) else good)
        self._messages.forget_abandoned()
        if self.listener is not None:
            self.listener.after_pass(current.step_at_most, good)
        current.fulfil()
        self._pass = None

    def _commit(self, current: BackwardPass, verdict: torch.Tensor | bool) -> None:
        compressor = self.consensus.compressor
        buckets = self.consensus.buckets
        if current.compresses:
            self.state.local_shared = False
        acted = current.compresses if compressor.selective else current.compressing
        self.counters.passes_acted += acted
        current.commit(verdict)
        compressed_some = current.compresses and compressor.selective
        self.held.add(verdict, current.loss_scale, compressed=compressed_some)
        if buckets.dead_units:
            buckets.forget_dead_state(compressor)
        if buckets.no_longer_compressed and bool(verdict):
            buckets.drop_residuals(compressor)
        if verdict is not False and not is_one(current.step.residual_factor):
            # The exchanges have rescaled the state of what they compress.
            compressed = buckets.compressed() if current.compressing else set()
            factor = chosen(verdict, current.step.residual_factor, 1.0)
            self.state.rescale(compressor.state_fields, factor, but=compressed)
        every = compressor.stats_every
        if every is not None and current.compressing:
            self._log_statistics(current, every)

    def _log_statistics(self, current: BackwardPass, every: int) -> None:
        if current.step_at_most < self._statistics_due:
            return
        self._statistics_due = current.step_at_most + every
        rate, before, after = self.counters.compression_stats()
        logger.info(
            "Compression stats: iter %s, total before compression %s, total after compression %s,"
            " rate %s",
            current.step_label,
            before,
            after,
            rate,
        )

    @contextlib.contextmanager
    def _computing(self, flat: torch.Tensor) -> Iterator[None]:
        """Run the body, a part of a pass, on the codec stream and in full precision.

        An exception ends the pass: the host waits for the collectives of the pass, because the
        caller may fill the buckets again.
        """
        has_streams = precision.has_streams(flat.device)
        try:
            on_stream = computing_on(flat) if has_streams else contextlib.nullcontext()
            with on_stream, precision.full_precision():
                yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the device itself may have failed
                wait_for_codec(flat.device)
            wait_for_abandoned(self._drop_pass(), ABANDONED_LIMIT_S)
            raise

    def _drop_pass(self) -> list[Pending]:
        """Drop an unfinished pass, and all workspaces, into which its collectives may still write.

        Return the collectives that may still write into a bucket.
        """
        writing: list[Pending] = []
        if self._pass is not None:
            writing = self._pass.abandon()
            self.consensus.buckets.clear()
            self._pass = None
        return writing
