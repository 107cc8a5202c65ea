"""`FunctionHook`: a user's function as a `Hook`."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from commhooks.checkpoint.user_state import UserStateCheckpointer
from commhooks.comm.counters import Counters
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.engine.consensus import Binding
from commhooks.engine.session import SessionState
from commhooks.errors import HookConfigError
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import Future, GradientSource, PassListener
from commhooks.gradients.user_future import checked_future
from commhooks.hook import compressor_hook
from commhooks.hook.kinds import Prepared
from commhooks.hook.protocol import Residuals
from commhooks.plan import ModelPlan
from commhooks.report import Status, Summary
from commhooks.request import HookRequest, why_not_called


def prepare(
    request: HookRequest, source: GradientSource, binding: Binding, total_steps: int | None
) -> Prepared:
    state, function = _users_function(request, source)
    if not isinstance(state, SessionState):
        return Prepared(None, lambda choice: FunctionHook(request, source, state, function), state)
    assert source.module is not None
    session = state.bind(binding, source.module, function)
    run = functools.partial(_run, function, state, request.name)
    return Prepared(
        session.compressor,
        functools.partial(compressor_hook.build, request, source, session, run),
        state,
    )


def _users_function(request: HookRequest, source: GradientSource) -> tuple[Any, Callable[..., Any]]:
    if not source.from_ddp:
        raise HookConfigError(
            f"hook {request.name!r} is a function of a GradBucket, which only"
            " DistributedDataParallel has: for a model sharded by fully_shard take a built-in hook"
            " by its name or config, or write a commhooks.Compressor"
        )
    state, function = request.build(source.group)
    if reason := why_not_called(function, None, None):
        raise HookConfigError(
            f"hook {request.name!r} cannot be called as hook(state, bucket): {reason}. A hook takes"
            " its state and a GradBucket"
        )
    if request.wrapper is None:
        return state, function
    from commhooks.ddp_comm_hooks import default_hooks

    wrap = {
        "fp16": default_hooks.fp16_compress_wrapper,
        "bf16": default_hooks.bf16_compress_wrapper,
    }
    return state, wrap[request.wrapper](function)


def _run(function: Callable[..., Any], state: Any, name: str, bucket: Bucket) -> Future:
    return checked_future(function(state, bucket.grad_bucket), name)


class FunctionHook:
    """Calls a user's function `(state, bucket) -> Future`. Its traffic is unknown."""

    members = None

    def __init__(
        self, request: HookRequest, source: GradientSource, state: Any, function: Callable[..., Any]
    ) -> None:
        self.counters = Counters()
        self.state = state
        self.checkpointer = UserStateCheckpointer(
            request.name, dict(request.options), self.counters, source.group, state
        )
        self._request = request
        self._source = source
        self._function = function

    def run(self, bucket: Bucket) -> Future:
        if bucket.is_first:
            self.counters.begin_pass()
        self.counters.bytes_uncompressed += bucket.nbytes
        return _run(self._function, self.state, self._request.name, bucket)

    def end_pass(self) -> None:
        return None

    def listeners(self, *, logs: bool) -> list[PassListener]:
        return []

    def status(self) -> Status:
        return Status(dict(self._request.options))

    def stats(self) -> dict[str, Any]:
        return {"step": self.checkpointer.step}

    def summary(self) -> Summary:
        return Summary()

    def warnings(self) -> list[str]:
        if (
            self.state is None
            or isinstance(self.state, dist.ProcessGroup)
            or self.checkpointer.saves_state
        ):
            return []
        return [
            f"the state of hook {self._request.name} ({type(self.state).__name__}) has no"
            " state_dict and load_state_dict: checkpoints do not hold it."
        ]

    def plan(self) -> ModelPlan:
        hook = self._request.name
        wire = self._request.wire_dtype
        rows = tuple(
            UnitPlan.uncompressed(ParameterInfo(name, parameter), f"hook {hook}")
            for name, parameter in self._source.names.named_parameters().items()
        )
        narrowed = [row for row in rows if row.wire_itemsize(wire) < row.wire_itemsize(None)]
        packed = sum(row.numel_sent * row.wire_itemsize(wire) for row in narrowed)
        memory = MemoryPlan(packed=packed)
        return ModelPlan(hook, rows, wire, selective=False, memory=memory, sends=None)

    @contextlib.contextmanager
    def residuals(self) -> Iterator[Residuals]:
        yield Residuals({}, 1.0, self._source.names.named_parameters())

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        return True

    def close(self) -> None:
        return None
