"""`FunctionHook`: a user's function as a `Hook`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from commhooks.checkpoint.user_state import UserStateCheckpointer
from commhooks.comm.counters import Counters
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.ddp_comm_hooks.default_hooks import checked_future
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import Future, GradientSource
from commhooks.hook.protocol import Residuals
from commhooks.plan import ModelPlan
from commhooks.report import Status, Summary
from commhooks.request import HookRequest


class FunctionHook:
    """Calls a user's function `(state, bucket) -> Future`. Its traffic is unknown."""

    def __init__(self, request: HookRequest, source: GradientSource, state: Any, function: Callable[..., Any]) -> None:
        self.counters = Counters()
        self.state = state
        self.checkpointer = UserStateCheckpointer(
            request.name, dict(request.options), self.counters, source.group, state
        )
        self._request, self._source, self._function = request, source, function

    def run(self, bucket: Bucket) -> Future:
        if bucket.is_first:
            self.counters.begin_pass()
        self.counters.bytes_uncompressed += bucket.nbytes
        return checked_future(self._function(self.state, bucket.grad_bucket), self._request.name)

    def end_pass(self) -> None:
        return None

    def status(self) -> Status:
        return Status(dict(self._request.options))

    def stats(self) -> dict[str, Any]:
        return {"step": self.checkpointer.step}

    def summary(self) -> Summary:
        return Summary()

    def warnings(self) -> list[str]:
        if self.state is None or isinstance(self.state, dist.ProcessGroup) or self.checkpointer.saves_state:
            return []
        return [
            f"the state of hook {self._request.name} ({type(self.state).__name__}) has no state_dict and "
            "load_state_dict: checkpoints do not hold it."
        ]

    def plan(self) -> ModelPlan:
        name, wire = self._request.name, self._request.wire_dtype
        infos = [ParameterInfo(each, parameter) for each, parameter in self._source.names.named_parameters().items()]
        rows = tuple(UnitPlan.uncompressed(info, f"hook {name}") for info in infos)
        narrowed = [row for row in rows if row.wire_itemsize(wire) < row.wire_itemsize(None)]
        memory = MemoryPlan(packed=sum(row.numel_sent * row.wire_itemsize(wire) for row in narrowed))
        return ModelPlan(name, rows, wire, selective=False, memory=memory, sends=None)

    @contextlib.contextmanager
    def residuals(self) -> Iterator[Residuals]:
        yield Residuals({}, 1.0, self._source.names.named_parameters())

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        return True

    def close(self) -> None:
        return None
