"""The hooks without memory, and both wrappers around every hook: against plain averages of the
ranks' own gradients.

Annotations are real objects here (no `from __future__ import annotations`): torch's
`register_comm_hook` compares them.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as torch_hooks

import commhooks
from tests.support.ddp_steps import (
    backward,
    descend,
    errors_of_means,
    gradients,
    local_gradients,
    mlp,
    replicas_equal,
    wrap,
)

WRAPPERS = {"fp16": commhooks.fp16_compress_wrapper, "bf16": commhooks.bf16_compress_wrapper}
# Relative error of a gradient: cast, divided and summed in that dtype.
ROUNDING = {None: 1e-6, "fp16": 1e-3, "bf16": 1e-2}


SIMPLE: dict[str, tuple[Callable[..., Any], str | None]] = {
    "allreduce_hook": (commhooks.allreduce_hook, None),
    "fp16_compress_hook": (commhooks.fp16_compress_hook, "fp16"),
    "bf16_compress_hook": (commhooks.bf16_compress_hook, "bf16"),
}


def averages() -> None:
    """torch's wrappers hang on gloo with several buckets, so the mean is the reference."""
    for (name, (function, own_wire)), wrapper in itertools.product(
        SIMPLE.items(), (None, "fp16", "bf16")
    ):
        wire = "bf16" if "bf16" in (own_wire, wrapper) else own_wire or wrapper
        ddp = wrap(mlp())
        ddp.register_comm_hook(None, WRAPPERS[wrapper](function) if wrapper else function)
        errors = errors_of_means(ddp, 2)
        assert max(errors) <= ROUNDING[wire], (name, wrapper)
        # a wire of 16 bits must show
        assert (min(errors) <= 1e-6) == (wire is None), (
            name,
            wrapper,
        )


def test_results_are_plain_averages(run_ranks):
    run_ranks(averages)


def no_communication(wrapper: str | None) -> None:
    ddp = wrap(mlp())
    ddp.register_comm_hook(
        None, WRAPPERS[wrapper](commhooks.noop_hook) if wrapper else commhooks.noop_hook
    )
    for step in range(2):
        local = local_gradients(ddp, partial(backward, step=step))
        backward(ddp, step)
        for name, gradient in gradients(ddp).items():
            expected = local[name]
            if wrapper:
                expected = expected.to(
                    {"fp16": torch.float16, "bf16": torch.bfloat16}[wrapper]
                ).float()
            assert torch.equal(gradient, expected)
        assert not replicas_equal(ddp)


@pytest.mark.parametrize("wrapper", [None, "bf16"])
def test_noop_leaves_each_rank_its_own_gradient(run_ranks, wrapper):
    run_ranks(no_communication, wrapper)


# ---- bit for bit ---------------------------------------------------------------------------------


def gradients_under(state: Any, hook: Callable[..., Any] | None) -> list[dict[str, torch.Tensor]]:
    ddp = wrap(mlp())
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    results = []
    for step in range(2):
        backward(ddp, step)
        results.append(gradients(ddp))
        descend(ddp)
    return results


def _same(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)


def as_torch() -> None:
    averaged = gradients_under(None, torch_hooks.allreduce_hook)
    assert _same(averaged, gradients_under(None, commhooks.allreduce_hook))
    assert _same(averaged, gradients_under(dist.group.WORLD, commhooks.allreduce_hook))
    if dist.get_world_size() == 2:  # with 3, DDP without a hook multiplies by a rounded third
        assert _same(averaged, gradients_under(None, None))
    half = gradients_under(None, torch_hooks.fp16_compress_hook)
    assert _same(half, gradients_under(None, commhooks.fp16_compress_hook))
    assert _same(
        half, gradients_under(None, commhooks.fp16_compress_wrapper(commhooks.allreduce_hook))
    )
    brain = gradients_under(None, commhooks.bf16_compress_hook)
    assert _same(
        brain, gradients_under(None, commhooks.bf16_compress_wrapper(commhooks.allreduce_hook))
    )
    assert not _same(averaged, half) and not _same(half, brain)


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_equal_torch_bit_for_bit(run_ranks, world_size):
    run_ranks(as_torch, world_size=world_size)
