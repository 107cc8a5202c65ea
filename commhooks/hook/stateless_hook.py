"""A compressor without learned state behind `CommHook`. Its hook calls return at once, unless ranks form nodes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.user_state import SavedUserState
from commhooks.comm.counters import Counters
from commhooks.compressors.base import Compressor
from commhooks.compressors.units import Unit
from commhooks.engine.arrangement import Flat
from commhooks.engine.at_once import reduce_at_once, run_with_clocks
from commhooks.engine.awaited import Awaited
from commhooks.engine.kernel_choice import Choice, Offer
from commhooks.engine.session import Binding, Session
from commhooks.engine.state import LearnedState
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.names import ParameterNames
from commhooks.gradients.process_group import held_weakly
from commhooks.hook.plan import ModelPlan
from commhooks.hook.plan_model import parameter_infos, whole_plan
from commhooks.hook.runner import Future, Runner, several_devices


class StatelessHook(Runner):
    """A hook whose calls return at once.

    Args:
        name: name of the hook.
        compressor: a compressor that is not transactional.
        names: names of the model's parameters.
        group: the process group of the hook.
        sparse: ids of the parameters whose gradients are sparse.
        one_device: whether all parameters must be on the same one, as between nodes.
    """

    def __init__(
        self,
        name: str,
        compressor: Compressor[Any],
        names: ParameterNames,
        group: dist.ProcessGroup,
        sparse: set[int],
        *,
        one_device: bool = False,
    ) -> None:
        self.counters = Counters()
        sends = compressor.config.sends
        self.saved_state = SavedUserState(name, self.options_of(compressor), self.counters, group, replicas_equal=sends)
        self._name = name
        self._compressor = compressor
        self._names = names
        self._group = held_weakly(group)
        self._sparse = sparse
        self._one_device = one_device

    def begin_pass(self) -> None:
        self.counters.begin_pass()

    def run(self, bucket: Bucket, grad_bucket: dist.GradBucket | None) -> Future:
        counters = self.counters
        counters.bytes_uncompressed += bucket.numel_here * bucket.flat.element_size()
        return run_with_clocks(
            lambda: reduce_at_once(self._compressor, bucket, self._group(), counters), bucket.flat.device, counters
        )

    @property
    def options(self) -> dict[str, Any]:
        return self.options_of(self._compressor)

    @staticmethod
    def options_of(compressor: Compressor[Any]) -> dict[str, Any]:
        return dataclasses.asdict(compressor.config)

    def plan(self) -> ModelPlan:
        infos = parameter_infos(self._names, self._compressor.config, self._sparse)
        return whole_plan(self._name, self._compressor, self._compressor.plan(list(infos.values())))

    def offer(self, parameters: Mapping[str, torch.Tensor]) -> Offer:
        problem = several_devices(parameters, self._compressor) if self._one_device else ""
        return Offer(cannot=f"{problem}, without ranks_per_node" if problem else "")

    def arranged(self, arrangement: Flat) -> Runner:
        return StatelessNodesHook(self, arrangement)

    def remarks(self, *, checked: bool) -> list[str]:
        if self._compressor.config.sends or self._group().size() == 1:
            return []
        return [
            f"hook {self._name!r} averages nothing: every rank trains on its own data only, and the ranks drift apart. "
            "It is for measuring how long a step takes without a network; hook=None trains without a hook"
        ]

    def announcement(self, plan: ModelPlan) -> str:
        before, sent = self.counters.bytes_uncompressed, self.counters.last_pass.bytes_sent
        unit = Unit.of(before)
        return f": {unit.text(before)} -> {unit.text(sent)} per step and rank"


class StatelessNodesHook(StatelessHook):
    """The same between nodes. Exchanges inside the nodes come before and after its own, so the engine runs it, and the
    futures of all buckets complete together. What is saved is the same as without nodes.

    Args:
        flat: the hook as it would be without nodes, before its first backward pass.
        arrangement: the nodes.
    """

    def __init__(self, flat: StatelessHook, arrangement: Flat) -> None:
        super().__init__(flat._name, flat._compressor, flat._names, flat._group(), flat._sparse)
        binding = Binding(flat._names, flat._group)
        self._session = Session(Awaited(flat._compressor), binding, LearnedState.of(()), self.counters)
        self._session.arrange(arrangement)
        self.compute_with(flat.choice)

    def begin_pass(self) -> None:
        """The session counts the passes."""

    def run(self, bucket: Bucket, grad_bucket: dist.GradBucket | None) -> Future:
        return self._session.run(bucket)

    def end_pass(self) -> None:
        self._session.end_pass()

    def close(self) -> None:
        self._session.close()

    def settle(self) -> None:
        self._session.settle()

    def compute_with(self, choice: Choice) -> None:
        super().compute_with(choice)
        self._session.compute_with(choice)

    def plan(self) -> ModelPlan:
        arrangement, awaited = self._session.arrangement, self._session.compressor
        rows = awaited.plan(list(parameter_infos(self._names, awaited.config, self._sparse).values()))
        by_name = {row.name: row for row in rows}
        buckets = [[by_name[name] for name in bucket] for bucket in self._session.buckets()] or [rows]
        memory = arrangement.memory_plan(awaited, rows, buckets)
        return dataclasses.replace(super().plan(), memory=memory, arrangement=arrangement.words)

    def announcement(self, plan: ModelPlan) -> str:
        return f" ({self._session.arrangement.words}){super().announcement(plan)}"
