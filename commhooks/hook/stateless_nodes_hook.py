"""A compressor without learned state between nodes: exchanges inside the nodes come before and after its own, so the
engine runs it, and the futures of all buckets complete together. What is saved is the same as without nodes."""

import dataclasses
from typing import Any

import torch.distributed as dist

from commhooks.comm.counters import Counters
from commhooks.compressors.base import Compressor
from commhooks.compressors.cast import Awaited
from commhooks.engine.arrangement import Flat
from commhooks.engine.kernel_choice import Choice
from commhooks.engine.session import Binding, Session
from commhooks.engine.state import LearnedState
from commhooks.gradients.bucket import Bucket
from commhooks.hook.plan import ModelPlan
from commhooks.hook.plan_model import parameter_infos
from commhooks.hook.runner import Future
from commhooks.hook.stateless_hook import StatelessHook


class StatelessNodesHook(StatelessHook):
    """
    Args:
        name: name of the hook.
        compressor: a compressor that is not transactional.
        binding: the model that it is attached to.
        group, sparse: as for `StatelessHook`.
    """

    def __init__(
        self,
        name: str,
        compressor: Compressor[Any],
        binding: Binding,
        group: dist.ProcessGroup,
        sparse: set[int],
    ) -> None:
        self._session = Session(Awaited(compressor), binding, LearnedState.of(()), Counters())
        super().__init__(name, compressor, binding.names, group, sparse, self._session.counters)

    def begin_pass(self) -> None:
        """The session counts the passes."""

    def run(self, bucket: Bucket, grad_bucket: dist.GradBucket | None) -> Future:
        return self._session.run(bucket)

    def end_pass(self) -> None:
        self._session.end_pass()

    def settle(self) -> None:
        self._session.settle()

    def compute_with(self, choice: Choice) -> None:
        super().compute_with(choice)
        self._session.compute_with(choice)

    def arrange(self, arrangement: Flat) -> None:
        self._session.arrange(arrangement)

    def plan(self) -> ModelPlan:
        arrangement, awaited = self._session.arrangement, self._session.compressor
        rows = awaited.plan(list(parameter_infos(self._names, awaited.config, self._sparse).values()))
        by_name = {row.name: row for row in rows}
        buckets = [[by_name[name] for name in bucket] for bucket in self._session.buckets()] or [rows]
        memory = arrangement.memory_plan(awaited, rows, buckets)
        return dataclasses.replace(super().plan(), memory=memory, arrangement=arrangement.words)

    def announcement(self, plan: ModelPlan) -> str:
        words = self._session.arrangement.words
        return f"{f' ({words})' if words else ''}{super().announcement(plan)}"
