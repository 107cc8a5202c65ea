"""The exchange of a compressor without other ranks: every collective returns its own input, as if
all ranks had sent it. Nothing is sent, and no process group is needed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commhooks.comm.collectives import Send
from commhooks.compressors.base import Compressor, StepInfo, Verdict
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.engine.state import LearnedState
from commhooks.engine.task import Done, ExchangeTask, new_task
from commhooks.gradients import precision
from commhooks.gradients.layout import read_layout
from commhooks.gradients.names import ModelNames
from commhooks.local_steps.compressor import LocalStepsCompressor
from commhooks.local_steps.outer_step import ANCHOR
from tests.support.kernels import use_own_kernel


class LocalDriver:
    """Buckets of random gradients, with their own learned state. Computes with the preferred kernel
    of this machine.

    Args:
        buckets: name -> parameter for each bucket; only shapes, strides and dtypes of the
            parameters are read.
        world_size: the number of ranks that the compressor sees.

    Attributes:
        choice: the kernel, and why not a faster one.
    """

    def __init__(
        self,
        compressor: Compressor[Any],
        buckets: Sequence[Mapping[str, torch.Tensor]],
        device: torch.device,
        world_size: int = 1,
    ) -> None:
        self._compressor = compressor
        self._world_size = world_size
        self.choice = use_own_kernel(
            compressor, device, {p.dtype for bucket in buckets for p in bucket.values()}
        )
        self._state = LearnedState.of(compressor.state_fields)
        # None for a bucket of which nothing is compressed
        self._buckets: list[tuple[torch.Tensor, Any]] = []
        for named in buckets:
            parameters = list(named.values())
            names = ModelNames(named.items())
            dtype = parameters[0].dtype
            # weights are copied before they are exchanged, and begin from a common anchor
            if isinstance(compressor, LocalStepsCompressor):
                dtype = precision.compute_dtype(dtype)
                anchors = {
                    name: torch.zeros(p.numel(), dtype=dtype, device=device)
                    for name, p in named.items()
                }
                self._state[ANCHOR.key].update(anchors)
            flat = torch.empty(sum(p.numel() for p in parameters), dtype=dtype, device=device)
            layout = read_layout(flat, parameters, list(named))
            config = compressor.config
            plans = compressor.plan(
                [ParameterInfo.of(name, p, names, config) for name, p in named.items()]
            )
            compresses = not compressor.transactional or any(plan.compressed for plan in plans)
            self._buckets.append(
                (flat, compressor.workspace(layout, plans) if compresses else None)
            )

    def fill(self) -> None:
        """Fill the buckets with new random gradients."""
        for flat, _ in self._buckets:
            flat.normal_()

    def step(self) -> None:
        """Run one step over all buckets, one collective of each bucket after the other."""
        info = StepInfo(self._state.step, self._world_size)
        device = self._buckets[0][0].device
        with precision.full_precision():
            tasks = [
                new_task(self._compressor, work is not None, flat, work, self._state, info)
                for flat, work in self._buckets
            ]
            run_alone(tasks, device, self._world_size)
        self._state.step += 1


def run_alone(tasks: Sequence[ExchangeTask], device: torch.device, world_size: int = 1) -> None:
    """Run the exchanges of several buckets to their ends, one collective of each in turn."""
    answers: list[Any] = [None] * len(tasks)
    while tasks:
        steps = [(task, task.advance(answer)) for task, answer in zip(tasks, answers, strict=True)]
        tasks = [task for task, step in steps if not isinstance(step, Done)]
        answers = [
            _answer(step, device, world_size) for _, step in steps if not isinstance(step, Done)
        ]


def _answer(step: Send | Verdict, device: torch.device, world_size: int) -> Any:
    if isinstance(step, Verdict):
        return True if precision.is_host_readable(device) else step.finite
    if step.meanwhile is not None:
        step.meanwhile()
    return (
        step.tensor.expand(world_size, *step.tensor.shape) if step.op == "gather" else step.tensor
    )
