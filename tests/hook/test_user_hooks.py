"""Hooks of the user's own: a callable, a dotted path, a registered name; with a state that is saved, and without."""

import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks import registry
from tests.golden.golden_runs import Momentum, momentum_hook
from tests.support.ddp_steps import (
    backward,
    errors_of_means,
    log_lines,
    mlp,
    process_group_of_one,
    replicas_equal,
    train,
    weights,
    wrap,
)


@pytest.fixture(autouse=True)
def no_registered_hooks_left() -> Iterator[None]:
    with mock.patch.dict(registry.FACTORIES, clear=True):
        yield


# ------------------------------------------------------------------------------------------------------------ hooks


def scaled_average(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean times `state` (None: 1). Its annotations are text, which a bare `register_comm_hook` would refuse."""
    factor = 1.0 if state is None else float(state)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] * (factor / dist.get_world_size()))


class Hooks:
    """For a dotted path of two parts."""

    @staticmethod
    def doubled(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return scaled_average(2.0, bucket)


def scaled_factory(options: dict[str, Any], process_group: dist.ProcessGroup | None) -> tuple[Any, Any]:
    """The mean times a factor."""
    assert isinstance(process_group, dist.ProcessGroup)
    return options.pop("factor", 1.0), scaled_average


# ---------------------------------------------------------------------------------------------------- three ways to it

WAYS: dict[str, tuple[Any, dict[str, Any], float, str]] = {
    "callable": (scaled_average, {"hook_state": 0.5}, 0.5, "scaled_average"),
    "callable without a state": (scaled_average, {}, 1.0, "scaled_average"),
    "dotted path": ("test_user_hooks:scaled_average", {"hook_state": 3}, 3.0, "test_user_hooks:scaled_average"),
    "dotted path with a class": ("test_user_hooks:Hooks.doubled", {}, 2.0, "test_user_hooks:Hooks.doubled"),
    "registered": ("Scaled", {"hook_options": {"factor": 0.25}}, 0.25, "scaled"),
    "registered, no options": ("scaled", {}, 1.0, "scaled"),
}


def attached_in_some_way(hook: Any, arguments: dict[str, Any], factor: float, name: str) -> None:
    if name == "scaled":
        registry.FACTORIES.clear()
        commhooks.register_hook("scaled", scaled_factory)
    try:
        ddp = wrap(mlp())
        given = {key: dict(value) if isinstance(value, dict) else value for key, value in arguments.items()}
        attached = commhooks.attach(ddp, hook, **given)
        assert attached.name == name
        assert max(errors_of_means(ddp, 2, factor)) <= 1e-6
        stats = attached.stats()
        assert stats["backward_passes"] == 2 and stats["bytes_sent"] is None  # only the hook itself knows
        assert given == arguments  # the factory has taken its option out of a copy
    finally:
        registry.FACTORIES.clear()


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_users_hook(run_ranks, way):
    run_ranks(attached_in_some_way, *WAYS[way])


def test_a_registered_hook_is_listed():
    commhooks.register_hook("scaled", scaled_factory)
    listed = commhooks.available_hooks()
    assert listed["scaled"] == {"description": "The mean times a factor.", "options": {}}
    assert listed["powerSGD"]["options"]["matrix_approximation_rank"] == 1


# -------------------------------------------------------------------------------------------------------------- states


def resumed_momentum() -> None:
    """Uninterrupted, and saved to a file, loaded into a new model and state, and gone on: the same bits."""

    def start(module: torch.nn.Module) -> tuple[Any, commhooks.CommHook]:
        # Buckets keep their places, so that a state by bucket index can be resumed at all.
        ddp = wrap(module, find_unused_parameters=True)
        return ddp, commhooks.attach(ddp, momentum_hook, hook_state=Momentum())

    ddp, hook = start(mlp())
    train(ddp, 3)
    file = io.BytesIO()
    torch.save({"model": ddp.module.state_dict(), "hook": hook.state_dict()}, file)
    train(ddp, 3, first_step=3)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["hook"]["hook"] == "momentum_hook" and saved["hook"]["step"] == 3
    again, new_hook = start(mlp(seed=9))  # without momentum: loading has to bring it
    again.module.load_state_dict(saved["model"])
    new_hook.load_state_dict(saved["hook"])
    train(again, 3, first_step=3)
    for name, weight in weights(ddp.module).items():
        assert torch.equal(weight, again.module.get_parameter(name)), name
    assert replicas_equal(again)

    forgetful, _ = start(mlp(seed=9))
    forgetful.module.load_state_dict(saved["model"])
    train(forgetful, 3, first_step=3)
    assert not torch.equal(ddp.module[0].weight, forgetful.module[0].weight), "the state does not matter here"


def test_a_stateful_hook_is_saved_and_resumed(run_ranks):
    run_ranks(resumed_momentum)


class Unsaveable:
    def __init__(self) -> None:
        self.calls = 0


def counting_hook(state: Unsaveable, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.calls += 1
    return commhooks.allreduce_hook(None, bucket)


def unsaveable_state() -> list[str]:
    ddp = wrap(mlp())
    with log_lines() as lines:
        hook = commhooks.attach(ddp, counting_hook, hook_state=Unsaveable())
        train(ddp, 2)
        saved = hook.state_dict()
        hook.load_state_dict(saved)
    assert saved["hook_state"] is None and saved["step"] == 2
    return [line for line in lines if "state_dict" in line]


def test_a_state_that_cannot_be_saved_is_mentioned_once(run_ranks):
    on_0, on_1 = run_ranks(unsaveable_state)
    assert on_0 == [
        "commhooks: the state of hook counting_hook (Unsaveable) has no state_dict and load_state_dict: "
        "checkpoints do not hold it."
    ]
    assert on_1 == []


# ------------------------------------------------------------------------------------------------------------ wrappers

WRAPPERS = {"fp16": commhooks.fp16_compress_wrapper, "bf16": commhooks.bf16_compress_wrapper}
ROUNDING = {"fp16": 1e-3, "bf16": 1e-2}


def _attach_wrapped(ddp: Any, hook: Any, state: Any, wrapper: str) -> None:
    commhooks.attach(ddp, hook, hook_state=state, wrapper=wrapper)


def _register_wrapped(ddp: Any, hook: Any, state: Any, wrapper: str) -> None:
    ddp.register_comm_hook(state, WRAPPERS[wrapper](hook))


def _attach_plain(ddp: Any, hook: Any, state: Any, wrapper: str) -> None:
    commhooks.attach(ddp, hook, hook_state=state)


WRAPPED = [_attach_wrapped, _register_wrapped]


def recording_average(state: set[torch.dtype], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.add(bucket.buffer().dtype)
    return scaled_average(None, bucket)


def averages_in_16_bits(how: Any, wrapper: str) -> None:
    ddp, seen = wrap(mlp()), set()
    how(ddp, recording_average, seen, wrapper)
    assert 1e-6 < max(errors_of_means(ddp, 2)) <= ROUNDING[wrapper]  # a wire of 16 bits must show
    assert seen == {{"fp16": torch.float16, "bf16": torch.bfloat16}[wrapper]}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("how", WRAPPED)
def test_a_users_hook_inside_a_wrapper(run_ranks, how, wrapper):
    run_ranks(averages_in_16_bits, how, wrapper)


# -------------------------------------------------------------------------------------------------------- misbehaviour


def returns_nothing(state: Any, bucket: dist.GradBucket) -> Any:
    dist.all_reduce(bucket.buffer())


def returns_a_tensor(state: Any, bucket: dist.GradBucket) -> Any:
    return bucket.buffer()


def raises(state: Any, bucket: dist.GradBucket) -> Any:
    raise ZeroDivisionError("in the user's code")


@pytest.mark.parametrize("how", [_attach_plain, *WRAPPED])
@pytest.mark.parametrize("hook, kind", [(returns_nothing, "NoneType"), (returns_a_tensor, "Tensor")])
def test_a_hook_without_a_future_is_an_error_in_backward(hook, kind, how):
    with process_group_of_one():
        ddp = wrap(mlp())
        how(ddp, hook, None, "bf16")
        with pytest.raises(commhooks.HookRunError) as error:
            backward(ddp, 0)
    assert f"hook {hook.__name__!r} returned a {kind}; it must return a torch.futures.Future" in str(error.value)


def without_then(state: Any, bucket: dist.GradBucket) -> Any:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def one_number(state: Any, bucket: dist.GradBucket) -> Any:
    return without_then(state, bucket).then(lambda future: future.value()[0].sum())


@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("hook, holds", [(without_then, "a list; it must"), (one_number, "1 numbers for a bucket of")])
def test_what_a_wrapped_hooks_future_holds_is_checked(hook, holds, how):
    with process_group_of_one():
        ddp = wrap(mlp())
        how(ddp, hook, None, "bf16")
        with pytest.raises(RuntimeError) as error:  # whatever a future's callback raises
            backward(ddp, 0)
    assert f"the future of hook {hook.__name__!r} holds {holds}" in str(error.value)


def test_an_error_in_a_hook_is_raised_in_backward():
    with process_group_of_one():
        ddp = wrap(mlp())
        commhooks.attach(ddp, raises)
        with pytest.raises(ZeroDivisionError, match="in the user's code"):
            backward(ddp, 0)


def test_a_callable_named_none_is_called():
    def none(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return scaled_average(3.0, bucket)

    none.__qualname__ = "none"
    with process_group_of_one():
        ddp = wrap(mlp())
        commhooks.attach(ddp, none)
        assert max(errors_of_means(ddp, 1, factor=3.0)) <= 1e-6
