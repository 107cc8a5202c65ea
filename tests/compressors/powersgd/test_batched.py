"""`batched_powerSGD_hook` against a slow and obvious version of itself, in float64."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from tests.support.ddp_steps import (
    backward,
    batch,
    conservation_error,
    descend,
    gradients,
    local_gradients,
    log_lines,
    mean_over_ranks,
    mlp,
    process_group_of_one,
    relative,
    replicas_equal,
    residuals,
    wrap,
)
from tests.support.inside import session_of
from tests.support.kernels import computing_with
from tests.support.models import EVERY_PARAMETER, masks

BRANCH = ("branch.weight", "branch.bias")


def order_in_the_bucket() -> list[str]:
    """Names of the parameters of `mlp` in its one bucket, once it has been rebuilt."""
    ddp = wrap(mlp(), bucket_cap_mb=25)
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    seen: list[list[str]] = []

    def look(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        seen.append([names[id(parameter)] for parameter in bucket.parameters()])
        return commhooks.allreduce_hook(None, bucket)

    commhooks.attach(ddp, look)
    for step in range(3):
        backward(ddp, step)
    assert seen[0] != seen[1] == seen[2]
    return seen[1]


class Oracle:
    """One bucket as one square matrix, padded with zeros. Each rank holds its own residual; Q is
    given.
    """

    def __init__(
        self, order: list[str], q: torch.Tensor, residual: dict[str, torch.Tensor]
    ) -> None:
        self.order = order
        self.q = q  # r x side, transposed
        self.residual = residual

    def step(self, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        flat = torch.cat([(local[name] + self.residual[name]).flatten() for name in self.order])
        side = math.ceil(math.sqrt(flat.numel()))
        assert side * side > flat.numel(), "no padding: the test would not see it"
        delta = torch.zeros(side * side, dtype=torch.float64)
        delta[: flat.numel()] = flat
        delta = delta.view(side, side)
        p, _ = torch.linalg.qr(mean_over_ranks(delta @ self.q.t()))
        # What has no gradient on any rank stays as it is, and is not in what is sent for the
        # others.
        idle = {
            name for name, gradient in local.items() if not mean_over_ranks(gradient.abs()).any()
        }
        for name, part in self._split(delta.flatten(), local).items():
            part.mul_(name not in idle)
        own_q = delta.t() @ p
        q = mean_over_ranks(own_q)
        self.q = q.t()
        kept = {name: self.residual[name] for name in idle}
        self.residual = self._split((delta - p @ own_q.t()).flatten(), local) | kept
        return {
            name: part.mul_(name not in idle)
            for name, part in self._split((p @ q.t()).flatten(), local).items()
        }

    def _split(self, flat: torch.Tensor, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters' parts. What lies behind them, the padding, is dropped at each step."""
        parts = {}
        at = 0
        for name in self.order:
            parts[name] = flat[at : at + like[name].numel()].view(like[name].shape)
            at += like[name].numel()
        return parts


def backward_at_times_without_input(model: nn.Module, step: int) -> None:
    """The weights of the first layer have gradients of zero in two of the steps."""
    model.zero_grad(set_to_none=True)
    model(batch(step, dtype=torch.float64) * (step not in (5, 6))).square().mean().backward()


def against_the_oracle(rank: int, kernel: str, masked: bool) -> None:
    with masks(masked), computing_with(kernel):
        against_the_oracle_here(rank)


def against_the_oracle_here(rank: int) -> None:
    order = order_in_the_bucket()
    ddp = wrap(mlp(dtype=torch.float64), bucket_cap_mb=25)
    config = commhooks.BatchedPowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=1)
    hook = commhooks.attach(ddp, config)
    # one plain step with the first layout, then two steps from which the oracle goes on
    for step in range(3):
        backward(ddp, step)
        descend(ddp)
    saved = hook.state_dict("per_rank")
    (q,) = saved["batched_q"].values()
    oracle = Oracle(order, q.clone(), {name: r.clone() for name, r in residuals(hook).items()})
    assert all(r.any() for r in oracle.residual.values())
    for step in range(3, 9):
        expected = oracle.step(
            local_gradients(ddp, partial(backward_at_times_without_input, step=step))
        )
        backward_at_times_without_input(ddp, step)
        for name, gradient in gradients(ddp).items():
            assert gradient.any() == (name != "0.weight" or step not in (5, 6))
            assert (gradient - expected[name]).norm() <= 1e-9 * expected[name].norm(), (step, name)
            assert (
                relative(residuals(hook)[name] - oracle.residual[name], oracle.residual[name])
                <= 1e-9
            ), (step, name)
        descend(ddp)
        assert replicas_equal(ddp)
    assert hook.stats()["compressed_steps"] == 8


@pytest.mark.parametrize(
    ("rank", "kernel", "masked"), [(1, "native", False), (3, "torch", False), (3, "torch", True)]
)
def test_gradients_and_residuals_equal_the_oracle(run_ranks, rank, kernel, masked):
    run_ranks(against_the_oracle, rank, kernel, masked)


def rebuilt_buckets() -> None:
    """The first pass has one bucket, the others have several: the residuals must stay the same."""
    ddp = wrap(mlp(), bucket_cap_mb=0.003)
    state = commhooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=0)
    ddp.register_comm_hook(state, commhooks.batched_powerSGD_hook)

    def kept() -> torch.Tensor:
        """The sum of all residuals is enough to see whether one was lost."""
        return torch.cat(
            [r.flatten().double() for _, r in sorted(state.session.state["residual"].items())]
        )

    flows = []
    for step in range(4):
        before = kept() if step else torch.zeros(())
        local = local_gradients(ddp, partial(backward, step=step))
        backward(ddp, step)
        flow_in = before.sum() + sum(g.double().sum() for g in local.values())
        flow_out = kept().sum() + sum(g.double().sum() for g in gradients(ddp).values())
        flows.append(
            (mean_over_ranks(flow_in), mean_over_ranks(flow_out), len(state.session.state["q"]))
        )
        assert abs(flows[-1][0] - flows[-1][1]) <= 1e-5, (step, flows)
        descend(ddp)
        assert replicas_equal(ddp)
    assert flows[0][2] == 1 and flows[1][2] > 2, "the buckets were not rebuilt"
    assert kept().abs().max() > 1e-4


def test_the_residual_survives_the_rebuild_of_the_buckets(run_ranks):
    run_ranks(rebuilt_buckets)


def too_small_after_the_rebuild() -> dict[str, Any]:
    """After the first pass each parameter has a bucket; those of the biases are too small."""
    ddp = wrap(mlp(), bucket_cap_mb=EVERY_PARAMETER)
    hook = commhooks.attach(
        ddp, commhooks.BatchedPowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=0)
    )
    backward(ddp, 0)
    kept = [sorted(residuals(hook))]
    with log_lines() as lines:
        for scale in (float("nan") if dist.get_rank() == 1 else 1.0, 1.0, 1.0):
            true = {
                name: mean_over_ranks(g)
                for name, g in local_gradients(ddp, partial(backward, step=1)).items()
            }
            backward(ddp, 1, scale)
            kept.append(sorted(residuals(hook)))
    applied = gradients(ddp)
    errors = [relative(applied[name] - true[name], true[name]) for name in true if "bias" in name]
    return {
        "kept": kept,
        "errors": errors,
        "lines": [line for line in lines if "no longer" in line],
    }


def test_residuals_of_buckets_that_are_too_small_now_are_dropped(run_ranks):
    first, second = run_ranks(too_small_after_the_rebuild)
    for rank in (first, second):
        all_names, after_the_bad_step, *dropped = rank["kept"]
        assert after_the_bad_step == all_names and len(all_names) == 6
        assert all(names == [name for name in all_names if "bias" not in name] for names in dropped)
        assert len(rank["errors"]) == 3 and max(rank["errors"]) < 1e-6
    (line,) = first["lines"]
    assert (
        line.endswith("and drops their residuals: 4.bias, 2.bias, 0.bias") and not second["lines"]
    )


class Branching(nn.Module):
    """A part of it is not used while it `skips`."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp()
        self.branch = nn.Linear(24, 24)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trunk(x) if self.skips else self.trunk(x) + self.branch(x)


def a_branch_rests(masked: bool) -> float:
    """The largest error in what is applied and what is kept of any parameter, in any step."""
    scale, errors = [4.0], []
    with masks(masked):
        ddp = wrap(Branching(), bucket_cap_mb=25, find_unused_parameters=True)
        config = commhooks.BatchedPowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0)
        hook = commhooks.attach(ddp, config, loss_scale=lambda: scale[0])
        for step in range(8):
            before = residuals(hook)
            old_scale = scale[0]
            ddp.module.skips = 3 <= step < 6
            scale[0] = 2.0 if step == 4 else scale[0]
            local = local_gradients(ddp, partial(backward, step=step, scale=scale[0]))
            backward(ddp, step, scale[0])
            after = residuals(hook)
            applied = gradients(ddp)
            expected = {
                name: residual * (scale[0] / old_scale) for name, residual in before.items()
            }
            if ddp.module.skips:
                assert all(
                    torch.equal(after[name], expected[name]) and name not in applied
                    for name in BRANCH
                )
            for name, gradient in applied.items():
                errors.append(
                    conservation_error(local[name], expected.get(name), after[name], gradient)
                )
        assert replicas_equal(ddp) and all(after[name].any() for name in BRANCH)
        assert hook.stats()["compressed_steps"] == 8
    return max(errors)


@pytest.mark.parametrize("masked", [False, True])
def test_a_parameter_that_no_rank_uses_keeps_its_residual(run_ranks, masked):
    assert max(run_ranks(a_branch_rests, masked)) < 1e-5


def another_width() -> tuple[list[str], int]:
    """Load the state of a smaller model, and return the log and the compressed steps."""
    steps = []
    for width in (24, 48):
        ddp = wrap(nn.Linear(24, width), bucket_cap_mb=25)
        hook = commhooks.attach(ddp, "batched_powerSGD", hook_options={"start_powerSGD_iter": 0})
        steps.append((ddp, hook))
    (small, hook_of_small), (large, hook) = steps
    for step in range(3):
        backward(small, step)
    hook.load_state_dict(hook_of_small.state_dict("drop"), strict=False)
    with log_lines() as lines:
        for step in range(3):
            backward(large, step)
    assert replicas_equal(large)
    return [line for line in lines if "it starts afresh" in line], hook.stats()["compressed_steps"]


def test_a_saved_q_of_another_width_is_not_used(run_ranks):
    (on_0, compressed), (on_1, _) = run_ranks(another_width)
    assert [line.partition(" has ")[2] for line in on_0] == [
        "shape (1, 25), it needs (1, 35): it starts afresh"
    ]
    assert on_1 == [] and compressed == 3


def _with_an_empty_parameter(masked: bool) -> bool:
    with masks(masked):
        model = mlp()
        model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
        ddp = wrap(model, bucket_cap_mb=25, find_unused_parameters=True)
        hook = commhooks.attach(
            ddp, "batched_powerSGD", hook_options={"start_powerSGD_iter": 0}, wrapper="fp16"
        )
        for step in range(2):
            backward(ddp, step)
            descend(ddp)
        return replicas_equal(ddp) and hook.stats()["compressed_steps"] == 2


@pytest.mark.parametrize("masked", [False, True])
def test_an_empty_parameter_changes_nothing_on_a_narrow_wire(run_ranks, masked):
    assert all(run_ranks(_with_an_empty_parameter, masked))


# ---- another rank, which is found out when the buckets come --------------------------------------


def _hooked(rank: int) -> tuple[nn.Module, commhooks.CommHook]:
    ddp = wrap(nn.Linear(24, 48), bucket_cap_mb=25)
    options = {"start_powerSGD_iter": 0, "matrix_approximation_rank": rank}
    return ddp, commhooks.attach(ddp, "batched_powerSGD", hook_options=options)


def _not_finite(ddp: nn.Module) -> None:
    ddp.zero_grad()
    ddp(torch.full((2, 24), float("nan"))).sum().backward()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_the_rows_that_both_ranks_have_are_kept(before: int, after: int) -> None:
    with process_group_of_one():
        ddp, hook = _hooked(before)
        for step in range(3):
            backward(ddp, step)
        saved = hook.state_dict()
        ((name, old),) = saved["batched_q"].items()
        new_ddp, new_hook = _hooked(after)
        backward(new_ddp, 0)
        new_hook.load_state_dict(saved)
        _not_finite(new_ddp)  # which leaves Q as it was fitted
        q = session_of(new_hook).state["q"][name]
        assert q.shape == (after, old.shape[1]) and bool(q.any(dim=1).all())
        rows = min(before, after)
        assert torch.equal(q[:rows], old[:rows])
        backward(new_ddp, 3)
        assert new_hook.stats()["nonfinite_steps"] == 1 and new_hook.stats()["step"] == 4
