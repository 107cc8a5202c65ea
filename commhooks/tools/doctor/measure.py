"""What the doctor measures: steps of throw-away copies, one hook each, that take turns."""

import gc
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks.comm.collective import gather_rows
from commhooks.hook.attach import attach
from commhooks.hook.comm_hook import CommHook
from commhooks.tools.doctor.check import BatchFn
from commhooks.tools.doctor.copies import RandomState, copy_of
from commhooks.tools.doctor.link import synchronize

NOOP, PLAIN = "noop", "allreduce"
ROUNDS = 3
# In the first backward pass DDP has other buckets than later; in the second one the hook makes buffers for these.
_WARM_UP = 2


@dataclass(frozen=True)
class Candidate:
    """A hook to try: what `attach` takes, and what its compressor says of the trial."""

    label: str
    hook: str
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: float = 0.0
    """How much it changes the gradients; see `commhooks.Trial`."""
    note: str = ""
    slow_note: str = ""


@dataclass
class Measured:
    """What came out for one candidate: the same numbers on every rank.

    Attributes:
        step_ms: of each measured step (forward, backward, exchange), from a common start to the end of the last rank.
        codec_ms: of each, time inside the hook, on the rank that needs most; empty on an accelerator other than CUDA,
            where the host only queues that work.
        waiting_ms: of each, time in which the host waited for all-reduces, on the rank that waits least: the others
            wait for that rank too, not only for the network. Empty where `codec_ms` is.
        bytes_sent: in a step, handed to all-reduce (the mean).
        bytes_uncompressed: what plain DDP hands over.
        collectives: all-reduces of a step.
        compressed_steps: of the measured ones, in which the hook compressed.
    """

    candidate: Candidate
    step_ms: list[float] = field(default_factory=list)
    codec_ms: list[float] = field(default_factory=list)
    waiting_ms: list[float] = field(default_factory=list)
    bytes_sent: int = 0
    bytes_uncompressed: int = 0
    collectives: int = 0
    compressed_steps: int = 0
    useless: bool = False
    """Compresses nothing of this model: not measured."""
    spent_s: float = 0.0
    """Warm-up included."""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        return quartiles(self.step_ms)


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    if len(samples) == 1:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        steps: measured per candidate.
        seconds: a candidate that has used as many takes no further part; it makes one measured step at least.
        progress: told what comes next.
    """

    steps: int
    seconds: float
    progress: Callable[[str], None]


class Rounds:
    """Measures the candidates in turn. One copy of the model exists at a time."""

    def __init__(
        self, ddp_model: DistributedDataParallel, batch_fn: BatchFn, random_state: RandomState, effort: Effort
    ) -> None:
        self._ddp_model = ddp_model
        self._batch_fn = batch_fn
        self._random_state = random_state
        self._steps, self._seconds, self._progress = effort.steps, effort.seconds, effort.progress
        self._group = ddp_model.process_group
        self._device = next(p.device for p in ddp_model.module.parameters() if p.requires_grad)

    def measure(self, candidates: Sequence[Candidate]) -> dict[str, Measured]:
        """All ranks must call this; all get the same answer."""
        measured = {candidate.label: Measured(candidate) for candidate in candidates}
        order = list(measured.values())
        rounds = min(ROUNDS, self._steps)
        for turn in range(rounds):
            # Each round begins with another one, so that a change of the machine does not count for one of them alone.
            first = turn * len(order) // rounds
            upto = self._steps * (turn + 1) // rounds
            for each in order[first:] + order[:first]:
                if not each.useless and (not each.step_ms or each.spent_s < self._seconds):
                    self._progress(f"round {turn + 1} of {rounds}: {each.candidate.label}")
                    freed = self._visit(each, upto)
                    # A hook refers to itself, and to the parameters. It is young: the oldest generation,
                    # which takes a while in a large program, is looked at only where that was not enough.
                    for generation in range(1, 3):
                        if freed() is not None:
                            gc.collect(generation)
        return {label: each for label, each in measured.items() if not each.useless}

    def _visit(self, measured: Measured, upto: int) -> Callable[[], torch.Tensor | None]:
        """One copy of the model with one hook, until it has `upto` measured steps in all. Returns a weak reference
        that tells whether it is gone."""
        self._random_state.restore()  # so that every candidate gets the same batches
        ddp_model = copy_of(self._ddp_model)
        candidate = measured.candidate
        hook = attach(ddp_model, candidate.hook, hook_options=candidate.options or None, process_group=self._group)
        plan = hook.plan()
        if plan.selective and plan.parameters and not plan.compressed:
            measured.useless = True
            return weakref.ref(next(ddp_model.parameters()))
        hook.quiet()
        warm_up = _WARM_UP
        while warm_up and measured.spent_s < self._seconds / 5:
            self._step(ddp_model, hook, measured, counts=False)
            warm_up -= 1
        before = hook.stats()["compressed_steps"] or 0
        while len(measured.step_ms) < upto:
            self._step(ddp_model, hook, measured, counts=True)
            if measured.spent_s >= self._seconds:
                break
        stats = hook.stats()
        measured.compressed_steps += (stats["compressed_steps"] or 0) - before
        # Of all passes: with `alternate` two of them differ.
        measured.bytes_sent = stats["bytes_sent"] // stats["backward_passes"]
        measured.collectives = stats["collectives_last_pass"]
        measured.bytes_uncompressed = stats["bytes_uncompressed"] // stats["backward_passes"]
        return weakref.ref(next(ddp_model.parameters()))

    def _step(self, ddp_model: DistributedDataParallel, hook: CommHook, measured: Measured, *, counts: bool) -> None:
        ddp_model.zero_grad(set_to_none=True)
        synchronize(self._device)
        self._rows([0.0])  # a common start
        began = time.perf_counter()
        self._batch_fn(ddp_model).backward()
        synchronize(self._device)
        passed = time.perf_counter() - began
        stats = hook.stats()
        timed = stats["codec_s_last_pass"] is not None
        clocks = [stats["codec_s_last_pass"], stats["waiting_s_last_pass"]] if timed else [0.0, 0.0]
        step, codec, waiting = zip(*self._rows([passed, *clocks]), strict=True)
        measured.spent_s += max(step)
        if counts:
            measured.step_ms.append(1000 * max(step))
        if counts and timed:
            measured.codec_ms.append(1000 * max(codec))
            measured.waiting_ms.append(1000 * min(waiting))

    def _rows(self, numbers: list[float]) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        rows: list[list[float]] = gather_rows(own, self._group, None, "the time of a step").tolist()
        return rows
