"""Run the outer steps of a model's weights, which may be divided into fragments that take turns
(Douillard et al.: Streaming DiLoCo, 2025, section 2). Without fragments and delay, all weights take
the outer step of the first paper at the end of a round.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commhooks.comm import collectives
from commhooks.comm.collectives import Pending, PointToPoint, Send, broadcast_first, good_on_all
from commhooks.comm.packing import all_finite
from commhooks.compressors.base import StepInfo
from commhooks.engine.backward_pass import RunningExchange
from commhooks.engine.consensus import Binding
from commhooks.engine.session import ABANDONED_LIMIT_S
from commhooks.engine.streams import in_background, wait_for_background, wait_for_copies
from commhooks.engine.task import ExchangeTask
from commhooks.gradients import precision
from commhooks.local_steps.compressor import LocalStepsCompressor
from commhooks.local_steps.exchange import OuterExchange
from commhooks.local_steps.flat_weights import packed
from commhooks.local_steps.outer_state import OuterState
from commhooks.local_steps.outer_step import ANCHOR, OuterStepWorkspace, norm_and_cosine
from commhooks.local_steps.partner import Partner
from commhooks.local_steps.replay import Record, Recorder, Replay
from commhooks.local_steps.schedule import Rules
from commhooks.local_steps.workspaces import Workspaces


class OuterSteps(OuterState):
    """Runs the outer steps of one model, when the driver says so. All ranks must call each method
    after the same backward passes.

    Args:
        binding: the model and the ranks. With a `delay` nothing else may use the group.
        sizes: number of elements of each whole parameter, of which this rank may have a shard.
        partner: with whom the exchanges run.
    """

    def __init__(
        self,
        compressor: LocalStepsCompressor[Any],
        binding: Binding,
        sizes: Mapping[str, int],
        partner: Partner,
    ) -> None:
        super().__init__(compressor, binding)
        self.partner = partner
        self._workspaces = Workspaces(binding.names, sizes, compressor.config.fragments)
        self._messages = PointToPoint()
        self._in_flight: OuterExchange | None = None
        self._measured: list[torch.Tensor] = []
        self._recorder: Recorder | None = None

    @property
    def rules(self) -> Rules:
        """What `schedule.py` must know. A load may have changed the start."""
        config, asks = self.compressor.config, self.consensus.binding.loss_scale is not None
        start = self.compressor.start_step
        rules = Rules(config.sync_every, config.fragments, config.delay, start, asks)
        return dataclasses.replace(rules, looks_every=self.partner.looks_every(rules.shortest))

    # ---- at once
    # ----------------------------------------------------------------------------------------------

    def exchange(self, number: int | None) -> None:
        """Run the outer step of a fragment (None: of all weights), while the training waits."""
        buffers = self._fragment(number)
        if not buffers:
            return
        with self.as_behind(buffers[0].layout.device):
            self._exchange(buffers)

    def _exchange(self, buffers: Sequence[OuterStepWorkspace]) -> None:
        """Exchange two buffers at a time, so that the memory needed does not grow with the
        model.
        """
        self.held.settle()  # a save may have written the residuals on another stream
        # A buffer is committed before the one after the next is sent. To commit all buffers or
        # none, each carries a NaN if any weight of the fragment is not finite here, or on a rank
        # with another part of the weights.
        weights = [parameter.detach() for work in buffers for parameter in work.layout.parameters]
        good = self._on_all_parts(torch.stack([all_finite(weight) for weight in weights]).all())
        under_way: collections.deque[OuterExchange] = collections.deque()
        for work in buffers:
            under_way.append(self._new_exchange([work]))
            under_way[-1].begin(good)
            if len(under_way) > 1:
                good = self._finish(under_way.popleft(), good)
        while under_way:
            good = self._finish(under_way.popleft(), good)
        self._count(self._on_all_parts(good), buffers)

    def _finish(self, exchange: OuterExchange, good: torch.Tensor) -> torch.Tensor:
        """Commit the exchange of a buffer, and set the weights to the new anchor. Return whether
        this and all earlier buffers (`good`) are finite.
        """
        good = self._in_node(good & exchange.finite())
        self._commit(exchange, good)
        exchange.write_weights()
        return good

    # ---- behind the training
    # -----------------------------------------------------------------------------------------

    def send(self, number: int) -> None:
        """Begin the outer step of a fragment, while the training goes on."""
        exchange = self._new_exchange(self._fragment(number))
        # a save may have written the residuals on another stream
        exchange.begin_behind(self.held.settle)
        self._in_flight = exchange

    def apply(self) -> None:
        """Finish the outer step that was begun, on all ranks or on none."""
        exchange, self._in_flight = self._in_flight, None
        assert exchange is not None
        if not exchange.buffers:
            return
        before = self.state.nonfinite_steps
        # Do not wait for the work queued by the training: the commit does not depend on it.
        with in_background(exchange.device, after_current=False):
            good = self._on_all_parts(exchange.finite())
            self._commit(exchange, good)
            self._count(good, exchange.buffers)
        wait_for_background(exchange.device)
        exchange.write_weights(keep_training=self.state.nonfinite_steps == before)

    def forget(self, *, until_timeout: bool = False) -> None:
        """Drop the exchange in flight. With `until_timeout` wait for the exchange up to the process
        group's timeout, otherwise for a few seconds.
        """
        exchange, self._in_flight = self._in_flight, None
        self._workspaces.clear()
        if exchange is not None:
            exchange.wait(None if until_timeout else ABANDONED_LIMIT_S)

    # ---- prepared, and committed when all machines have confirmed
    # ----------------------------------------------------------------------------------------------

    def prepare(
        self,
        fragment: int | None,
        weight: float,
        *,
        exchanges: bool,
        recorder: Recorder | None = None,
        sent: Sequence[torch.Tensor] = (),
    ) -> OuterExchange:
        """Prepare the exchange of a fragment (None: of all weights), which writes nothing before
        `commit_prepared`; the caller begins it.

        Args:
            weight: of this replica's differences in the mean.
            exchanges: whether this rank exchanges; otherwise it gets the result from rank 0 of its
                model.
            sent: the weights of an exchange that has failed, to send again; `commit_prepared`
                keeps what the training has changed since. Empty: the present weights.
        """
        self.held.settle()  # a save may have written the residuals on another stream
        buffers = self._fragment(fragment)
        for work in buffers:
            work.weight = weight
        self._recorder = recorder
        return self._new_exchange(buffers, sent=sent, exchanges=exchanges)

    def replay(self, record: Record) -> None:
        """Take an outer step that others have taken from these weights."""
        self.held.settle()
        buffers = self._fragment(record.fragment)
        start = Replay(self.compressor, self.state, buffers, record)
        exchange = OuterExchange(buffers, start, self.counters.clocks)
        exchange.begin()
        good = exchange.finite() & record.good
        self._commit(exchange, good)
        self._count(good, buffers)
        exchange.write_weights()

    def commit_prepared(self, exchange: OuterExchange) -> None:
        """Set anchor and weights, or count a discarded step if a number is not finite in any buffer
        or any shard. All ranks of a model must call this.
        """
        with self.as_behind(exchange.device):
            good = self._commit_on_all_ranks(exchange)
        exchange.write_weights(keep_training=bool(exchange.sent) and bool(good))

    def _commit_on_all_ranks(self, exchange: OuterExchange) -> torch.Tensor:
        buffers = exchange.buffers
        good = exchange.finite()
        if exchange.exchanges:
            good = self._on_all_parts(good)
        model = self.consensus.binding.group()
        if model.size() > 1:
            shared = good.to(torch.int32)
            broadcast_first(shared, model, self.counters, "the outer step")
            good = shared == 1
        self._commit(exchange, good)
        if self._recorder is not None:
            self._recorder.good = bool(good)
        self._count(good, buffers)
        for place, work in enumerate(buffers if model.size() > 1 else ()):
            flat = exchange.results[place] if exchange.exchanges else packed(work.layout)
            broadcast_first(flat, model, self.counters, "the outer step")
            if not exchange.exchanges:
                for slot in work.layout.slots:
                    self.state[ANCHOR.key][slot.name].copy_(slot.of(flat))
                exchange.results.append(flat)
            if self.compressor.config.outer_momentum:
                self.share_momentum(work.layout, exchanged=exchange.exchanges)
        return good

    # ---- what they share
    # ---------------------------------------------------------------------------------------------

    def _new_exchange(self, buffers: Sequence[OuterStepWorkspace], **options: Any) -> OuterExchange:
        return OuterExchange(buffers, self._start, self.counters.clocks, **options)

    def _start(self, work: OuterStepWorkspace, flat: torch.Tensor) -> RunningExchange:
        group = self.partner.group
        info = StepInfo(self.state.step, group.size(), rank=group.rank())
        exchange = self.compressor.exchange(flat, work, self.state, info)
        if self._recorder is not None:
            exchange = self._recorder.recorded(exchange)
        task = ExchangeTask(exchange, flat, self.compressor.name)
        return RunningExchange(task, flat, functools.partial(self._issue, group))

    def _issue(self, group: Any, send: Send) -> Pending:
        return collectives.start(
            send, group, self.counters, f"outer step {self.state.step}", self._messages
        )

    def _commit(self, exchange: OuterExchange, good: torch.Tensor) -> None:
        with self.held.committing(good.device):
            self.state.local_shared = self.partner.first_rank_exchanges
            exchange.commit(_verdict(good))
            wait_for_copies(good.device)

    def _count(self, good: torch.Tensor, buffers: Sequence[OuterStepWorkspace]) -> None:
        with self.held.committing(good.device):
            self.held.add(_verdict(good), 1.0, compressed=True)
        self.held.settle()
        self._messages.forget_abandoned()
        self._measured = [work.measured for work in buffers if work.measured is not None]

    def _in_node(self, good: torch.Tensor) -> torch.Tensor:
        """Return whether `good` is true on all ranks of the node, which must keep equal weights."""
        nodes = self.partner.nodes
        return good if nodes is None else good_on_all(good, nodes.intra_node, "the node")

    def _on_all_parts(self, good: torch.Tensor) -> torch.Tensor:
        """Return whether `good` is true for all parts of the weights: each rank of a node, or each
        shard, exchanges one part.
        """
        good = self._in_node(good)
        shards = self.consensus.binding.shard_group
        return good if shards is None else good_on_all(good, shards, "all shards")

    def norm_and_cosine(self) -> tuple[float | None, float | None]:
        return norm_and_cosine(self._measured)

    def _fragment(self, number: int | None) -> list[OuterStepWorkspace]:
        """Return the buffers of a fragment; None: of all weights."""
        if number is None:
            return self._workspaces.of_all(self.compressor)
        return self._workspaces.of_fragment(number, self.compressor)


def _verdict(good: torch.Tensor) -> torch.Tensor | bool:
    return bool(good) if precision.is_host_readable(good.device) else good
