"""Run the outer steps of a model's weights, which may be divided into fragments that take turns (Douillard et al.:
Streaming DiLoCo, 2025, section 2). Without fragments and delay, all weights take the outer step of the first paper at
the end of a round."""

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from commhooks.comm import collectives
from commhooks.comm.collectives import Pending, PointToPoint, Send, broadcast_first, good_on_all
from commhooks.comm.wire import all_finite
from commhooks.compressors.base import StepInfo
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.engine.backward_pass import RunningExchange, finish_sends
from commhooks.engine.consensus import Binding
from commhooks.engine.session import ABANDONED_LIMIT_S, ExchangeDriver
from commhooks.engine.state import LearnedState
from commhooks.engine.streams import in_background, wait_for_background, wait_for_copies
from commhooks.engine.task import ExchangeTask
from commhooks.gradients import precision
from commhooks.gradients.precision import keep_for_current_stream
from commhooks.local_steps.compressor import LocalStepsCompressor
from commhooks.local_steps.flat_weights import copied, divided, layouts, packed, write_back
from commhooks.local_steps.offload import to_host
from commhooks.local_steps.outer_step import ANCHOR, MOMENTUM, OuterStepWorkspace, norm_and_cosine
from commhooks.local_steps.partner import Partner


class FragmentSession(ExchangeDriver):
    """Runs the outer steps of one model. All ranks must call each method after the same backward passes.

    A round has H passes and P fragments. Fragment k is applied after (k + 1) * H / P passes: its anchor takes the outer
    step, and its weights become the anchor plus the changes of the training since the exchange started. The exchange
    starts `delay` passes earlier; exchanges of different fragments never overlap.

    Args:
        binding: the model and the ranks. With a `delay` nothing else may use the group.
        sizes: number of elements of each whole parameter, of which this rank may have a shard.
        partner: with whom the exchanges run.

    Attributes:
        immediate: whether all weights are exchanged together while the training waits.
    """

    def __init__(
        self,
        compressor: LocalStepsCompressor[Any],
        binding: Binding,
        sizes: Mapping[str, int],
        partner: Partner,
    ) -> None:
        super().__init__(compressor, binding, LearnedState.of(compressor.state_fields))
        config = compressor.config
        self.immediate = config.fragments == 1 and config.delay == 0
        self.partner = partner
        self._fragments = divided(sizes, config.fragments)
        self._distance, self._delay = config.sync_every // config.fragments, config.delay
        self._buffers: dict[int, list[OuterStepWorkspace]] = {}
        self._messages = PointToPoint()
        self._turn = 0  # the fragment that is applied next
        self._in_flight: _DelayedExchange | None = None
        self._measured: list[torch.Tensor] = []

    @property
    def compressor(self) -> LocalStepsCompressor[Any]:
        compressor = super().compressor
        assert isinstance(compressor, LocalStepsCompressor)
        return compressor

    def due(self, passes: int) -> bool:
        """Return whether a fragment must be sent or applied after `passes` passes of the round."""
        turn = (self._turn + 1) * self._distance
        return passes >= (turn - self._delay if self._in_flight is None else turn)

    def advance(self, passes: int) -> bool:
        """Send and apply what is due after `passes` passes of the round. Return whether the round has ended."""
        while self.due(passes):
            if self._delay and self._in_flight is None:
                self._in_flight = _DelayedExchange(self, self._fragment(self._turn))
                continue
            if self._delay:
                self._arrive()
            else:
                self._exchange(self._fragment(self._turn))
            self._turn += 1
            if self._turn == len(self._fragments):
                self._turn = 0
                return True
        return False

    def end_round(self) -> bool:
        """End the round early: apply the exchange in flight, then exchange all weights. Return True."""
        self._arrive()
        self._turn = 0
        parameters = self.consensus.binding.names.named_parameters()
        buffers = self._fragment(0) if len(self._fragments) == 1 else self._made(parameters)
        if self._delay and buffers:  # on the stream to which the memory of the learned state belongs
            device = buffers[0].layout.device
            with in_background(device, after_current=True):
                self._exchange(buffers)
            wait_for_background(device)
        else:
            self._exchange(buffers)
        return True

    def forget(self, *, until_timeout: bool = False) -> None:
        """Drop the exchange in flight and begin a round. With `until_timeout` wait for the exchange up to the process
        group's timeout, otherwise for a few seconds."""
        exchange, self._in_flight, self._turn = self._in_flight, None, 0
        self._buffers.clear()
        if exchange is not None:
            exchange.wait(None if until_timeout else ABANDONED_LIMIT_S)

    def norm_and_cosine(self) -> tuple[float | None, float | None]:
        return norm_and_cosine(self._measured)

    def set_anchor(self, parameters: Mapping[str, torch.Tensor]) -> None:
        for name, each in parameters.items():  # one by one, because the whole anchor may not fit on the device
            self.state[ANCHOR.key].update(copied({name: each}))
            self.place_state([name])

    def place_state(self, names: Iterable[str] | None = None) -> None:
        """Move anchor and momentum of these parameters (None: all) to where they are kept."""
        known = self.consensus.binding.names.named_parameters()
        for key, kept in self.state.entries.items():
            for name in kept.keys() if names is None else kept.keys() & names:
                if key in (ANCHOR.key, MOMENTUM.key) and self.compressor.offloads(known[name].device):
                    kept[name] = to_host(kept[name])
                elif self._delay:  # commits on the background stream free memory that this stream has allocated
                    with in_background(kept[name].device, after_current=False):
                        keep_for_current_stream([kept[name]])

    def new_exchange(self, work: OuterStepWorkspace, flat: torch.Tensor) -> RunningExchange:
        group = self.partner.group
        info = StepInfo(self.state.step, group.size(), rank=group.rank())
        task = ExchangeTask(self.compressor.exchange(flat, work, self.state, info), flat, self.compressor.name)
        return RunningExchange(task, flat, functools.partial(self._issue, group))

    def _issue(self, group: Any, send: Send) -> Pending:
        return collectives.start(send, group, self.counters, f"outer step {self.state.step}", self._messages)

    def held_step(self, weight: float, *, exchanges: bool) -> "HeldOuterStep":
        """Begin an outer step of all weights, without a commit. `weight` is the weight of this replica's differences in
        the mean. If `exchanges` is False, this rank gets the result from rank 0 of its model."""
        self.held.settle()  # a save may have written the residuals on another stream
        return HeldOuterStep(self, self._fragment(0), weight, exchanges)

    @torch.no_grad()
    def _exchange(self, buffers: Sequence[OuterStepWorkspace]) -> None:
        """Run the outer step of a fragment while the training waits. Exchange two buffers at a time, so that the memory
        needed does not grow with the model."""
        if not buffers:
            return
        device = buffers[0].layout.device
        self.held.settle()  # a save may have written the residuals on another stream
        # A buffer is committed before the one after the next is sent. To commit all buffers or none, each carries a NaN
        # if any weight of the fragment is not finite here, or on a rank with another part of the weights.
        weights = [each.detach() for work in buffers for each in work.layout.parameters]
        good = self._on_all_parts(torch.stack([all_finite(each) for each in weights]).all())
        started: collections.deque[tuple[OuterStepWorkspace, RunningExchange]] = collections.deque()
        with precision.full_precision(products=False), self.counters.clocks.measure(device):
            for work in buffers:
                started.append((work, self.new_exchange(work, packed(work.layout, good))))
                started[-1][1].advance()
                if len(started) > 1:
                    good = self._commit(*started.popleft(), good)
            while started:
                good = self._commit(*started.popleft(), good)
        self._count(self._on_all_parts(good), buffers)

    def _commit(self, work: OuterStepWorkspace, exchange: RunningExchange, good: torch.Tensor) -> torch.Tensor:
        """Finish the exchange of a buffer, and set the weights to the new anchor. Return whether this and all earlier
        buffers (`good`) are finite."""
        finish_sends([exchange])
        good = good & exchange.finite
        if self.partner.nodes is not None:  # the ranks of a node must keep equal weights
            good = good_on_all(good, self.partner.nodes.intra_node, "the node")
        self.write_anchor([exchange], good)
        write_back(work.layout, exchange.result)
        return good

    def write_anchor(self, exchanged: Sequence[RunningExchange], good: torch.Tensor) -> None:
        with self.held.committing(good.device):
            self.state.local_shared = self.partner.first_rank_exchanges
            for each in exchanged:
                each.advance(_verdict(good))
            wait_for_copies(good.device)

    def _arrive(self) -> None:
        """Finish the exchange in flight, and commit it on all ranks or on none."""
        exchange, self._in_flight = self._in_flight, None
        if exchange is None or not exchange.buffers:
            return
        before = self.state.nonfinite_steps
        # Do not wait for the work queued by the training: the commit does not depend on it.
        with in_background(exchange.device, after_current=False):
            good = self._on_all_parts(exchange.finite())
            with self.held.committing(good.device):
                self.state.local_shared = False
                exchange.commit(_verdict(good))
                wait_for_copies(good.device)
            self._count(good, exchange.buffers)
        wait_for_background(exchange.device)
        exchange.write_weights(keep_training=self.state.nonfinite_steps == before)

    def _count(self, good: torch.Tensor, buffers: Sequence[OuterStepWorkspace]) -> None:
        with self.held.committing(good.device):
            self.held.add(_verdict(good), 1.0, compressed=True)
        self.held.settle()
        self._messages.forget_abandoned()
        self._measured = [each.measured for each in buffers if each.measured is not None]

    def _on_all_parts(self, good: torch.Tensor) -> torch.Tensor:
        """Return whether `good` is true for all parts of the weights: each rank of a node, or each shard, exchanges one
        part."""
        if self.partner.nodes is not None:
            good = good_on_all(good, self.partner.nodes.intra_node, "the node")
        if self.consensus.binding.shards is not None:
            good = good_on_all(good, self.consensus.binding.shards(), "all shards")
        return good

    def _fragment(self, number: int) -> list[OuterStepWorkspace]:
        if number not in self._buffers:
            known = self.consensus.binding.names.named_parameters()
            self._buffers[number] = self._made({name: known[name] for name in self._fragments[number]})
        return self._buffers[number]

    def _made(self, parameters: Mapping[str, torch.Tensor]) -> list[OuterStepWorkspace]:
        compressor, names = self.compressor, self.consensus.binding.names
        found = []
        for layout in layouts(parameters):
            infos = [
                ParameterInfo.of(slot.name, slot.parameter, names, compressor.config, False) for slot in layout.slots
            ]
            found.append(compressor.workspace(layout, compressor.plan(infos)))
        return found


def _verdict(good: torch.Tensor) -> torch.Tensor | bool:
    return bool(good) if precision.is_host_readable(good.device) else good


class HeldOuterStep:
    """Runs an outer step of all weights. It can be abandoned until `commit`, because nothing is written before."""

    def __init__(
        self, session: FragmentSession, buffers: Sequence[OuterStepWorkspace], weight: float, exchanges: bool
    ) -> None:
        self._session, self._buffers = session, buffers
        self._running: list[RunningExchange] = []
        for work in buffers if exchanges else ():
            work.weight = weight
            self._running.append(session.new_exchange(work, packed(work.layout)))

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the differences. The host waits until they have arrived."""
        with self._measured():
            for each in self._running:
                each.advance()
            finish_sends(self._running)

    @torch.no_grad()
    def commit(self) -> None:
        """Set anchor and weights, or count a discarded step if a number is not finite in any buffer or any shard. All
        ranks of a model must call this."""
        session, device = self._session, self._buffers[0].layout.device
        good = torch.ones((), dtype=torch.bool, device=device)
        if self._running:
            good = session._on_all_parts(torch.stack([each.finite for each in self._running]).all())
        model = session.consensus.binding.group()
        if model.size() > 1:
            shared = good.to(torch.int32)
            broadcast_first(shared, model, session.counters, "the outer step")
            good = shared == 1
        with self._measured():
            session.write_anchor(self._running, good)
        session._count(good, self._buffers)
        for place, work in enumerate(self._buffers):
            flat = self._running[place].result if self._running else packed(work.layout)
            if model.size() > 1:
                broadcast_first(flat, model, session.counters, "the outer step")
            for slot in work.layout.slots if not self._running else ():
                session.state[ANCHOR.key][slot.name].copy_(slot.of(flat))
            write_back(work.layout, flat)

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        device = self._buffers[0].layout.device
        with precision.full_precision(products=False), self._session.counters.clocks.measure(device):
            yield


class _DelayedExchange:
    """Runs the outer step of a fragment in the background while the training continues. It begins in the constructor.

    On an accelerator it runs on a stream, and the host does not wait. On the CPU a thread waits for the network.
    """

    def __init__(self, session: FragmentSession, buffers: Sequence[OuterStepWorkspace]) -> None:
        self.buffers = buffers
        self.device = buffers[0].layout.device if buffers else torch.device("cpu")
        self._flats = [packed(each.layout) for each in buffers]  # before the training changes the weights again
        self._sent = [flat.clone() for flat in self._flats]
        self._clocks = session.counters.clocks
        self._finite = torch.ones((), dtype=torch.bool, device=self.device)
        self._error: BaseException | None = None
        self._running = [session.new_exchange(*each) for each in zip(buffers, self._flats, strict=True)]
        self._thread: threading.Thread | None = None
        if precision.has_streams(self.device):
            with in_background(self.device, after_current=True):
                keep_for_current_stream(self._flats)
                session.held.settle()  # a save may have written the residuals on another stream
                self._exchange()
            return
        self._thread = threading.Thread(target=self._exchange_and_keep_errors, name="commhooks outer step", daemon=True)
        self._thread.start()
        # This also joins the thread at exit: the process would abort if it stopped a thread within a collective.
        weakref.finalize(self, _join, self._thread, ABANDONED_LIMIT_S)

    def _exchange(self) -> None:
        # Leave the precision of products alone: it is a setting of the process, and the training may be multiplying.
        with precision.full_precision(products=False), self._clocks.measure(self.device):
            for each in self._running:
                each.advance()
            finish_sends(self._running)
            if self._running:
                self._finite = torch.stack([each.finite for each in self._running]).all()

    def _exchange_and_keep_errors(self) -> None:
        try:
            self._exchange()
        except BaseException as error:  # raised by `finite`
            self._error = error

    def wait(self, limit_s: float | None) -> None:
        # On an accelerator nothing needs to wait, because the memory is kept for the stream.
        if self._thread is not None:
            _join(self._thread, limit_s)

    def finite(self) -> torch.Tensor:
        """Return whether everything received is finite (0-dim bool tensor). On the CPU wait, and raise the thread's
        error. On an accelerator call this on the background stream."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._finite

    def commit(self, verdict: torch.Tensor | bool) -> None:
        with precision.full_precision(products=False), self._clocks.measure(self.device):
            for each in self._running:
                each.advance(verdict)

    @torch.no_grad()
    def write_weights(self, *, keep_training: bool) -> None:
        """Set the weights to the anchor. With `keep_training` add what the training has changed since they were
        sent."""
        for place, (each, flat) in enumerate(zip(self.buffers, self._flats, strict=True)):
            if keep_training:  # weights = anchor + (weights now - weights sent)
                flat.sub_(self._sent[place]).add_(packed(each.layout))
            write_back(each.layout, flat)


def _join(thread: threading.Thread, limit_s: float | None) -> None:
    if thread is not threading.current_thread():
        thread.join(limit_s)
