"""A hook that is attached, saved or loaded in any of torch's modes trains as without the mode."""

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import PowerSGDState
from tests.support.kernels import computing_with
from tests.support.kinds import KINDS, POWERSGD, Kind
from tests.support.sharded import attached, backward, random_gradients
from tests.support.training import SEVERAL_BUCKETS_MB, batch, flat, make_model

Mode = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Context manager: deterministic algorithms, with which `torch.empty` returns NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
wide_by_default = functools.partial(_default_dtype, torch.float64)
narrow_by_default = functools.partial(_default_dtype, torch.float16)
meta_by_default = functools.partial(torch.device, "meta")


def _all_of(*modes: Mode) -> Mode:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            yield

    return entered


# Several modes at once, because none hides what another does to a hook.
MODES: dict[str, Mode] = {
    "inference mode, autocast, float64 by default, deterministic": _all_of(
        torch.inference_mode, autocast, wide_by_default, _deterministic
    ),
    "no_grad, float16 and meta device by default": _all_of(
        torch.no_grad, narrow_by_default, meta_by_default
    ),
}
HANDLING = {"attach", "read", "load", "save", "close"}
"""What a caller may do in a mode, besides training."""


class Caller:
    """Enters a mode to do some things, whose names are in `within`."""

    def __init__(self, mode: Mode = contextlib.nullcontext, within: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self._mode = mode
        self._within = within

    def doing(self, name: str) -> contextlib.AbstractContextManager[object]:
        return self._mode() if name in self._within else contextlib.nullcontext()

    def read(self, saved: dict[str, Any]) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(saved, file)
        with self.doing("read"):
            return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


Attach = Callable[[DistributedDataParallel], commhooks.CommHook]


class Run:
    """A model whose hook resumes from `saved`, or begins without it."""

    def __init__(self, attach: Attach, caller: Caller, saved: dict[str, Any] | None = None) -> None:
        self.caller = caller
        self.step = 0 if saved is None else saved["step"]
        self.ddp = DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)
        with caller.doing("attach"):
            self.hook = attach(self.ddp)
        if saved is not None:
            self.ddp.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            content = caller.read(saved["hook"])
            with caller.doing("load"):
                self.hook.load_state_dict(content)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            images, labels = batch(self.step, dist.get_rank())
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.ddp(images), labels)
            with self.caller.doing("backward"):
                loss.backward()
            self.optimizer.step()
            self.step += 1

    def save(self, residual: str) -> dict[str, Any]:
        with self.caller.doing("save"):
            hook = self.hook.state_dict(residual)
        return {
            "model": copy.deepcopy(self.ddp.module.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "hook": hook,
            "step": self.step,
        }


def _handled(attach: Attach, caller: Caller, saved: dict[str, Any]) -> list[torch.Tensor]:
    """Resume, save in all ways, train on and resume again; return the weights after each part."""
    run = Run(attach, caller, saved)
    run.train(3)
    with caller.doing("save"):
        for read in (run.hook.stats, run.hook.plan, run.hook.norms):
            read()
        run.hook.synchronize(optimizers=True)
    weights = [flat(run.ddp.parameters())]
    run.save("per_rank")
    for residual in ("mean", "distributed"):
        again = run.save(residual)
        for entry in again["hook"].get("parameters", {}).values():
            tensors = [value for value in entry.values() if isinstance(value, torch.Tensor)]
            assert not any(tensor.is_inference() for tensor in tensors)
        run.train(1)
        weights.append(flat(run.ddp.parameters()))
        with caller.doing("close"):
            run.hook.close()
        run = Run(attach, caller, again)
        run.train(3)
        weights.append(flat(run.ddp.parameters()))
    return weights


def _differing(attach: Attach, cases: dict[str, Caller]) -> list[str]:
    """Return the names of the cases that train otherwise than without a mode."""
    begun = Run(attach, Caller())
    begun.train(5)
    saved = begun.save("per_rank")
    expected = _handled(attach, Caller(), saved)
    return [
        name
        for name, caller in cases.items()
        if not all(map(torch.equal, _handled(attach, caller, saved), expected))
    ]


class _UsersState:
    """A user's state: the momentum of the mean over the ranks."""

    def __init__(self) -> None:
        self.momentum = torch.zeros(1)

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.momentum.mul_(0.9).add_(bucket.buffer()[:1])
        bucket.buffer()[:1].copy_(self.momentum)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.momentum = saved["momentum"].clone()


def _attach_kind(kind: Kind, ddp: DistributedDataParallel) -> commhooks.CommHook:
    with computing_with(kind.kernel):
        return commhooks.attach(
            ddp, kind.hook, hook_options=kind.options or None, wrapper=kind.wrapper
        )


def _attach_users(ddp: DistributedDataParallel) -> commhooks.CommHook:
    state = _UsersState()
    return commhooks.attach(ddp, state.__call__, hook_state=state)


ATTACH: dict[str, Attach] = {
    **{
        name: functools.partial(_attach_kind, KINDS[name])
        for name in ("powerSGD", "int4, torch", "batched", "random_k", "auto, chooses powerSGD")
    },
    "diloco with delay": functools.partial(
        _attach_kind,
        Kind("diloco", {"sync_every": 4, "fragments": 2, "delay": 1, "outer_momentum": 0.5}),
    ),
    "a user's function": _attach_users,
}


def _in_every_mode(name: str) -> list[str]:
    cases = {mode: Caller(MODES[mode], HANDLING) for mode in MODES}
    # Under autocast a step is another step without a hook, too: test_precision.py.
    steps = _all_of(torch.inference_mode, _deterministic)
    cases["backward in inference mode, deterministic"] = Caller(steps, {"backward"})
    return _differing(ATTACH[name], cases)


@pytest.mark.parametrize("name", ATTACH)
def test_a_hook_that_is_handled_in_a_mode_trains_as_without_it(run_ranks: Any, name: str) -> None:
    assert run_ranks(_in_every_mode, name) == [[], []]


# ---- pickled states, sharded models


def _pickled(caller: Caller) -> torch.Tensor:
    def run(state: PowerSGDState) -> DistributedDataParallel:
        ddp = DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
        ddp.register_comm_hook(state, commhooks.powerSGD_hook)
        for step in range(4):
            images, labels = batch(step, dist.get_rank())
            torch.nn.functional.cross_entropy(ddp(images), labels).backward()
        return ddp

    state = PowerSGDState(None, **POWERSGD)
    run(state)
    with caller.doing("read"):
        again: PowerSGDState = pickle.loads(pickle.dumps(state))
    return flat(parameter.grad for parameter in run(again).parameters())


def _pickled_in_every_mode() -> list[str]:
    expected = _pickled(Caller())
    return [
        name
        for name, mode in MODES.items()
        if not torch.equal(_pickled(Caller(mode, {"read"})), expected)
    ]


def test_a_pickled_state_that_is_read_in_a_mode_trains_as_without_it(run_ranks: Any) -> None:
    assert run_ranks(_pickled_in_every_mode) == [[], []]


def _sharded(caller: Caller, hook: str, options: dict[str, Any]) -> torch.Tensor:
    def new() -> tuple[torch.nn.Module, commhooks.CommHook]:
        with caller.doing("attach"):
            return attached(2, 1, hook, torch.float32, hook_options=options)

    model, one = new()
    for step in range(4):
        backward(model, random_gradients(step, dtype=torch.float32))
    with caller.doing("save"):
        saved = one.state_dict()
    model, other = new()
    with caller.doing("load"):
        other.load_state_dict(saved)
    for step in range(3):
        gradients = backward(model, random_gradients(step, dtype=torch.float32))
    return flat(gradients.values())


def _sharded_in_every_mode(hook: str, options: dict[str, Any]) -> list[str]:
    expected = _sharded(Caller(), hook, options)
    # fully_shard itself needs parameters that are made outside of inference mode and on their
    # device.
    wide = _all_of(autocast, wide_by_default, _deterministic)
    cases = {
        "inference mode": Caller(torch.inference_mode, {"save", "load"}),
        "autocast, float64 by default, deterministic": Caller(wide, HANDLING),
        "no_grad, float16 by default": Caller(_all_of(torch.no_grad, narrow_by_default), HANDLING),
    }
    return [
        name
        for name, caller in cases.items()
        if not torch.equal(_sharded(caller, hook, options), expected)
    ]


@pytest.mark.parametrize(("hook", "options"), [("powerSGD", POWERSGD), ("int4", {"start_iter": 1})])
def test_the_hook_of_a_sharded_model_that_is_handled_in_a_mode_trains_as_without_it(
    run_ranks: Any, hook: str, options: dict[str, Any]
) -> None:
    assert run_ranks(_sharded_in_every_mode, hook, options) == [[], []]
