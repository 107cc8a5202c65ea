"""A user's function `(state, bucket) -> Future` behind `CommHook`; its traffic is unknown."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commhooks.checkpoint.user_state import SavedUserState
from commhooks.comm.counters import Counters
from commhooks.comm.hook_result import checked_future
from commhooks.comm.wire import dtype_name
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.names import ParameterNames
from commhooks.hook.model_plan import ModelPlan
from commhooks.hook.request import HookRequest
from commhooks.hook.runner import Future, Runner


class UserHook(Runner):
    """
    Args:
        request: the request for the hook.
        state, function: the hook is called as `function(state, grad_bucket)`.
        names: names of the model's parameters.
        group: the process group of the hook.
    """

    counts_bytes = False

    def __init__(
        self,
        request: HookRequest,
        state: Any,
        function: Callable[..., Any],
        names: ParameterNames,
        group: dist.ProcessGroup,
    ) -> None:
        self.counters = Counters()
        options = dict(request.options)
        self.saved_state: SavedUserState = SavedUserState(request.name, options, self.counters, group, state)
        self._request = request
        self._state = state
        self._function = function
        self._names = names

    def run(self, bucket: Bucket, grad_bucket: dist.GradBucket | None) -> Future:
        if bucket.is_first:
            self.counters.begin_pass()
        self.counters.bytes_uncompressed += bucket.numel_here * bucket.flat.element_size()
        return checked_future(self._function(self._state, grad_bucket), self._request.name)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self._request.options)

    def plan(self) -> ModelPlan:
        name = self._request.name
        infos = [ParameterInfo(each, parameter) for each, parameter in self._names.known().items()]
        rows = tuple(UnitPlan.uncompressed(info, f"hook {name}") for info in infos)
        wire = self._request.wire_dtype
        narrowed = [row for row in rows if row.wire_itemsize(wire) < row.wire_itemsize(None)]
        memory = MemoryPlan(packed=sum(row.numel_sent * row.wire_itemsize(wire) for row in narrowed))
        return ModelPlan(name, rows, wire, dtype_name(wire), selective=False, memory=memory, sends=None)

    def announcement(self, plan: ModelPlan) -> str:
        return ""

    def problems(self) -> list[str]:
        if self._state is None or isinstance(self._state, dist.ProcessGroup) or self.saved_state.saves_state:
            return []
        return [
            f"the state of hook {self._request.name} ({type(self._state).__name__}) has no state_dict and "
            "load_state_dict: checkpoints do not hold it."
        ]
