"""The outer steps of a round: which part of the weights is exchanged when, at once or while the training goes on."""

import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm import collectives
from commhooks.comm.collectives import Pending, PointToPoint, Send, good_on_all
from commhooks.compressors.base import StepInfo
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.engine.backward_pass import RunningExchange
from commhooks.engine.consensus import Binding
from commhooks.engine.session import ABANDONED_LIMIT_S, ExchangeDriver
from commhooks.engine.state import LearnedState
from commhooks.engine.task import ExchangeTask
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, read_layout, to_logical, to_memory
from commhooks.gradients.precision import compute_dtype
from commhooks.local_steps.compressor import LocalStepsCompressor
from commhooks.local_steps.outer_step import Workspace, norm_and_cosine

BUFFER_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Turn:
    """One fragment of the weights in one round (Douillard et al.: Streaming DiLoCo, 2025, section 2).

    Attributes:
        fragment: its number, from 0.
        sent_after: passes of the round after which its differences are sent.
        due_after: passes after which the weights become the new anchor.
    """

    fragment: int
    sent_after: int
    due_after: int


def turns(every: int, fragments: int, delay: int) -> list[Turn]:
    """The turns of a round of `every` passes, spread evenly, the last one at its end. No two overlap, because `delay`
    is less than the distance between them."""
    distance = every // fragments
    return [Turn(each, (each + 1) * distance - delay, (each + 1) * distance) for each in range(fragments)]


class OuterSteps(ExchangeDriver):
    """Runs the outer steps of one model. All ranks call the methods after the same passes.

    Args:
        compressor: an outer step is its exchange.
        binding: its group is the thread's own if there is a `delay`.
        sizes: numbers in each whole parameter, of which this rank may have a shard.

    Attributes:
        immediate: all weights are exchanged together, and nothing happens in the meantime.
        discarded: how many outer steps have found weights that are not finite.
    """

    def __init__(self, compressor: LocalStepsCompressor[Any], binding: Binding, sizes: Mapping[str, int]) -> None:
        super().__init__(compressor, binding, LearnedState.of(compressor.state_fields))
        config = compressor.config
        self.immediate = config.fragments == 1 and config.delay == 0
        self.discarded = 0
        self._fragments = divided(sizes, config.fragments)
        self._turns = turns(config.sync_every, config.fragments, config.delay)
        self._buffers: dict[int, list[Buffer]] = {}
        self._messages = PointToPoint()
        self._next = 0  # the turn that is waited for
        self._on_its_way: _Exchange | None = None
        self._measured: list[torch.Tensor] = []

    def due(self, passes: int) -> bool:
        """Whether there is something to do after so many passes of the round."""
        turn = self._turns[self._next]
        return passes >= (turn.sent_after if self._on_its_way is None else turn.due_after)

    def advance(self, passes: int) -> bool:
        """Do what is due after so many passes of the round. Returns whether the round has ended."""
        while self.due(passes):
            turn = self._turns[self._next]
            if self._on_its_way is None:
                later = turn.sent_after < turn.due_after
                self._on_its_way = _Exchange(self, self._fragment(turn.fragment), later=later)
            if passes >= turn.due_after:
                self._arrive()
                self._next += 1
            if self._next == len(self._turns):
                self._next = 0
                return True
        return False

    def end_round(self) -> None:
        """End the round early: let arrive what is on its way, then exchange all"""
        self._arrive()
        self._next = 0
        whole = self._fragment(0) if len(self._fragments) == 1 else self._made(self.consensus.binding.names.known())
        self._on_its_way = _Exchange(self, whole, later=False)
        self._arrive()

    def forget(self, *, until_timeout: bool = False) -> None:
        """Begin a round without what is on its way, of which nothing will come: another state is loaded, or the
        training has ended. `until_timeout`: wait for the other ranks up to the process group's timeout."""
        exchange, self._on_its_way, self._next = self._on_its_way, None, 0
        self._buffers.clear()
        if exchange is not None:
            exchange.abandon(None if until_timeout else ABANDONED_LIMIT_S)

    def norm_and_cosine(self) -> tuple[float | None, float | None]:
        """Of the latest outer step: the norm of the outer gradient, and its cosine with the one before."""
        return norm_and_cosine(self._measured)

    def issue(self, group: Any, send: Send) -> Pending:
        """Start a collective of an outer step over `group`."""
        return collectives.start(send, group, self.counters, f"outer step {self.state.step}", self._messages)

    def _arrive(self) -> None:
        """End the exchange that is on its way: commit it on all ranks or on none, and let the weights be the new
        anchor, plus what the training has added to them in the meantime; or the old one."""
        exchange, self._on_its_way = self._on_its_way, None
        if exchange is None or not exchange.buffers:
            return
        good = exchange.finite()
        # A rank of a node, or of a replica, exchanges with its like elsewhere: what one finds counts for all.
        for over, whose in (
            (self.consensus.arrangement.groups.get("node"), "the node"),
            (self.consensus.binding.shards, "all shards"),
        ):
            if over is not None:
                good = good_on_all(good, over(), whose)
        verdict = bool(good) if precision.is_host_readable(good.device) else good
        before = self.state.nonfinite_steps
        with self.held.committing(good.device):
            self.state.local_shared = False
            exchange.commit(verdict)
            self.held.add(verdict, 1.0, compressed=True)
        self.held.settle()
        self._messages.forget_abandoned()
        discarded = self.state.nonfinite_steps - before
        self.discarded += discarded
        self._measured = [each.work.measured for each in exchange.buffers if each.work.measured is not None]
        exchange.apply(discarded=bool(discarded))

    def _fragment(self, number: int) -> "list[Buffer]":
        if number not in self._buffers:
            known = self.consensus.binding.names.known()
            self._buffers[number] = self._made({name: known[name] for name in self._fragments[number]})
        return self._buffers[number]

    def _made(self, parameters: Mapping[str, torch.Tensor]) -> "list[Buffer]":
        compressor, names = self.compressor, self.consensus.binding.names
        config, found = compressor.config, []
        for layout in layouts(parameters):
            infos = [ParameterInfo.of(slot.name, slot.parameter, names, config, False) for slot in layout.slots]
            found.append(Buffer(layout, compressor.workspace(layout, compressor.plan(infos))))
        return found


@dataclass(eq=False)
class Buffer:
    """Weights that are exchanged as one tensor."""

    layout: BucketLayout
    work: Workspace


class _Exchange:
    """One outer step of some  It begins here."""

    def __init__(self, steps: OuterSteps, buffers: Sequence[Buffer], *, later: bool) -> None:
        self.buffers = buffers
        self._flats = [packed(each.layout) for each in buffers]
        self._sent = [flat.clone() for flat in self._flats] if later else []
        self._device = self._flats[0].device if self._flats else torch.device("cpu")
        self._clocks = steps.counters.clocks
        self._finite = torch.ones((), dtype=torch.bool, device=self._device)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        group = steps.consensus.arrangement.groups.get("all", steps.consensus.binding.group)()
        info = StepInfo(steps.state.step, group.size(), rank=group.rank())
        issue = functools.partial(steps.issue, group)
        self._running = [
            RunningExchange(
                ExchangeTask(
                    steps.compressor.exchange(flat, each.work, steps.state, info), flat, steps.compressor.name
                ),
                flat,
                issue,
            )
            for flat, each in zip(self._flats, buffers, strict=True)
        ]
        if not later:
            self._exchange()
            return
        self._thread = threading.Thread(target=self._exchange_and_keep_errors, name="commhooks outer step", daemon=True)
        self._thread.start()
        # Also when the process ends: a thread that is stopped within a collective aborts it.
        weakref.finalize(self, _join, self._thread, ABANDONED_LIMIT_S)

    def _exchange(self) -> None:
        """Run all exchanges up to their verdicts."""
        # The precision of products is that of the process, and the training may multiply beside this.
        with precision.full_precision(self._device, products=False), self._clocks.measure(self._device):
            for each in self._running:
                each.advance()
            while left := [each for each in self._running if each.has_round_left]:
                for each in left:
                    each.advance()
            for each in self._running:
                each.finish()
            if self._running:
                self._finite = torch.stack([each.finite for each in self._running]).all()

    def _exchange_and_keep_errors(self) -> None:
        try:
            self._exchange()
        except BaseException as error:  # it is the caller's
            self._error = error

    def finite(self) -> torch.Tensor:
        """Wait. Returns whether everything received is finite (0-dim bool tensor), or raises what was raised."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._finite

    def commit(self, verdict: torch.Tensor | bool) -> None:
        with precision.full_precision(self._device, products=False), self._clocks.measure(self._device):
            for each in self._running:
                each.advance(verdict)

    def abandon(self, limit_s: float | None) -> None:
        if self._thread is not None:
            _join(self._thread, limit_s)

    @torch.no_grad()
    def apply(self, *, discarded: bool) -> None:
        for place, (each, flat) in enumerate(zip(self.buffers, self._flats, strict=True)):
            if self._sent and not discarded:
                flat.sub_(self._sent[place]).add_(packed(each.layout))
            write_back(each.layout, flat)


def _join(thread: threading.Thread, limit_s: float | None) -> None:
    if thread is not threading.current_thread():
        thread.join(limit_s)


# ---- weights as flat tensors -----------------------------------------------------------------------------------------


def layouts(parameters: Mapping[str, torch.Tensor]) -> list[BucketLayout]:
    """Where each parameter lies in the buffers that hold all of them, last one first. A buffer is on one device and has
    at most `BUFFER_BYTES`, or one parameter."""
    found = []
    for names in _groups({name: parameters[name] for name in reversed(list(parameters))}):
        group = [parameters[name] for name in names]
        size, dtype = sum(each.numel() for each in group), compute_dtype(group[0].dtype)
        found.append(read_layout(torch.empty(size, dtype=dtype, device=group[0].device), group, names))
    return found


def packed(layout: BucketLayout) -> torch.Tensor:
    """A buffer with a copy of the weights."""
    flat = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
    for slot in layout.slots:
        slot.of(flat).copy_(to_memory(slot.parameter.detach(), slot.parameter))
    return flat


def write_back(layout: BucketLayout, flat: torch.Tensor) -> None:
    """Let the weights be what is in the buffer, rounded to their dtypes."""
    for slot in layout.slots:
        slot.parameter.detach().copy_(to_logical(slot.of(flat), slot.parameter))


def divided(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """The names in so many parts of about the same size, in order. A part beside a large tensor may be empty.

    Args:
        sizes: of the whole parameters, so that ranks with other shards divide them alike.
    """
    total, before = sum(sizes.values()), 0
    found: list[list[str]] = [[] for _ in range(parts)]
    for name, size in sizes.items():
        middle = before + size / 2
        found[min(parts - 1, int(middle * parts / max(1, total)))].append(name)
        before += size
    return found


def copied(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the weights by name, flat in memory order."""
    return {n: to_memory(p.detach(), p).to(compute_dtype(p.dtype), copy=True) for n, p in parameters.items()}


def set_weights(parameters: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Let the weights be `values`, by name and flat in memory order, rounded to their dtypes."""
    for name, parameter in parameters.items():
        if name in values:
            parameter.detach().copy_(to_logical(values[name].to(parameter.device), parameter))


def _groups(parameters: Mapping[str, torch.Tensor]) -> Iterator[Sequence[str]]:
    """The names of parameters of one device and one dtype of computation, up to `BUFFER_BYTES` in a group but at least
    one."""
    groups: dict[tuple[torch.device, torch.dtype], list[list[str]]] = {}
    for name, each in parameters.items():
        dtype = compute_dtype(each.dtype)
        mine = groups.setdefault((each.device, dtype), [[]])
        if mine[-1] and sum(parameters[n].numel() for n in [*mine[-1], name]) * dtype.itemsize > BUFFER_BYTES:
            mine.append([])
        mine[-1].append(name)
    return (group for each in groups.values() for group in each)
