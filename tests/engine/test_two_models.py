"""Two DDP models with a hook each in one process.

gloo and NCCL match collectives by their order alone, so every rank must issue the same ones in the
same order, and the hooks must leave each other's memory alone: each model's gradients are, bit for
bit, those that it has by itself.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.ddp_steps import gradients
from tests.support.models import (
    EVERY_PARAMETER,
    Gradients,
    Prescribed,
    bits_equal,
    random_gradients,
)

STEPS = 6
Sent = list[tuple[int, torch.dtype, bool]]


@contextmanager
def all_reduces() -> Iterator[Sent]:
    """Record elements, dtype and asynchrony of each all-reduce that this rank issues."""
    sent: Sent = []
    original = dist.all_reduce

    def recording(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        sent.append((tensor.numel(), tensor.dtype, async_op))
        return original(tensor, *args, async_op=async_op, **kwargs)

    with mock.patch("torch.distributed.all_reduce", recording):
        yield sent


# ---- two backward passes in one autograd graph ---------------------------------------------------


class Chain(Prescribed):
    """Adds to `x` half of its parameters (times the gradient to give them), what `inner` makes of
    that, and the rest.

    The backward pass goes the other way: the second half, all of `inner`, and then the first half.
    """

    def forward(
        self, prescribed: Gradients, x: torch.Tensor, inner: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        pairs = [(parameter, prescribed[name]) for name, parameter in self.named_parameters()]
        half = len(pairs) // 2
        for parameter, gradient in pairs[:half]:
            x = x + (parameter * gradient).sum()
        x = inner(x)
        for parameter, gradient in pairs[half:]:
            x = x + (parameter * gradient).sum()
        return x


OUTER = {
    "first": (24, 16),
    "first_bias": (24,),
    "second": (10, 40),
    "third": (24, 16),
    "third_bias": (24,),
}
INNER = {"first": (24, 16), "second": (12, 30), "second_bias": (12,), "third": (10, 40)}
CONFIGS = {
    "outer": (OUTER, commhooks.PowerSGD(matrix_approximation_rank=1, start_powerSGD_iter=2), None),
    "inner": (
        INNER,
        commhooks.PowerSGD(matrix_approximation_rank=3, start_powerSGD_iter=0),
        "bf16",
    ),
}


def _hooked(name: str) -> tuple[DistributedDataParallel, commhooks.CommHook]:
    shapes, config, wrapper = CONFIGS[name]
    ddp = DistributedDataParallel(Chain(shapes), bucket_cap_mb=EVERY_PARAMETER)
    return ddp, commhooks.attach(ddp, config, wrapper=wrapper)


def _prescribed(name: str, step: int) -> Gradients:
    return random_gradients(CONFIGS[name][0], dist.get_rank() + 10 * (name == "inner"), step)


def _alone(name: str) -> tuple[list[Gradients], dict[str, Any], dict[str, Any]]:
    ddp, hook = _hooked(name)
    results = []
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(_prescribed(name, step), torch.zeros(()), lambda x: x).backward()
        results.append(gradients(ddp))
    return results, hook.state_dict("per_rank"), hook.stats()


def _together(nested: bool) -> Any:
    outer, outer_hook = _hooked("outer")
    inner, inner_hook = _hooked("inner")
    results: dict[str, list[Gradients]] = {"outer": [], "inner": []}
    with all_reduces() as sent:
        for step in range(STEPS):
            outer.zero_grad(), inner.zero_grad()
            ours, others = _prescribed("outer", step), _prescribed("inner", step)

            def run_inner(x: torch.Tensor, others: Gradients = others) -> torch.Tensor:
                return inner(others, x, lambda x: x)

            if nested:
                loss = outer(ours, torch.zeros(()), run_inner)
            else:
                loss = run_inner(outer(ours, torch.zeros(()), lambda x: x))
            loss.backward()
            results["outer"].append(gradients(outer))
            results["inner"].append(gradients(inner))
    return {
        "outer": (results["outer"], outer_hook.state_dict("per_rank"), outer_hook.stats()),
        "inner": (results["inner"], inner_hook.state_dict("per_rank"), inner_hook.stats()),
        "sent": sent,
    }


def _together_and_alone(nested: bool) -> Any:
    return _together(nested), {name: _alone(name) for name in CONFIGS}


def _state_tensors(state: dict[str, Any]) -> Gradients:
    tensors = {}
    for name, entry in state["parameters"].items():
        if entry["q"] is not None:
            tensors |= {f"Q of {name}": entry["q"], f"residual of {name}": entry["residual"][0]}
    return tensors


def _counts(stats):
    """Without the clocks."""
    return {
        name: value
        for name, value in stats.items()
        if not name.startswith(("codec_s", "waiting_s"))
    }


@pytest.mark.parametrize(
    "nested", [False, True], ids=["one after the other", "one in the middle of the other"]
)
def test_two_models_in_one_graph_are_averaged_as_alone(run_ranks, nested):
    ranks = run_ranks(_together_and_alone, nested)
    for together, alone in ranks:
        for name, (shapes, config, _) in CONFIGS.items():
            averaged, state, stats = together[name]
            expected, expected_state, expected_stats = alone[name]
            assert all(map(bits_equal, averaged, expected)), name
            matrices = sum(len(shape) > 1 for shape in shapes.values())
            assert len(_state_tensors(state)) == 2 * matrices
            assert bits_equal(_state_tensors(state), _state_tensors(expected_state)), name
            assert stats["compressed_steps"] == STEPS - config.start_powerSGD_iter
            assert stats["collectives_last_pass"] == len(shapes) + matrices, (
                "a bucket per parameter"
            )
            assert _counts(stats) == _counts(expected_stats)
        wires = [dtype for _, dtype, asynchronous in together["sent"] if asynchronous]
        # One run of outer, one of inner and so on; nested, outer's continues behind inner's.
        last = [dtype for dtype, _ in itertools.groupby(wires)][-3 if nested else -2 :]
        assert last == ([torch.float32] if nested else []) + [torch.bfloat16, torch.float32]
    assert ranks[0][0]["sent"] == ranks[1][0]["sent"], "every rank issues the same sequence"
    for name in CONFIGS:
        assert all(map(bits_equal, ranks[0][0][name][0], ranks[1][0][name][0]))
