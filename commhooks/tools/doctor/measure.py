"""The doctor's measurements: training steps of temporary copies of the model with one hook each, in turns."""

import gc
import statistics
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks.comm.collective import gather_rows
from commhooks.comm.link import seconds_of, synchronize
from commhooks.compressors.candidates import Candidate
from commhooks.compressors.kernel import TORCH
from commhooks.compressors.registry import COMPRESSORS
from commhooks.errors import AttachError, HookConfigError
from commhooks.hook.attach import attach
from commhooks.hook.comm_hook import CommHook
from commhooks.tools.doctor.check import BatchFn
from commhooks.tools.doctor.copies import copy_of

ROUNDS = 3
# After the first backward pass DDP rebuilds its buckets; in the second pass the hook allocates buffers for these.
_WARM_UP = 2


@dataclass
class Measured:
    """The measurements of one candidate, equal on every rank.

    Attributes:
        step_ms: per measured step: time of forward, backward and communication, from a common start to the end of the
            slowest rank.
        codec_ms: per step: time inside the hook on the slowest rank; empty on accelerators other than CUDA, where the
            host only queues the work.
        waiting_ms: per step: waiting time for collectives on the rank that waits least, because the other ranks also
            wait for that rank and not only for the network. Empty if `codec_ms` is.
        bytes_sent: mean bytes per step passed to collectives.
        bytes_uncompressed: bytes per step that DDP without a hook passes to all-reduce.
        collectives: number of collectives per step.
        compressed_steps: number of measured steps in which the hook compressed.
        kernel: name of the kernel with which the hook computed.
    """

    candidate: Candidate
    step_ms: list[float] = field(default_factory=list)
    codec_ms: list[float] = field(default_factory=list)
    waiting_ms: list[float] = field(default_factory=list)
    bytes_sent: int = 0
    bytes_uncompressed: int = 0
    collectives: int = 0
    compressed_steps: int = 0
    kernel: str = TORCH.name
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
    `restore_random` gives every candidate the same batches."""

    ddp_model: DistributedDataParallel
    batch_fn: BatchFn
    restore_random: Callable[[], None]
    steps: int
    seconds: float
    progress: Callable[[str], None]

    def measure(self, candidates: Sequence[Candidate]) -> dict[str, Measured]:
        """Measure all candidates. All ranks must call this; all get the same result."""
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
        group = ddp_model.process_group
        try:
            hook = attach(ddp_model, candidate.hook, hook_options=options, process_group=group)
        except (HookConfigError, AttachError) as error:  # raised on all ranks
            self.progress(f"{candidate.label} cannot run here: {error}")
            measured.useless = True
            return
        plan = hook.plan()
        if plan.selective and plan.parameters and not plan.compressed:
            measured.useless = True
            return
        hook.quiet()
        for _ in range(_WARM_UP):
            if measured.spent_s < self.seconds / 5:
                self._step(ddp_model, hook, measured, counts=False)
        before = hook.stats()["compressed_steps"] or 0
        while len(measured.step_ms) < upto:
            self._step(ddp_model, hook, measured, counts=True)
            if measured.spent_s >= self.seconds:
                break
        stats = hook.stats()
        measured.kernel = stats["kernel"] or TORCH.name
        measured.compressed_steps += (stats["compressed_steps"] or 0) - before
        measured.bytes_sent = stats["bytes_sent"] // stats["backward_passes"]
        measured.collectives = stats["collectives_last_pass"]
        measured.bytes_uncompressed = stats["bytes_uncompressed"] // stats["backward_passes"]

    def _step(self, ddp_model: DistributedDataParallel, hook: CommHook, measured: Measured, *, counts: bool) -> None:
        group, device = ddp_model.process_group, next(p.device for p in ddp_model.parameters() if p.requires_grad)

        def all_ranks(*own: float) -> Any:
            row = torch.tensor(own, dtype=torch.float64, device=device)
            return gather_rows(row, group, None, "the time of a step").T.tolist()

        ddp_model.zero_grad(set_to_none=True)
        synchronize(device)
        all_ranks(0.0)  # a common start
        passed = seconds_of(lambda: self.batch_fn(ddp_model).backward(), device)
        stats = hook.stats()
        timed = stats["codec_s_last_pass"] is not None
        clocks = (stats["codec_s_last_pass"], stats["waiting_s_last_pass"]) if timed else (0.0, 0.0)
        step, codec, waiting = all_ranks(passed, *clocks)
        measured.spent_s += max(step)
        if counts:
            measured.step_ms.append(1000 * max(step))
        if counts and timed:
            measured.codec_ms.append(1000 * max(codec))
            measured.waiting_ms.append(1000 * min(waiting))
