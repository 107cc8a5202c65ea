"""Each option of DDP works with a hook or is refused with a sentence."""

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commhooks
from tests.support.ddp_steps import (
    batch,
    conservation_error,
    descend,
    gradients,
    local_gradients,
    log_lines,
    mlp,
    process_group_of_one,
    replicas_equal,
    residuals,
    train,
    weights,
    wrap,
)
from tests.support.features import delayed_in_small_buckets, mixed_precision_of_ddp

POWER_SGD = commhooks.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2)


# ---- works ---------------------------------------------------------------------------------------


def same_weights(config: commhooks.HookConfig) -> None:
    """Options that must not change a bit."""
    results = {}
    for option in ("", "static_graph", "gradient_as_bucket_view", "find_unused_parameters"):
        ddp = wrap(mlp(), **({option: True} if option else {}))
        hook = commhooks.attach(ddp, config)
        train(ddp, 4)
        assert replicas_equal(ddp), option
        assert hook.stats()["step"] == 4 and hook.stats()["collectives_last_pass"] > 2, option
        results[option] = weights(ddp.module)
    for option, ours in results.items():
        for name, weight in results[""].items():
            assert torch.equal(ours[name], weight), (option, name)


@pytest.mark.parametrize(
    "config", [commhooks.AllReduce(), POWER_SGD], ids=["allreduce", "powerSGD"]
)
def test_static_graph_bucket_views_and_unused_search_change_nothing(run_ranks, config):
    run_ranks(same_weights, config)


def delayed_all_reduce() -> None:
    """DDP reduces delayed parameters in a hook of its own; ours must not see or disturb them."""
    module = mlp()
    delayed = ["2.weight", "2.bias"]
    ddp = wrap(
        module,
        delay_all_reduce_named_params=[(name, module.get_parameter(name)) for name in delayed],
        param_to_hook_all_reduce=module.get_parameter("0.weight"),
    )
    hook = commhooks.attach(ddp, POWER_SGD)
    assert [p.name for p in hook.plan().parameters] == ["0.weight", "0.bias", "4.weight", "4.bias"]
    for step in range(4):
        run = partial(_square, step=step)
        local = local_gradients(ddp, run)
        before = residuals(hook)
        ddp.zero_grad(set_to_none=True)
        run(ddp)
        after = residuals(hook)
        averaged = gradients(ddp)
        for name in ("0.weight", "4.weight"):
            assert (
                conservation_error(local[name], before.get(name), after[name], averaged[name])
                <= 1e-6
            )
        for name in delayed:
            mean = local[name].clone()
            dist.all_reduce(mean)
            # torch 2.13 starts this all-reduce in the last gradient's hook and never waits for it.
            deadline = time.monotonic() + 10
            while not torch.allclose(
                ddp.module.get_parameter(name).grad, mean / 2, rtol=1e-5, atol=1e-7
            ):
                assert time.monotonic() < deadline, name
                time.sleep(0.01)
        descend(ddp)
        assert replicas_equal(ddp)
    assert after.keys() == {"0.weight", "4.weight"} and hook.stats()["compressed_steps"] == 4


def _square(model: nn.Module, step: int) -> None:
    model(batch(step)).square().mean().backward()


@delayed_in_small_buckets
def test_delayed_parameters_are_not_in_the_plan_and_still_averaged(run_ranks):
    run_ranks(delayed_all_reduce)


class Checkpointed(nn.Sequential):
    """Computes each layer's activations anew, by backward passes within the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        for layer in self[1:]:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def reentrant_checkpoints(attached: bool, ddp_options: dict[str, Any]) -> None:
    results = []
    for module in (mlp(), Checkpointed(*mlp())):
        ddp = wrap(module, **ddp_options)
        state = commhooks.PowerSGDState(None, start_powerSGD_iter=0)
        if attached:
            hook = commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=state)
        else:
            ddp.register_comm_hook(state, commhooks.powerSGD_hook)
        train(ddp, 4)
        assert state.iter == 4
        if attached:
            assert hook.stats()["backward_passes"] == 4
        assert replicas_equal(ddp)
        results.append(weights(ddp.module))
    for name, weight in results[0].items():
        assert torch.equal(weight, results[1][name]), name


@pytest.mark.parametrize("attached", [True, False], ids=["attach", "register_comm_hook"])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_reentrant_checkpoints_are_one_pass(run_ranks, attached, options):
    run_ranks(reentrant_checkpoints, attached, options)


def compiled_module() -> None:
    # Dynamo splits the graph at DDP's buckets, and refuses caps below that of the first one.
    ddp = wrap(torch.compile(mlp(), backend="eager"), bucket_cap_mb=25)
    hook = commhooks.attach(ddp, POWER_SGD)
    train(ddp, 3)
    names = list(dict(mlp().named_parameters()))
    assert [p.name for p in hook.plan().parameters] == names
    saved = hook.state_dict("per_rank")
    assert list(saved["parameters"]) == names and saved["step"] == 3
    uncompiled = wrap(mlp())
    commhooks.attach(uncompiled, POWER_SGD).load_state_dict(saved)
    assert replicas_equal(ddp)


def test_names_of_a_compiled_module_are_those_of_the_module(run_ranks):
    run_ranks(compiled_module)


# ---- skip_all_reduce_unused_params ---------------------------------------------------------------


class FirstUnused(nn.Module):
    """Three buckets, `third` in the first of them; a pass may leave layers out on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 24, bias=False)
        self.second = nn.Linear(24, 24, bias=False)
        self.third = nn.Linear(24, 24, bias=False)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        return torch.stack([getattr(self, name)(x) for name in use.split()]).sum(0)


def skipped_buckets(
    attached: bool, ddp_options: dict[str, Any], uses: list[str], hook_name: str
) -> None:
    ddp = wrap(
        FirstUnused(), skip_all_reduce_unused_params=True, bucket_cap_mb=0.001, **ddp_options
    )
    hook = state = None
    if attached:
        options = {} if hook_name == "allreduce" else {"start_powerSGD_iter": 1}
        hook = commhooks.attach(ddp, hook_name, hook_options=options)
    else:
        state = commhooks.PowerSGDState(None, start_powerSGD_iter=1)
        ddp.register_comm_hook(state, commhooks.powerSGD_hook)
    for step, use in enumerate(uses):
        ddp.zero_grad(set_to_none=True)
        ddp(batch(step), use).square().mean().backward()
        used = {name for name in gradients(ddp) if name.endswith("weight")}
        assert used == {f"{name}.weight" for name in use.split()}, (step, used)
        if hook:
            assert hook.stats()["step"] == hook.stats()["backward_passes"] == step + 1
            if hook_name == "allreduce":
                assert hook.stats()["collectives_last_pass"] == len(use.split()), step
        else:
            assert state.iter == step + 1
        descend(ddp)
        assert replicas_equal(ddp), step
    if hook_name == "powerSGD":
        compressed = (
            hook.stats()["compressed_steps"] if hook else state.session.counters.compressed_steps
        )
        assert compressed == len(uses) - 1
    if hook and hook_name == "batched_powerSGD":  # a bucket that is skipped keeps its Q
        assert len(hook.state_dict("drop")["batched_q"]) == len(
            {name for use in uses[1:] for name in use.split()}
        )


ALL, LAST, MIDDLE = "first second third", "second third", "first third"
USES = {
    "the last bucket never comes": [LAST] * 4,
    "it comes and goes": [ALL, LAST, LAST, ALL, MIDDLE, ALL],
    "the first bucket never comes": ["first second"] * 4,
    "one bucket alone": ["second", "third", "first", "second", "second"],
}


@pytest.mark.parametrize("attached", [True, False], ids=["attach", "register_comm_hook"])
def test_skipped_buckets_keep_their_residuals(run_ranks, attached):
    run_ranks(all_skipped_buckets, attached)


def all_skipped_buckets(attached: bool) -> None:
    for uses in USES.values():
        skipped_buckets(attached, {"find_unused_parameters": True}, uses, "powerSGD")
    skipped_buckets(attached, {"static_graph": True}, [LAST] * 4, "powerSGD")
    if attached:
        skipped_buckets(
            attached, {"find_unused_parameters": True}, USES["one bucket alone"], "batched_powerSGD"
        )


@pytest.mark.parametrize("uses", USES)
def test_skipped_buckets_are_counted_by_simple_hooks(run_ranks, uses):
    run_ranks(
        skipped_buckets,
        True,
        {"find_unused_parameters": True},
        USES[uses],
        "allreduce",
    )


# ---- refused -------------------------------------------------------------------------------------


@pytest.fixture
def alone():
    with process_group_of_one():
        yield


@mixed_precision_of_ddp
def test_mixed_precision_is_refused(alone):
    from torch.nn.parallel.distributed import _MixedPrecision

    ddp = DistributedDataParallel(
        mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)
    )
    with pytest.raises(
        commhooks.AttachError,
        match=r"mixed_precision=\.\.\.\) registers a communication hook of its own",
    ):
        commhooks.attach(ddp, "powerSGD")


def test_an_optimizer_in_backward_is_refused(alone):
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with pytest.raises(
        commhooks.AttachError, match="optimizer applied in backward .* use an ordinary optimizer"
    ):
        commhooks.attach(DistributedDataParallel(module), "powerSGD")


def test_a_compiled_ddp_model_is_refused(alone):
    compiled = torch.compile(DistributedDataParallel(mlp()), backend="eager")
    with pytest.raises(commhooks.AttachError, match="before torch.compile wraps it"):
        commhooks.attach(compiled, "powerSGD")


def test_the_python_reducer_is_refused(alone):
    """`optimize_ddp="python_reducer"` calls the hook with a tuple."""
    ddp = DistributedDataParallel(mlp())
    registered: list[Any] = []
    ddp.register_comm_hook = lambda state, hook: registered.extend((state, hook))
    with log_lines():
        commhooks.attach(ddp, "powerSGD")
    state, hook = registered
    parameter = ddp.module[0].weight
    with pytest.raises(
        commhooks.HookRunError, match="without a GradBucket: .*python_reducer.* is not supported"
    ):
        hook(state, (torch.zeros_like(parameter), parameter))
