"""The doctor's measurements: training steps of temporary copies of the model with one hook each, in turns."""

import gc
import itertools
import statistics
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks.comm.collectives import gather_rows
from commhooks.compressors.auto.options import ALLREDUCE, NOOP, Candidate
from commhooks.errors import AttachError, HookConfigError
from commhooks.hook.attach import attach
from commhooks.registry import COMPRESSORS
from commhooks.tools.doctor.check import BatchFn, Gradients, gradients_of
from commhooks.tools.doctor.copies import copy_of
from commhooks.tools.measuring import seconds_of

ROUNDS = 3
# After the first backward pass DDP rebuilds its buckets; in the second pass the hook allocates buffers for these.
_WARM_UP = 2


@dataclass
class Measured:
    """The measurements of one candidate, equal on every rank.

    Attributes:
        step_ms: per measured step: time of forward, backward and communication, from a common start to the end of the
            slowest rank.
        bytes_sent: mean bytes per step passed to collectives.
        bytes_uncompressed: bytes per step that DDP without a hook passes to all-reduce.
        error: of the gradient that the hook makes of one step, without residuals of earlier steps: the norm of its
            difference to the mean of all ranks, as a share of the norm of that mean. None for noop.
    """

    candidate: Candidate
    step_ms: list[float] = field(default_factory=list)
    bytes_sent: int = 0
    bytes_uncompressed: int = 0
    error: float | None = None
    useless: bool = False
    """The hook compresses no parameter of this model and was not measured."""
    spent_s: float = 0.0
    """Time used so far, including warm-up."""

    @property
    def options(self) -> dict[str, Any]:
        """Those with which it was measured: compression from the first step on."""
        return self.candidate.options_at_once(COMPRESSORS[self.candidate.hook].Config)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """The first and the third quartile."""
        if len(self.step_ms) == 1:
            return self.step_ms[0], self.step_ms[0]
        low, _, high = statistics.quantiles(self.step_ms, n=4, method="inclusive")
        return low, high


@dataclass
class Rounds:
    """Measures the candidates in turn, with arguments of `doctor`. One copy of the model exists at a time.
    `restore_random` gives every candidate the same batches, `local` are gradients of this rank for one batch."""

    ddp_model: DistributedDataParallel
    batch_fn: BatchFn
    restore_random: Callable[[], None]
    local: Gradients
    steps: int
    seconds: float
    progress: Callable[[str], None]
    _mean: Gradients = field(default=(), init=False)
    """The average of `local`."""

    def measure(self, candidates: Sequence[Candidate]) -> dict[str, Measured]:
        """Measure all candidates; plain all-reduce comes before those that compress. All ranks must call this; all get
        the same result."""
        order = [Measured(candidate) for candidate in candidates]
        rounds = min(ROUNDS, self.steps)
        for turn in range(rounds):
            # Each round begins with another candidate, so that a change of the machine's load affects all of them.
            first = turn * len(order) // rounds
            for each in order[first:] + order[:first]:
                if not each.useless and (not each.step_ms or each.spent_s < self.seconds):
                    self.progress(f"round {turn + 1} of {rounds}: {each.candidate.label}")
                    self._visit(each, self.steps * (turn + 1) // rounds)
        return {each.candidate.label: each for each in order if not each.useless}

    def _visit(self, measured: Measured, upto: int) -> None:
        """Run one copy of the model with one hook until it has `upto` measured steps in total."""
        self.restore_random()
        ddp_model = copy_of(self.ddp_model)
        parameter = weakref.ref(next(ddp_model.parameters()))
        self._measure(ddp_model, measured, upto)
        del ddp_model
        # Hooks are part of reference cycles that also hold the parameters. They are young objects: collect the oldest
        # generation, which is slow in a large program, only if that is not enough.
        for generation in range(1, 3):
            if parameter() is not None:
                gc.collect(generation)

    def _measure(self, ddp_model: DistributedDataParallel, measured: Measured, upto: int) -> None:
        candidate, options = measured.candidate, measured.options or None
        try:
            hook = attach(ddp_model, candidate.hook, hook_options=options, process_group=ddp_model.process_group)
        except (HookConfigError, AttachError) as error:  # raised on all ranks
            self.progress(f"{candidate.label} cannot run here: {error}")
            measured.useless = True
            return
        plan = hook.plan()
        if plan.selective and plan.parameters and not plan.compressed:
            measured.useless = True
            return
        hook.quiet()
        warm_up = _WARM_UP
        if not measured.step_ms:
            self._compare(ddp_model, measured)
            warm_up -= 1
        for _ in range(warm_up):
            if measured.spent_s < self.seconds / 5:
                self._step(ddp_model, measured)
        while len(measured.step_ms) < upto:
            measured.step_ms.append(self._step(ddp_model, measured))
            if measured.spent_s >= self.seconds:
                break
        stats = hook.stats()
        measured.bytes_sent = stats["bytes_sent"] // stats["backward_passes"]
        measured.bytes_uncompressed = stats["bytes_uncompressed"] // stats["backward_passes"]

    def _compare(self, ddp_model: DistributedDataParallel, measured: Measured) -> None:
        """Run a step in which every rank's gradients are `local`, and compare their average with that of plain
        all-reduce. `batch_fn` may return another batch in every step."""
        replaced = [
            parameter.register_hook(lambda grad, own=own: own.to(grad.device))
            for parameter, own in zip(ddp_model.module.parameters(), self.local, strict=True)
            if own is not None
        ]
        self._step(ddp_model, measured)
        for each in replaced:
            each.remove()
        if measured.candidate == ALLREDUCE:
            self._mean = gradients_of(ddp_model.module)
        if measured.candidate != NOOP:
            norm = _norm(self._mean)
            error = norm and _norm(gradients_of(ddp_model.module), self._mean) / norm
            measured.error = max(self._all_ranks(error))

    def _step(self, ddp_model: DistributedDataParallel, measured: Measured) -> float:
        """Run a step; returns its time in ms."""
        device = next(p.device for p in ddp_model.parameters() if p.requires_grad)
        ddp_model.zero_grad(set_to_none=True)
        self._all_ranks(0.0)  # a common start
        passed = max(self._all_ranks(seconds_of(lambda: self.batch_fn(ddp_model).backward(), device)))
        measured.spent_s += passed
        return 1000 * passed

    def _all_ranks(self, own: float) -> list[float]:
        device = next(p.device for p in self.ddp_model.parameters() if p.requires_grad)
        row = torch.tensor([own], dtype=torch.float64, device=device)
        rows: list[float] = (
            gather_rows(row, self.ddp_model.process_group, None, "the time of a step").flatten().tolist()
        )
        return rows


def _norm(gradients: Gradients, without: Gradients = ()) -> float:
    """The norm of all gradients together, or of their difference to those of `without`."""
    squares = 0.0
    for own, other in itertools.zip_longest(gradients, without):
        if own is not None:
            difference = own if other is None else own - other
            squares += float(torch.linalg.vector_norm(difference.to_dense().abs(), dtype=torch.float64)) ** 2
    return squares**0.5
