"""A compressor without learned state behind `CommHook`: its hook calls return at once."""

import dataclasses
from typing import Any

import torch.distributed as dist

from commhooks.checkpoint.user_state import SavedUserState
from commhooks.comm.counters import Counters
from commhooks.compressors.base import Compressor
from commhooks.engine.at_once import reduce_at_once, run_with_clocks
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.names import ParameterNames
from commhooks.hook.plan import ModelPlan
from commhooks.hook.plan_model import parameter_infos, whole_plan
from commhooks.hook.runner import Future, Runner


class StatelessHook(Runner):
    """
    Args:
        name: name of the hook.
        compressor: a compressor that is not transactional.
        names: names of the model's parameters.
        group: the process group of the hook.
        sparse: ids of the parameters whose gradients are sparse.
        counters: to count with; None: new ones.
    """

    def __init__(
        self,
        name: str,
        compressor: Compressor[Any],
        names: ParameterNames,
        group: dist.ProcessGroup,
        sparse: set[int],
        counters: Counters | None = None,
    ) -> None:
        self.counters = Counters() if counters is None else counters
        sends = compressor.config.sends
        self.saved_state = SavedUserState(name, self.options_of(compressor), self.counters, group, replicas_equal=sends)
        self._name = name
        self._compressor = compressor
        self._names = names
        self._group = group
        self._sparse = sparse

    def begin_pass(self) -> None:
        self.counters.begin_pass()

    def run(self, bucket: Bucket, grad_bucket: dist.GradBucket | None) -> Future:
        counters = self.counters
        counters.bytes_uncompressed += bucket.numel_here * bucket.flat.element_size()
        return run_with_clocks(
            lambda: reduce_at_once(self._compressor, bucket, self._group, counters), bucket.flat.device, counters
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

    def remarks(self, *, checked: bool) -> list[str]:
        if self._compressor.config.sends or self._group.size() == 1:
            return []
        return [
            f"hook {self._name!r} averages nothing: every rank trains on its own data only, and the ranks drift apart. "
            "It is for measuring how long a step takes without a network; hook=None trains without a hook"
        ]

    def announcement(self, plan: ModelPlan) -> str:
        before, sent = self.counters.bytes_uncompressed, self.counters.last_pass.bytes_sent
        return f": {before / 1e6:.3f} MB -> {sent / 1e6:.3f} MB per step and rank"
