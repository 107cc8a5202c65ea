"""Accumulation, unused parameters and join keep every residual and average what they should."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.ddp_steps import (
    backward,
    batch,
    conservation_error,
    descend,
    gradients,
    local_gradients,
    mean_over_ranks,
    mlp,
    replicas_equal,
    residuals,
    train,
    weights,
    wrap,
)
from tests.support.kinds import AUTO

POWER_SGD = commhooks.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2)


# ---- accumulation --------------------------------------------------------------------------------


def _accumulate(model: nn.Module, step: int) -> None:
    """Three micro-batches; DDP communicates at the last one only."""
    model.zero_grad(set_to_none=True)
    for micro in range(3):
        loss = partial(_loss, model, 10 * step + micro)
        if isinstance(model, DistributedDataParallel) and micro < 2:
            with model.no_sync():
                loss().backward()
        else:
            loss().backward()


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def accumulation(config: commhooks.HookConfig) -> None:
    ddp = wrap(mlp())
    hook = commhooks.attach(ddp, config)
    for step in range(3):
        local = local_gradients(ddp, partial(_accumulate, step=step))
        before = residuals(hook) if isinstance(config, commhooks.PowerSGD) else {}
        _accumulate(ddp, step)
        after = residuals(hook) if isinstance(config, commhooks.PowerSGD) else {}
        for name, gradient in gradients(ddp).items():
            if name in after:
                error = conservation_error(local[name], before.get(name), after[name], gradient)
                assert error <= 1e-6, (step, name, error)
            else:
                torch.testing.assert_close(
                    gradient, mean_over_ranks(local[name]), rtol=1e-5, atol=1e-7
                )
        assert hook.stats()["backward_passes"] == hook.stats()["step"] == step + 1
        descend(ddp)
        assert replicas_equal(ddp)
    if isinstance(config, commhooks.PowerSGD):
        assert len(after) == 3 and hook.stats()["compressed_steps"] == 3


@pytest.mark.parametrize(
    "config", [commhooks.AllReduce(), POWER_SGD], ids=["allreduce", "powerSGD"]
)
def test_accumulation_counts_synchronised_passes_and_reduces_the_sum(run_ranks, config):
    run_ranks(accumulation, config)


# ---- unused parameters ---------------------------------------------------------------------------


class Branches(nn.Module):
    """A trunk and a branch that a pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branch = nn.Linear(24, 24)
        self.trunk = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, use_branch: bool) -> torch.Tensor:
        y = self.trunk(x)
        return y + self.branch(x) if use_branch else y


def _branch_pass(model: nn.Module, step: int, use_branch: bool) -> None:
    model(batch(step), use_branch).square().mean().backward()


def unused_parameters() -> None:
    ddp = wrap(Branches(), find_unused_parameters=True)
    hook = commhooks.attach(ddp, POWER_SGD)
    # (is the branch used on this rank?, on any?) per step
    both, neither, one = (True, True), (False, False), (dist.get_rank() == 0, True)
    for step, (here, anywhere) in enumerate([both, both, neither, one, neither, neither, both]):
        before = residuals(hook)
        run = partial(_branch_pass, step=step, use_branch=here)
        local = local_gradients(ddp, run)
        ddp.zero_grad(set_to_none=True)
        run(ddp)
        after = residuals(hook)
        assert (ddp.module.branch.weight.grad is not None) == anywhere, step
        for name, gradient in gradients(ddp).items():
            if name.endswith("weight"):
                mine = local.get(name, torch.zeros_like(gradient))
                error = conservation_error(mine, before.get(name), after[name], gradient)
                assert error <= 1e-6, (step, name, error)
        if not anywhere:
            assert before["branch.weight"].any()
            assert torch.equal(before["branch.weight"], after["branch.weight"]), step
        descend(ddp)
        assert replicas_equal(ddp), step
    assert hook.stats()["compressed_steps"] == 7


def test_unused_parameters_keep_their_residual(run_ranks):
    run_ranks(unused_parameters)


# ---- uneven inputs -------------------------------------------------------------------------------


def uneven_inputs(config: commhooks.HookConfig | str) -> dict[str, torch.Tensor]:
    """Rank 0 has three batches, rank 1 six."""
    ddp = wrap(mlp())
    hook = commhooks.attach(ddp, config)
    with Join([ddp]):
        for step in range(3 + 3 * dist.get_rank()):
            backward(ddp, step)
            descend(ddp)
    assert hook.stats()["step"] == hook.stats()["backward_passes"] == 6
    assert hook.stats()["collectives_last_pass"] > 1
    assert config != AUTO or hook.stats()["chosen"] in ("bf16", "int8")
    ddp.zero_grad(set_to_none=True)  # the rank that ran out of batches has old ones
    assert replicas_equal(ddp)
    return weights(ddp.module)


def even_inputs(config: commhooks.HookConfig | str) -> dict[str, torch.Tensor]:
    """The same in plain DDP: rank 0 has six batches, the last three of which weigh nothing."""
    ddp = wrap(mlp())
    commhooks.attach(ddp, config)
    for step in range(6):
        ddp.zero_grad(set_to_none=True)
        weight = 0 if step >= 3 and dist.get_rank() == 0 else 1
        (weight * ddp(batch(step)).square().mean()).backward()
        descend(ddp)
    return weights(ddp.module)


@pytest.mark.parametrize(
    "config", [commhooks.AllReduce(), POWER_SGD, AUTO], ids=["allreduce", "powerSGD", "auto"]
)
def test_join_with_uneven_inputs_is_as_inputs_without_weight(run_ranks, config):
    joined, _ = run_ranks(uneven_inputs, config)
    plain, _ = run_ranks(even_inputs, config)
    for name, expected in plain.items():
        assert torch.equal(joined[name], expected), name


def refused_division(batches: tuple[int, int]) -> tuple[str, str]:
    ddp = wrap(mlp())
    commhooks.attach(ddp, POWER_SGD)
    try:
        with Join([ddp], divide_by_initial_world_size=False):
            train(ddp, batches[dist.get_rank()])
    except commhooks.HookRunError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    "batches", [(2, 2), (0, 2)], ids=["both ranks are active", "one rank only shadows"]
)
def test_join_with_another_divisor_is_refused_without_a_hang(run_ranks, batches):
    for name, text in run_ranks(refused_division, batches):
        assert name == "HookRunError"
        assert "Use divide_by_initial_world_size=True, or no hook" in text
