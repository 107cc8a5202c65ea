"""The outer steps of a model: which fragment of the weights is exchanged when, at once or while the training goes on
(Douillard et al.: Streaming DiLoCo, 2025, section 2)."""

import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commhooks.comm import collectives
from commhooks.comm.collectives import Pending, PointToPoint, Send, good_on_all
from commhooks.comm.nodes import Nodes
from commhooks.compressors.base import StepInfo
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.engine.backward_pass import RunningExchange, finish_sends
from commhooks.engine.consensus import Binding
from commhooks.engine.session import ABANDONED_LIMIT_S, ExchangeDriver
from commhooks.engine.state import LearnedState
from commhooks.engine.task import ExchangeTask
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, read_layout, to_logical, to_memory
from commhooks.gradients.precision import compute_dtype
from commhooks.local_steps.compressor import LocalStepsCompressor
from commhooks.local_steps.outer_step import OuterStepWorkspace, norm_and_cosine

BUFFER_BYTES = 64 * 2**20


class OuterSteps(ExchangeDriver):
    """Runs the outer steps of one model. All ranks must call each method after the same passes.

    A round of H passes is split among P fragments. Fragment k is applied after (k + 1) * H / P passes: its anchor takes
    the outer step, and its weights are reset to that anchor, plus what the training has added since the exchange
    started. Its exchange starts `delay` passes earlier; exchanges of different fragments never overlap.

    Args:
        compressor: its exchange is an outer step.
        binding: with a `delay` its group must be used by nothing else.
        sizes: number of elements of each whole parameter, of which this rank may have a shard.
        nodes: the ranks of a node average gradients, which keeps their weights equal, and each of them averages its
            weights with one rank of every other node. None: all ranks average their weights.

    Attributes:
        immediate: all weights are exchanged together, and the training waits.
    """

    def __init__(
        self,
        compressor: LocalStepsCompressor[Any],
        binding: Binding,
        sizes: Mapping[str, int],
        nodes: Nodes | None,
    ) -> None:
        super().__init__(compressor, binding, LearnedState.of(compressor.state_fields))
        config = compressor.config
        self.immediate = config.fragments == 1 and config.delay == 0
        self.nodes = nodes
        self._fragments = divided(sizes, config.fragments)
        self._distance, self._delay = config.sync_every // config.fragments, config.delay
        self._buffers: dict[int, list[OuterStepWorkspace]] = {}
        self._messages = PointToPoint()
        self._turn = 0  # the fragment that is applied next
        self._in_flight: _Exchange | None = None
        self._measured: list[torch.Tensor] = []

    def due(self, passes: int) -> bool:
        """Whether a fragment must be sent or applied after so many passes of the round."""
        turn = (self._turn + 1) * self._distance
        return passes >= (turn - self._delay if self._in_flight is None else turn)

    def advance(self, passes: int) -> bool:
        """Do what is due after so many passes of the round. Returns whether the round has ended."""
        while self.due(passes):
            if self._in_flight is None:
                self._in_flight = _Exchange(self, self._fragment(self._turn), in_thread=self._delay > 0)
            if self.due(passes):
                self._arrive()
                self._turn += 1
            if self._turn == len(self._fragments):
                self._turn = 0
                return True
        return False

    def end_round(self) -> None:
        """End the round early: finish the exchange in flight, then exchange all weights."""
        self._arrive()
        self._turn = 0
        parameters = self.consensus.binding.names.named_parameters()
        whole = self._fragment(0) if len(self._fragments) == 1 else self._made(parameters)
        self._in_flight = _Exchange(self, whole, in_thread=False)
        self._arrive()

    def forget(self, *, until_timeout: bool = False) -> None:
        """Begin a round and drop the exchange in flight, because another state is loaded or the training has ended.
        `until_timeout`: wait for the other ranks up to the process group's timeout."""
        exchange, self._in_flight, self._turn = self._in_flight, None, 0
        self._buffers.clear()
        if exchange is not None:
            exchange.wait(None if until_timeout else ABANDONED_LIMIT_S)

    def norm_and_cosine(self) -> tuple[float | None, float | None]:
        """The norm of the latest outer gradient, and its cosine with the one before."""
        return norm_and_cosine(self._measured)

    def issue(self, group: Any, send: Send) -> Pending:
        """Start a collective of an outer step over `group`."""
        return collectives.start(send, group, self.counters, f"outer step {self.state.step}", self._messages)

    def _arrive(self) -> None:
        """Finish the exchange in flight, and commit it on all ranks or on none."""
        exchange, self._in_flight = self._in_flight, None
        if exchange is None or not exchange.buffers:
            return
        good = exchange.finite()
        # Each rank of a node or of a replica exchanges with its counterparts: a bad number on one counts for all.
        if self.nodes is not None:
            good = good_on_all(good, self.nodes.intra_node, "the node")
        if self.consensus.binding.shards is not None:
            good = good_on_all(good, self.consensus.binding.shards(), "all shards")
        verdict = bool(good) if precision.is_host_readable(good.device) else good
        before = self.state.nonfinite_steps
        with self.held.committing(good.device):
            self.state.local_shared = False
            exchange.commit(verdict)
            self.held.add(verdict, 1.0, compressed=True)
        self.held.settle()
        self._messages.forget_abandoned()
        self._measured = [each.measured for each in exchange.buffers if each.measured is not None]
        exchange.write_weights(keep_training=self.state.nonfinite_steps == before)

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


class _Exchange:
    """One outer step of some weights, which begins in the constructor. `in_thread`: the training goes on meanwhile."""

    def __init__(self, steps: OuterSteps, buffers: Sequence[OuterStepWorkspace], *, in_thread: bool) -> None:
        self.buffers = buffers
        self._flats = [packed(each.layout) for each in buffers]
        self._sent = [flat.clone() for flat in self._flats] if in_thread else []
        self._device = self._flats[0].device if self._flats else torch.device("cpu")
        self._clocks = steps.counters.clocks
        self._finite = torch.ones((), dtype=torch.bool, device=self._device)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        group = steps.consensus.binding.group() if steps.nodes is None else steps.nodes.inter_node
        info = StepInfo(steps.state.step, group.size(), rank=group.rank())
        issue, compressor = functools.partial(steps.issue, group), steps.compressor
        self._running = []
        for flat, each in zip(self._flats, buffers, strict=True):
            task = ExchangeTask(compressor.exchange(flat, each, steps.state, info), flat, compressor.name)
            self._running.append(RunningExchange(task, flat, issue))
        if not in_thread:
            self._exchange()
            return
        self._thread = threading.Thread(target=self._exchange_and_keep_errors, name="commhooks outer step", daemon=True)
        self._thread.start()
        # Also at the end of the process, which would abort if it stopped a thread within a collective.
        weakref.finalize(self, _join, self._thread, ABANDONED_LIMIT_S)

    def _exchange(self) -> None:
        """Run all exchanges up to their verdicts."""
        # The precision of products is set for the whole process, in which the training may multiply at the same time.
        with precision.full_precision(self._device, products=False), self._clocks.measure(self._device):
            for each in self._running:
                each.advance()
            finish_sends(self._running)
            if self._running:
                self._finite = torch.stack([each.finite for each in self._running]).all()

    def _exchange_and_keep_errors(self) -> None:
        try:
            self._exchange()
        except BaseException as error:  # `finite` raises it
            self._error = error

    def wait(self, limit_s: float | None) -> None:
        if self._thread is not None:
            _join(self._thread, limit_s)

    def finite(self) -> torch.Tensor:
        """Wait. Returns whether everything received is finite (0-dim bool tensor), or raises the thread's error."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._finite

    def commit(self, verdict: torch.Tensor | bool) -> None:
        with precision.full_precision(self._device, products=False), self._clocks.measure(self._device):
            for each in self._running:
                each.advance(verdict)

    @torch.no_grad()
    def write_weights(self, *, keep_training: bool) -> None:
        """Set the weights to the anchor. `keep_training`: plus what the training has added since they were sent."""
        for place, (each, flat) in enumerate(zip(self.buffers, self._flats, strict=True)):
            if self._sent and keep_training:
                flat.sub_(self._sent[place]).add_(packed(each.layout))
            write_back(each.layout, flat)


def _join(thread: threading.Thread, limit_s: float | None) -> None:
    if thread is not threading.current_thread():
        thread.join(limit_s)


# ---- weights as flat tensors, in float32 (float64 for weights in float64) --------------------------------------------


def divided(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """The names in so many parts of about the same size, in order. A part beside a large tensor may be empty.

    Args:
        sizes: of the whole parameters, so that ranks with different shards divide them alike.
    """
    total, before = sum(sizes.values()), 0
    found: list[list[str]] = [[] for _ in range(parts)]
    for name, size in sizes.items():
        middle = before + size / 2
        found[min(parts - 1, int(middle * parts / max(1, total)))].append(name)
        before += size
    return found


def layouts(parameters: Mapping[str, torch.Tensor]) -> list[BucketLayout]:
    """The buffers that hold all parameters, the last one first. A buffer is on one device, in one dtype, and has at
    most `BUFFER_BYTES`, or one parameter."""
    groups: dict[tuple[torch.device, torch.dtype], list[list[str]]] = {}
    for name, each in reversed(list(parameters.items())):
        dtype = compute_dtype(each.dtype)
        mine = groups.setdefault((each.device, dtype), [[]])
        if mine[-1] and sum(parameters[n].numel() for n in [*mine[-1], name]) * dtype.itemsize > BUFFER_BYTES:
            mine.append([])
        mine[-1].append(name)
    found = []
    for (device, dtype), several in groups.items():
        for names in several:
            own = [parameters[name] for name in names]
            size = sum(each.numel() for each in own)
            found.append(read_layout(torch.empty(size, dtype=dtype, device=device), own, names))
    return found


def packed(layout: BucketLayout) -> torch.Tensor:
    """A buffer with a copy of the weights."""
    flat = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
    for slot in layout.slots:
        slot.of(flat).copy_(to_memory(slot.parameter.detach(), slot.parameter))
    return flat


def write_back(layout: BucketLayout, flat: torch.Tensor) -> None:
    """Set the weights to the numbers in the buffer, rounded to their dtypes."""
    for slot in layout.slots:
        slot.parameter.detach().copy_(to_logical(slot.of(flat), slot.parameter))


def copied(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the weights by name, flat in memory order."""
    return {n: to_memory(p.detach(), p).to(compute_dtype(p.dtype), copy=True) for n, p in parameters.items()}


def set_weights(parameters: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Set the weights to `values`, by name and flat in memory order, rounded to their dtypes."""
    for name, parameter in parameters.items():
        if name in values:
            parameter.detach().copy_(to_logical(values[name].to(parameter.device), parameter))
