"""One compressor of each sort keeps its promises on two replicas of two shards."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from tests.support.ddp_steps import log_lines
from tests.support.features import fully_shard_on_gloo
from tests.support.kernels import computing_with
from tests.support.kind_parameters import ONE_OF_EACH
from tests.support.kinds import KINDS, START
from tests.support.models import bits_equal, same_bits
from tests.support.sharded import (
    attached,
    backward,
    learned,
    mean_over_ranks,
    random_gradients,
    whole_gradients,
)


def new(name: str, replicas: int = 2, shards: int = 2) -> tuple[nn.Module, commhooks.CommHook]:
    kind = KINDS[name]
    options = kind.options or None
    with computing_with(kind.kernel):
        return attached(
            replicas, shards, kind.hook, torch.float32, hook_options=options, wrapper=kind.wrapper
        )


def gradients(step: int, rank: int | None = None) -> dict[str, torch.Tensor]:
    return random_gradients(step, rank, torch.float32)


def equal_on_all_ranks(tensors: dict[str, torch.Tensor]) -> bool:
    mine = torch.cat([tensor.flatten() for tensor in tensors.values()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(same_bits(mine, tensor) for tensor in everyone)


# ---- replicas, bytes, steps that are not finite, and resuming ------------------------------------


def _promises(name: str) -> dict[str, bool]:
    kind = KINDS[name]
    model, hook = new(name)
    outcome = {}
    with log_lines("commhooks.comm.collectives", logging.DEBUG) as issued:
        steps = [backward(model, gradients(step)) for step in range(3)]
        before = hook.stats()
        del issued[:]
        steps.append(backward(model, gradients(3)))
        mine = [line for line in issued if "shards" not in line]
    stats = hook.stats()
    plan = hook.plan()
    outcome["replicas"] = equal_on_all_ranks(
        {str(i): g for i, of_step in enumerate(steps) for g in of_step.values()}
    )
    error = [
        (a.double() - b.double()).norm() / b.double().norm() for a, b in _with_mean(steps[0], 0)
    ]
    outcome["mean before the start"] = max(error) < (
        2e-3 if "fp16" in name else 2e-2 if "bf16" in name else 1e-6
    )
    sent = stats["bytes_sent"] - before["bytes_sent"]
    planned = plan.bytes_after + plan.flag_bytes
    most = 2000 if kind.pads or kind.layouts_matter else 0
    outcome["bytes"] = abs(sent - planned) <= most
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, mine)
    rank = dist.get_rank()
    outcome["order"] = (
        texts[rank] == texts[(rank + 2) % 4]
        and len(mine) == stats["collectives"] - before["collectives"]
    )
    if kind.learns:
        outcome["compressed"] = stats["compressed_steps"] == 4 - START and stats["step"] == 4

    # A number that is not finite on one rank.
    learned_before = learned(hook)
    spoilt = gradients(99)
    if rank == 1:
        spoilt["even.weight"].view(-1)[-1] = float("nan")
    bad = backward(model, spoilt)
    after = learned(hook)
    for state in (learned_before, after):
        state.pop("nonfinite", None)
    outcome["told"] = not all(bool(gradient.isfinite().all()) for gradient in bad.values())
    outcome["nothing changed"] = bits_equal(learned_before, after)

    # Resuming in a new hook.
    saved = hook.state_dict()
    other, again = new(name)
    again.load_state_dict(saved)
    whole, resumed = backward(model, gradients(4)), backward(other, gradients(4))
    outcome["resumed"] = bits_equal(whole, resumed)
    ours, theirs = learned(hook), learned(again)
    outcome["remembered"] = bits_equal(ours, theirs)
    outcome["gradients"] = whole_gradients(model).keys() == whole.keys()
    return outcome


def _with_mean(got: dict[str, torch.Tensor], step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    expected = mean_over_ranks(step, 4)
    return [(got[name], expected[name]) for name in got]


@fully_shard_on_gloo
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_promises_hold_on_shards(run_ranks: Any, name: str) -> None:
    for outcome in run_ranks(_promises, name, world_size=4):
        assert all(outcome.values()), [promise for promise, kept in outcome.items() if not kept]
