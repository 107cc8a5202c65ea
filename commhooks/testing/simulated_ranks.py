"""Any number of ranks in one process, with collectives that are sums of tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from commhooks.comm.collectives import Send
from commhooks.compressors.base import Compressor, StepInfo, Verdict
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.engine.state import LearnedState
from commhooks.engine.task import Done, new_task
from commhooks.errors import HookRunError
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, read_layout
from commhooks.gradients.names import ModelNames


class SimulatedRanks:
    """`world_size` ranks that reduce one bucket, each with its own learned state. Needs no process
    group.

    Args:
        new_compressor: makes the compressor of a rank; all must have equal options.
        parameters: by name, in the order of the bucket. Only shapes, strides, dtype and device are
            read.

    Attributes:
        layout, plans: of the bucket.
        states: the learned state of each rank.
        bytes_sent: bytes that each rank has sent so far, as `Counters` counts them.
    """

    def __init__(
        self,
        new_compressor: Callable[[], Compressor[Any]],
        world_size: int,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self._compressors = [new_compressor() for _ in range(world_size)]
        compressor = self._compressors[0]
        first = next(iter(parameters.values()))
        empty = torch.empty(
            sum(p.numel() for p in parameters.values()), dtype=first.dtype, device=first.device
        )
        self.layout: BucketLayout = read_layout(empty, list(parameters.values()), list(parameters))
        names = ModelNames(parameters.items())
        infos = [
            ParameterInfo.of(name, p, names, compressor.config) for name, p in parameters.items()
        ]
        self.plans: list[UnitPlan] = compressor.plan(infos)
        self._compresses = not compressor.transactional or any(
            plan.compressed for plan in self.plans
        )
        self._works = [
            c.workspace(self.layout, self.plans) if self._compresses else None
            for c in self._compressors
        ]
        self.states = [LearnedState.of(c.state_fields) for c in self._compressors]
        self.bytes_sent = 0

    def step(self, buckets: Sequence[torch.Tensor]) -> bool:
        """Reduce one flat bucket (1-D) per rank in place. Returns whether the step was committed;
        True for a compressor without learned state, which averages non-finite values, too.
        """
        ranks = zip(self._compressors, buckets, self._works, self.states, strict=True)
        with precision.full_precision():
            tasks = [
                new_task(
                    compressor,
                    self._compresses,
                    flat,
                    work,
                    state,
                    StepInfo(state.step, len(buckets), rank=rank),
                )
                for rank, (compressor, flat, work, state) in enumerate(ranks)
            ]
            steps = [task.advance(None) for task in tasks]
            while sends := [step for step in steps if isinstance(step, Send)]:
                self.bytes_sent += sends[0].counted_bytes(len(buckets))
                answers = _reduce(sends, len(buckets))
                for send in sends:
                    if send.meanwhile is not None:
                        send.meanwhile()
                steps = [task.advance(answer) for task, answer in zip(tasks, answers, strict=True)]
            good = True
            if self._compressors[0].transactional:
                verdicts = {bool(step.finite) for step in steps if isinstance(step, Verdict)}
                if len(verdicts) > 1:
                    raise HookRunError(
                        "the ranks come to different verdicts: a Verdict must depend on reduced"
                        " numbers"
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


def _reduce(sends: Sequence[Send], ranks: int) -> list[torch.Tensor]:
    """Return the results of one collective, one per rank."""
    kinds = {(send.op, tuple(send.tensor.shape), send.tensor.dtype, send.last) for send in sends}
    if len(kinds) > 1 or len(sends) < ranks:
        raise HookRunError(
            "the ranks do not send the same: op, shape, dtype and last must follow from plan and"
            " options"
        )
    stacked = torch.stack([send.tensor for send in sends])
    if sends[0].op == "gather":
        return [stacked for _ in sends]
    if sends[0].op == "all_to_all":
        return list(stacked.transpose(0, 1).contiguous())
    total = stacked.amax(0) if sends[0].op == "max" else stacked.sum(0)
    return [send.tensor.copy_(total) for send in sends]
