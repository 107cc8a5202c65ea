"""A user's function `(state, bucket) -> Future` behind `CommHook`; its traffic is unknown."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commhooks.checkpoint.user_state import SavedUserState
from commhooks.comm.counters import Counters
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.ddp_comm_hooks.default_hooks import checked_future
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import Future, GradientSource
from commhooks.hook.model_plan import ModelPlan
from commhooks.hook.runner import Runner
from commhooks.request import HookRequest


class UserHook(Runner):
    """`state`, `function`: the hook is called as `function(state, grad_bucket)`."""

    counts_bytes = False

    def __init__(self, request: HookRequest, source: GradientSource, state: Any, function: Callable[..., Any]) -> None:
        counters = Counters()
        saved_state = SavedUserState(request.name, dict(request.options), counters, source.group, state)
        super().__init__(request, source, counters, saved_state)
        self._saves_state = saved_state.saves_state
        self._state = state
        self._function = function

    def run(self, bucket: Bucket) -> Future:
        if bucket.is_first:
            self.counters.begin_pass()
        self.counters.bytes_uncompressed += bucket.nbytes
        return checked_future(self._function(self._state, bucket.grad_bucket), self._request.name)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self._request.options)

    def plan(self) -> ModelPlan:
        name, wire = self._request.name, self._request.wire_dtype
        infos = [ParameterInfo(each, parameter) for each, parameter in self._source.names.known().items()]
        rows = tuple(UnitPlan.uncompressed(info, f"hook {name}") for info in infos)
        narrowed = [row for row in rows if row.wire_itemsize(wire) < row.wire_itemsize(None)]
        memory = MemoryPlan(packed=sum(row.numel_sent * row.wire_itemsize(wire) for row in narrowed))
        return ModelPlan(name, rows, wire, selective=False, memory=memory, sends=None)

    def problems(self) -> list[str]:
        if self._state is None or isinstance(self._state, dist.ProcessGroup) or self._saves_state:
            return []
        return [
            f"the state of hook {self._request.name} ({type(self._state).__name__}) has no state_dict and "
            "load_state_dict: checkpoints do not hold it."
        ]
