"""Any number of ranks in one process: collectives are computed as local sums. Needs neither a process group nor DDP."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from commhooks import PowerSGD
from commhooks.comm.collectives import Send
from commhooks.compressors.base import Compressor, StepInfo, Verdict
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.powersgd.exchange import draw
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.engine.state import LearnedState
from commhooks.engine.task import Done, new_task
from commhooks.errors import HookRunError
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, read_layout
from commhooks.gradients.names import ModelNames
from tests.support.kernels import use_own_kernel


class SimulatedRanks:
    """`world_size` ranks that reduce one bucket, each with its own learned state. They compute with the preferred
    kernel of this machine. Compressors without learned state are simulated, too.

    Args:
        new_compressor: makes a compressor; called once per rank, and must use equal options.
        parameters: name -> parameter, in the order of the bucket. Only shapes, strides, dtype and device are read.

    Attributes:
        states: the learned state of each rank.
        bytes_sent: bytes that each rank has sent so far, as `Counters` counts them.
    """

    def __init__(
        self, new_compressor: Callable[[], Compressor[Any]], world_size: int, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._compressors = [new_compressor() for _ in range(world_size)]
        first = next(iter(parameters.values()))
        for each in self._compressors:
            use_own_kernel(each, first.device, {p.dtype for p in parameters.values()})
        numel = sum(p.numel() for p in parameters.values())
        empty = torch.empty(numel, dtype=first.dtype, device=first.device)
        self.layout: BucketLayout = read_layout(empty, list(parameters.values()), list(parameters))
        first_one, names = self._compressors[0], ModelNames(parameters.items())
        config = first_one.config
        infos = [ParameterInfo.of(name, parameter, names, config) for name, parameter in parameters.items()]
        self.plans: list[UnitPlan] = first_one.plan(infos)
        self._compresses = not first_one.transactional or any(plan.compressed for plan in self.plans)
        self._works = [
            each.workspace(self.layout, self.plans) if self._compresses else None for each in self._compressors
        ]
        self.states = [LearnedState.of(each.state_fields) for each in self._compressors]
        self.bytes_sent = 0

    def step(self, buckets: Sequence[torch.Tensor]) -> bool:
        """Reduce one flat bucket (1-D) per rank in place. Returns whether the step was committed; True for a compressor
        without learned state, which averages non-finite values, too."""
        with precision.full_precision():
            tasks = [
                new_task(compressor, self._compresses, flat, work, state, StepInfo(state.step, len(buckets), rank=rank))
                for rank, (compressor, flat, work, state) in enumerate(
                    zip(self._compressors, buckets, self._works, self.states, strict=True)
                )
            ]
            steps = [task.advance(None) for task in tasks]
            while isinstance(steps[0], Send):
                sends = [each for each in steps if isinstance(each, Send)]
                self.bytes_sent += sends[0].counted_bytes(len(sends))
                answers = _reduce(sends)
                for send in sends:
                    if send.meanwhile is not None:
                        send.meanwhile()
                steps = [task.advance(answer) for task, answer in zip(tasks, answers, strict=True)]
            good = True
            if self._compressors[0].transactional:
                verdicts = {bool(each.finite) for each in steps if isinstance(each, Verdict)}
                if len(verdicts) > 1:
                    raise HookRunError(
                        "the ranks come to different verdicts: a Verdict must depend on reduced numbers only"
                    )
                good = verdicts.pop()
                steps = [task.advance(good) for task in tasks]
                for state in self.states:
                    state.step += good
                    state.nonfinite_steps += not good
            for flat, step in zip(buckets, steps, strict=True):
                if isinstance(step, Done) and step.result is not flat:
                    flat.copy_(step.result)
        return good


def _reduce(sends: Sequence[Send]) -> list[torch.Tensor]:
    """The results of one collective, one per rank."""
    stacked = torch.stack([each.tensor for each in sends])
    if sends[0].op == "gather":
        return [stacked for _ in sends]
    if sends[0].op == "all_to_all":
        return list(stacked.transpose(0, 1).contiguous())
    total = stacked.amax(0) if sends[0].op == "max" else stacked.sum(0)
    for each in sends:
        each.tensor.copy_(total)
    return [each.tensor for each in sends]


class SimulatedPowerSGD:
    """`world_size` ranks that compress one n x m matrix, each with its own learned state (`states`)."""

    def __init__(self, world_size: int, n: int, m: int, rank: int) -> None:
        config = PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=0, min_compression_rate=1e-3)
        parameters = {"w": torch.empty(n, m)}
        self._ranks = SimulatedRanks(lambda: PowerSGDCompressor(config), world_size, parameters)
        self._rank, self._m = rank, m
        self.states: list[LearnedState] = self._ranks.states

    @property
    def start_q(self) -> torch.Tensor:
        """The initial Q, m x r."""
        return draw(0, "w", "Q", self._rank, self._m, torch.float32).T

    def step(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run one step on an n x m gradient per rank, and return the gradient that each rank continues with."""
        buckets = [gradient.flatten().clone() for gradient in gradients]
        assert self._ranks.step(buckets)
        return [bucket.view_as(gradient) for bucket, gradient in zip(buckets, gradients, strict=True)]
