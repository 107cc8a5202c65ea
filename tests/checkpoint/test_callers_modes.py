"""A hook is attached, loaded, saved and called in whatever mode the caller is, and trains on as
without the mode.
"""

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
    """Algorithms that are deterministic, in which `torch.empty` returns NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Mode] = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    "float64 by default": functools.partial(_default_dtype, torch.float64),
    "float16 by default": functools.partial(_default_dtype, torch.float16),
    "meta device by default": functools.partial(torch.device, "meta"),
    "deterministic": _deterministic,
}
HANDLING = {"attach", "read", "load", "save", "close"}
"""What a caller may do in a mode, besides training."""


class Caller:
    """Does some things in a mode. `within`: the names of these things."""

    def __init__(self, mode: Mode = contextlib.nullcontext, within: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self._mode, self._within = mode, within

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
        self.caller, self.step = caller, 0 if saved is None else saved["step"]
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
            with self.caller.doing("optimizer step"):
                self.optimizer.step()
            self.step += 1

    def save(self, residual: str) -> dict[str, Any]:
        with self.caller.doing("save"):
            hook = self.hook.state_dict(residual)
        model, optimizer = self.ddp.module.state_dict(), self.optimizer.state_dict()
        return {
            "model": copy.deepcopy(model),
            "optimizer": copy.deepcopy(optimizer),
            "hook": hook,
            "step": self.step,
        }


def _handled(attach: Attach, caller: Caller, saved: dict[str, Any]) -> list[torch.Tensor]:
    """The weights after each part of a run that is resumed, saved in all ways, trained on, and
    resumed again.
    """
    run = Run(attach, caller, saved)
    run.train(3)
    with caller.doing("save"):
        run.hook.stats(), run.hook.plan(), run.hook.norms(), run.hook.synchronize(optimizers=True)
    weights = [flat(run.ddp.parameters())]
    run.save("per_rank")
    for residual in ("mean", "distributed"):
        again = run.save(residual)
        tensors = [
            each
            for entry in again["hook"].get("parameters", {}).values()
            for each in entry.values()
        ]
        assert not any(each.is_inference() for each in tensors if isinstance(each, torch.Tensor))
        run.train(1)
        weights.append(flat(run.ddp.parameters()))
        with caller.doing("close"):
            run.hook.close()
        run = Run(attach, caller, again)
        run.train(3)
        weights.append(flat(run.ddp.parameters()))
    return weights


def _differing(attach: Attach, cases: dict[str, Caller]) -> list[str]:
    """The names of the cases that train otherwise than without a mode."""
    begun = Run(attach, Caller())
    begun.train(5)
    saved = begun.save("per_rank")
    expected = _handled(attach, Caller(), saved)
    found = {name: _handled(attach, caller, saved) for name, caller in cases.items()}
    return [name for name, weights in found.items() if not all(map(torch.equal, weights, expected))]


class _UsersState:
    """The mean over the ranks with a momentum, as an example of a user's state."""

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
    # A step in some of these modes is another step without a hook, too.
    cases |= {
        f"steps in {mode}": Caller(MODES[mode], {"backward"})
        for mode in ("inference mode", "deterministic")
    }
    cases["optimizer in autocast"] = Caller(MODES["autocast"], {"optimizer step"})
    return _differing(ATTACH[name], cases)


@pytest.mark.parametrize("name", ATTACH)
def test_a_hook_that_is_handled_in_a_mode_trains_on_as_without_it(
    run_ranks: Any, name: str
) -> None:
    assert run_ranks(_in_every_mode, name) == [[], []]


# ---- other ways in
# --------------------------------------------------------------------------------------------------


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


def test_a_pickled_state_that_is_read_in_a_mode_trains_on(run_ranks: Any) -> None:
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
    modes = {name: mode for name, mode in MODES.items() if name != "meta device by default"}
    within = {"inference mode": {"save", "load"}}
    found = {
        n: _sharded(Caller(mode, within.get(n, HANDLING)), hook, options)
        for n, mode in modes.items()
    }
    return [name for name, gradients in found.items() if not torch.equal(gradients, expected)]


@pytest.mark.parametrize(("hook", "options"), [("powerSGD", POWERSGD), ("int4", {"start_iter": 1})])
def test_a_sharded_model_is_handled_in_a_mode(
    run_ranks: Any, hook: str, options: dict[str, Any]
) -> None:
    assert run_ranks(_sharded_in_every_mode, hook, options) == [[], []]
