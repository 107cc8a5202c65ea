"""Rank 0 says once, by name, which trained parameters nothing averages."""

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.gradients.ddp import DDPGradients
from commhooks.hook.late_parameters import LateParameters
from tests.support.ddp_steps import backward, log_lines, mlp, wrap
from tests.support.sharded import Prescribed, mesh_of

LATE = (
    "commhooks: 2 parameters (the first is {}) were frozen or missing when the hook was attached"
    " and are trained now"
)


def _trained(hook: str, change: str) -> list[str]:
    model = mlp()
    model[0].requires_grad_(change == "none")
    ddp = wrap(model)
    with log_lines("commhooks.hook.late_parameters") as lines:
        attached = commhooks.attach(ddp, hook)
        for step in range(5):
            if step == 3 and change == "unfrozen":
                model[0].requires_grad_(True)
            elif step == 0 and change == "added":
                model.append(nn.Linear(24, 24))
            assert len(lines) <= (step > 3 or change == "added")
            backward(ddp, step)
        attached.close()
    return lines


@pytest.mark.parametrize("hook", ["powerSGD", "bf16", "diloco"])
@pytest.mark.parametrize("change", ["unfrozen", "added", "none"])
def test_parameters_that_are_trained_after_attach_are_named_once(
    run_ranks: Any, hook: str, change: str
) -> None:
    on_0, on_1 = run_ranks(_trained, hook, change)
    first = {"unfrozen": "0.weight", "added": "5.weight"}
    assert [line.startswith(LATE.format(first[change])) for line in on_0] == (
        [] if change == "none" else [True]
    )
    assert on_1 == []


def _not_sharded(ignored: bool) -> list[str]:
    mesh = mesh_of(2, 1)
    model = Prescribed()
    part = model.get_parameter("even.weight")
    torch.distributed.fsdp.fully_shard(
        model, mesh=mesh["shard"], ignored_params={part} if ignored else None
    )
    with log_lines("commhooks.hook.late_parameters") as lines:
        commhooks.attach(model, "powerSGD", replicate_group=mesh["replicate"]).close()
    return lines


@pytest.mark.parametrize("ignored", [False, True])
def test_parameters_that_are_trained_and_not_sharded_are_named_once(
    run_ranks: Any, ignored: bool
) -> None:
    on_0, on_1 = run_ranks(_not_sharded, ignored)
    expected = (
        "commhooks: even.weight: trained, but not sharded, so their gradients are not averaged"
    )
    assert [line.startswith(expected) for line in on_0] == [True] * ignored
    assert on_1 == []


def _look() -> float:
    """The microseconds per pass with 1,000 frozen parameters and one that is trained."""
    model = nn.ParameterList(
        [nn.Parameter(torch.zeros(1), requires_grad=number == 0) for number in range(1001)]
    )
    look = LateParameters(DDPGradients(DistributedDataParallel(model)))
    look.before_pass()
    times = []
    for _ in range(50):
        before = time.perf_counter()
        look.before_pass()
        times.append(time.perf_counter() - before)
    return 1e6 * sorted(times)[10]


def test_a_look_takes_microseconds(run_ranks: Any) -> None:
    assert min(run_ranks(_look)) < 500
