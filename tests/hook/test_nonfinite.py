"""If no GradScaler skips a non-finite step, one warning names the rank and the parameter."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from tests.support.ddp_steps import batch, log_lines, mlp, wrap
from tests.support.sharded import attached, random_gradients
from tests.support.sharded import backward as sharded_backward

BAD_STEP = 2


def _trained(
    hook: str, bad: str, ddp: dict[str, Any], more: dict[str, Any]
) -> tuple[list[str], float]:
    """Two bad steps of rank 1, the second one after others. Returns the lines and the loss at the
    end.
    """
    with log_lines("commhooks.hook.nonfinite") as lines:
        model = wrap(mlp(), **ddp)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=bad == "scaled")
        scale = scaler.get_scale if "scaled" in bad else None
        made = commhooks.attach(model, hook, loss_scale=scale, **more)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(5):
            loss = model(batch(step)).square().mean()
            if dist.get_rank() == 1 and step in (BAD_STEP, 4):
                loss = loss * float("nan")
            elif bad == "overflow" and step == BAD_STEP:
                loss = loss * 1e38
            assert len(lines) <= (step > BAD_STEP)
            scaler.scale(loss).backward()
            if bad == "guarded":
                norm = nn.utils.get_total_norm(
                    [
                        parameter.grad
                        for parameter in model.parameters()
                        if parameter.grad is not None
                    ]
                )
                if norm.isfinite():
                    optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        made.close()
    return lines, float(sum(parameter.sum() for parameter in model.parameters()))


NAMED = (
    "the gradients of backward pass 3 are not finite on rank 1 (0.weight), so their average is not"
    " finite on any"
)
OPTIONS: dict[str, dict[str, Any]] = {
    "powerSGD": {"hook_options": {"start_powerSGD_iter": 1}},
    "batched_powerSGD": {"hook_options": {"start_powerSGD_iter": 1}},
}


@pytest.mark.parametrize(
    "hook", ["allreduce", "bf16", "fp16", "int8", "int4", "powerSGD", "batched_powerSGD", "auto"]
)
def test_every_hook_names_the_rank_and_the_parameter_once(run_ranks: Any, hook: str) -> None:
    (on_0, end), (on_1, _) = run_ranks(_trained, hook, "ruined", {}, OPTIONS.get(hook, {}))
    assert [line.startswith(f"commhooks: {NAMED}") for line in on_0] == [True] and on_1 == []
    assert end != end  # as it says


@pytest.mark.parametrize("hook", ["int8", "bf16"])
def test_a_guard_of_two_lines_skips_the_steps_on_all_ranks(run_ranks: Any, hook: str) -> None:
    (on_0, end), (_, other) = run_ranks(_trained, hook, "guarded", {}, {})
    assert len(on_0) == 1 and end == other


@pytest.mark.parametrize(("bad", "warns"), [("scaled", False), ("scaled, disabled", True)])
def test_a_grad_scaler_that_skips_needs_no_warning(run_ranks: Any, bad: str, warns: bool) -> None:
    (on_0, end), _ = run_ranks(_trained, "int8", bad, {}, {})
    assert len(on_0) == warns and (end != end) == warns


def test_hooks_that_send_nothing_or_do_not_average_gradients_do_not_warn(run_ranks: Any) -> None:
    for hook, options in (("noop", {}), ("diloco", {"hook_options": {"sync_every": 2}})):
        assert [lines for lines, _ in run_ranks(_trained, hook, "ruined", {}, options)] == [[], []]


@pytest.mark.parametrize(
    ("hook", "bad", "ddp", "blame"),
    [
        (
            "int8",
            "ruined",
            {"gradient_as_bucket_view": True},
            "on some rank (in the average the first parameter is ",
        ),
        (
            "bf16",
            "ruined",
            {"gradient_as_bucket_view": True},
            "on some rank (in the average the first parameter is ",
        ),
        ("bf16", "ruined", {"static_graph": True}, "on rank 1 (0.weight), so"),
        ("int8", "ruined", {"find_unused_parameters": True}, "on rank 1 (0.weight), so"),
        ("fp16", "overflow", {}, "on rank 1 (0.weight), so"),
    ],
)
def test_a_bad_step_is_named_in_every_mode_of_ddp(
    run_ranks: Any, hook: str, bad: str, ddp: dict[str, Any], blame: str
) -> None:
    (on_0, _), _ = run_ranks(_trained, hook, bad, ddp, {})
    assert len(on_0) == 1 and f"of backward pass 3 are not finite {blame}" in on_0[0]


def _overflow() -> list[str]:
    with log_lines("commhooks.hook.nonfinite") as lines:
        model = wrap(mlp())
        commhooks.attach(model, "fp16")
        (model(batch(0)).square().mean() * 1e7).backward()
    return lines


def test_an_overflow_on_the_wire_alone_is_named_as_such(run_ranks: Any) -> None:
    (line,), others = run_ranks(_overflow)
    assert (
        "of backward pass 1 are not finite once they are added up or rounded for the wire, so"
        in line
    )
    assert others == []


def _of_shards(hook: str) -> list[str]:
    with log_lines("commhooks.hook.nonfinite") as lines:
        model, made = attached(2, 2, hook)
        for step in range(2):
            gradients = random_gradients(step)
            if step == 1 and dist.get_rank() == 3:
                gradients["even.weight"][-1] = float("inf")
            sharded_backward(model, gradients)
        made.close()
    return lines


@pytest.mark.parametrize("hook", ["int8", "bf16"])
def test_a_bad_step_is_named_on_shards(run_ranks: Any, hook: str) -> None:
    lines = run_ranks(_of_shards, hook, world_size=4)
    (line,) = sum(lines, [])
    assert (
        "of backward pass 2 are not finite on some rank (in the average the first parameter is "
        in line
    )
    assert bool(lines[0]) == (hook == "int8")  # bf16: on the first rank with this shard
