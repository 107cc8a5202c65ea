"""Hooks of the user's own: a callable, a dotted path, a registered name, one of our functions;
their states.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks import registry
from tests.support.ddp_steps import (
    backward,
    errors_of_means,
    log_lines,
    mlp,
    process_group_of_one,
    train,
    wrap,
)
from tests.support.training import Run, residuals


@pytest.fixture(autouse=True)
def no_registered_hooks_left() -> Iterator[None]:
    with mock.patch.dict(registry.FACTORIES, clear=True):
        yield


# ---- hooks ---------------------------------------------------------------------------------------


def scaled_average(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean times `state` (None: 1). Its annotations are text, which a bare `register_comm_hook`
    would refuse.
    """
    factor = 1.0 if state is None else float(state)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(
        lambda future: future.value()[0] * (factor / dist.get_world_size())
    )


class Hooks:
    """For a dotted path of two parts."""

    @staticmethod
    def doubled(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return scaled_average(2.0, bucket)


def scaled_factory(
    options: dict[str, Any], process_group: dist.ProcessGroup | None
) -> tuple[Any, Any]:
    """The mean times a factor."""
    assert isinstance(process_group, dist.ProcessGroup)
    return options.pop("factor", 1.0), scaled_average


# ---- three ways to it ----------------------------------------------------------------------------

WAYS: dict[str, tuple[Any, dict[str, Any], float, str]] = {
    "callable": (scaled_average, {"hook_state": 0.5}, 0.5, "scaled_average"),
    "dotted path": (
        "test_user_hooks:scaled_average",
        {"hook_state": 3},
        3.0,
        "test_user_hooks:scaled_average",
    ),
    "dotted path with a class": (
        "test_user_hooks:Hooks.doubled",
        {},
        2.0,
        "test_user_hooks:Hooks.doubled",
    ),
    "registered": ("Scaled", {"hook_options": {"factor": 0.25}}, 0.25, "scaled"),
}


def attached_in_some_way(hook: Any, arguments: dict[str, Any], factor: float, name: str) -> None:
    if name == "scaled":
        registry.FACTORIES.clear()
        commhooks.register_hook("scaled", scaled_factory)
    try:
        ddp = wrap(mlp())
        passed = {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in arguments.items()
        }
        attached = commhooks.attach(ddp, hook, **passed)
        assert attached.name == name
        assert max(errors_of_means(ddp, 2, factor)) <= 1e-6
        stats = attached.stats()
        # only the hook itself knows
        assert stats["backward_passes"] == 2 and stats["bytes_sent"] is None
        assert passed == arguments  # the factory has taken its option out of a copy
    finally:
        registry.FACTORIES.clear()


@pytest.mark.parametrize("way", WAYS)
def test_a_users_hook_is_found_in_every_way(run_ranks, way):
    run_ranks(attached_in_some_way, *WAYS[way])


def test_a_registered_hook_is_listed():
    commhooks.register_hook("scaled", scaled_factory)
    listed = commhooks.available_hooks()
    assert listed["scaled"] == {"description": "The mean times a factor.", "options": {}}
    assert listed["powerSGD"]["options"]["matrix_approximation_rank"] == 1


# ---- states --------------------------------------------------------------------------------------


class Counts:
    """A state that cannot be saved."""

    def __init__(self) -> None:
        self.calls = 0


class Remembers(Counts):
    """Its state would make the checkpoint unreadable for `torch.load(weights_only=True)`."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1, "folder": Path("here")}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def counting_hook(state: Counts, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.calls += 1
    return commhooks.allreduce_hook(None, bucket)


def unsaveable_state(kind: type[Counts]) -> list[str]:
    ddp = wrap(mlp())
    with log_lines() as lines:
        hook = commhooks.attach(ddp, counting_hook, hook_state=kind())
        train(ddp, 2)
        saved = hook.state_dict()
        hook.load_state_dict(saved)
    assert saved["hook_state"] is None and saved["step"] == 2
    return [line for line in lines if "state_dict" in line]


def test_a_state_that_cannot_be_saved_is_mentioned_once(run_ranks):
    on_0, on_1 = run_ranks(unsaveable_state, Counts)
    assert on_0 == [
        "commhooks: the state of hook counting_hook (Counts) has no state_dict and load_state_dict:"
        " checkpoints do not hold it."
    ]
    assert on_1 == []
    for (line,) in run_ranks(unsaveable_state, Remembers):
        assert "is not saved: ['folder'] is a pathlib" in line


# ---- functions of ours ---------------------------------------------------------------------------


def _functions_of_ours() -> tuple[dict[str, int], bool, list[str]]:
    sent = {}
    for function in (
        commhooks.allreduce_hook,
        commhooks.bf16_compress_hook,
        commhooks.powerSGD_hook,
    ):
        run = Run.new(hook=function).train(2)
        sent[run.hook.name] = run.hook.stats()["bytes_sent"]
    state = commhooks.PowerSGDState(None, 2, 1)
    made = Run.new(hook=commhooks.powerSGD_hook, hook_state=state).train(4)
    named = Run.new(hook_options={"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}).train(
        4
    )
    resumed = Run.new(hook_options={"matrix_approximation_rank": 2}).load(made.save())
    return sent, torch.equal(made.weights(), named.weights()), list(residuals(resumed.hook))


def test_a_function_of_ours_is_the_hook_of_that_name(run_ranks: Any) -> None:
    """With a state, too, it knows the parameters' names and resumes the hook of that name."""
    for sent, equal, resumed in run_ranks(_functions_of_ours):
        assert list(sent) == ["allreduce", "bf16_compress", "powerSGD"]
        assert sent["allreduce"] == 2 * sent["bf16_compress"] > 0
        assert equal and "5.weight" in resumed


def _around(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return commhooks.powerSGD_hook(state, bucket)


@pytest.mark.parametrize(
    "function", [_around, commhooks.fp16_compress_wrapper(commhooks.powerSGD_hook), "factory"]
)
def test_a_state_of_powersgd_is_planned_and_saved_whatever_function_uses_it(function: Any) -> None:
    with process_group_of_one():
        state = commhooks.PowerSGDState(None, 2, start_powerSGD_iter=0)
        if function == "factory":
            commhooks.register_hook(
                "factory", lambda options, group: (state, commhooks.powerSGD_hook)
            )
        ddp = wrap(mlp())
        hook = commhooks.attach(ddp, function, hook_state=None if function == "factory" else state)
        train(ddp, 2)
        assert hook.stats()["compressed_steps"] == 2 and len(hook.plan().compressed) == 3
        assert hook.state_dict()["parameters"]["0.weight"]["residual"] is not None


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return commhooks.allreduce_hook(None, bucket)


def test_a_callable_object_need_not_be_hashable() -> None:
    with process_group_of_one():
        ddp = wrap(mlp())
        hook = commhooks.attach(ddp, Unhashable())
        train(ddp, 1)
        assert hook.stats()["backward_passes"] == 1


def _sub_group() -> torch.Tensor | None:
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    ddp = wrap(mlp(), process_group=pair)
    commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=commhooks.PowerSGDState(None, 2, 0))
    train(ddp, 1)
    return torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])


def test_the_group_of_a_state_is_the_models_own(run_ranks: Any) -> None:
    """Rank 2 is not in the model's group and never answers."""
    first, second, third = run_ranks(_sub_group, world_size=3)
    assert torch.equal(first, second)
    assert third is None


def test_one_state_for_two_models_is_refused() -> None:
    state = commhooks.PowerSGDState(None, 2, 0)
    with process_group_of_one():
        first = Run.new(hook=commhooks.powerSGD_hook, hook_state=state).train(1)
        with pytest.raises(commhooks.AttachError, match="is already used by another model"):
            Run.new(hook=commhooks.powerSGD_hook, hook_state=state)
        assert first.hook.stats()["step"] == 1


# ---- wrappers ------------------------------------------------------------------------------------

DTYPES = {"fp16": (torch.float16, 1e-3), "bf16": (torch.bfloat16, 1e-2)}
HOW: dict[str, Callable[[Any, Any, Any], object]] = {
    "attached": lambda ddp, hook, state: commhooks.attach(ddp, hook, hook_state=state),
    "attached, bf16": lambda ddp, hook, state: commhooks.attach(
        ddp, hook, hook_state=state, wrapper="bf16"
    ),
    "registered, bf16": lambda ddp, hook, state: ddp.register_comm_hook(
        state, commhooks.bf16_compress_wrapper(hook)
    ),
    "registered, fp16": lambda ddp, hook, state: ddp.register_comm_hook(
        state, commhooks.fp16_compress_wrapper(hook)
    ),
}


def recording_average(
    state: set[torch.dtype], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    state.add(bucket.buffer().dtype)
    return scaled_average(None, bucket)


def averages_in_16_bits(how: str) -> None:
    ddp = wrap(mlp())
    seen = set()
    HOW[how](ddp, recording_average, seen)
    dtype, rounding = DTYPES[how[-4:]]
    assert 1e-6 < max(errors_of_means(ddp, 2)) <= rounding  # a wire of 16 bits must show
    assert seen == {dtype}


@pytest.mark.parametrize("how", list(HOW)[1:])
def test_a_users_hook_works_inside_a_wrapper(run_ranks, how):
    run_ranks(averages_in_16_bits, how)


# ---- misbehaviour --------------------------------------------------------------------------------


def returns_nothing(state: Any, bucket: dist.GradBucket) -> Any:
    dist.all_reduce(bucket.buffer())


def returns_a_tensor(state: Any, bucket: dist.GradBucket) -> Any:
    return bucket.buffer()


def raises(state: Any, bucket: dist.GradBucket) -> Any:
    raise ZeroDivisionError("in the user's code")


def without_then(state: Any, bucket: dist.GradBucket) -> Any:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def one_number(state: Any, bucket: dist.GradBucket) -> Any:
    return without_then(state, bucket).then(lambda future: future.value()[0].sum())


@pytest.mark.parametrize(
    ("hook", "how", "error", "text"),
    [
        (
            returns_nothing,
            "attached",
            commhooks.HookRunError,
            "returned a NoneType; it must return a torch.futures.F",
        ),
        (
            returns_a_tensor,
            "registered, bf16",
            commhooks.HookRunError,
            "returned a Tensor; it must return a torch.f",
        ),
        # Errors in a future's callback become RuntimeErrors.
        (
            without_then,
            "attached, bf16",
            RuntimeError,
            "the future of hook 'without_then' holds a list; it must",
        ),
        (
            one_number,
            "registered, bf16",
            RuntimeError,
            "the future of hook 'one_number' holds 1 numbers for",
        ),
        (raises, "attached", ZeroDivisionError, "in the user's code"),
    ],
)
def test_a_wrong_hook_is_an_error_in_backward(
    hook: Any, how: str, error: type[Exception], text: str
) -> None:
    with process_group_of_one():
        ddp = wrap(mlp())
        HOW[how](ddp, hook, None)
        with pytest.raises(error, match=text):
            backward(ddp, 0)
