"""Accelerate's own test of communication hooks, with `CommHookKwargs` in the place of its own handler.

It compares one backward pass with that of plain DDP, but PowerSGD starts after 1000 of them, and its tolerance (0.01)
is larger than its gradients. So here are cases that start at once, and a comparison that can fail.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import DDPCommunicationHookType as Hook
from accelerate import DistributedDataParallelKwargs
from accelerate.test_utils.scripts import test_ddp_comm_hook as stock

from accelerate_commhooks import CommHookKwargs
from tests.support.accelerators import launched

AT_ONCE = [
    (
        Hook.POWER_SGD,
        wrapper,
        {"matrix_approximation_rank": rank, "start_powerSGD_iter": 0, "min_compression_rate": 0.1},
    )
    for wrapper in (Hook.NO, Hook.FP16, Hook.BF16)
    for rank in (2, 20)  # the gradient is a matrix of 40 x 20: rank 20 loses nothing
] + [(Hook.BATCHED_POWER_SGD, Hook.NO, {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0})]


def stock_cases() -> list[tuple[Any, Any, dict[str, Any]]]:
    """What the `main` of Accelerate's script goes through."""
    cases: list[tuple[Any, Any, dict[str, Any]]] = []
    with (
        mock.patch.object(stock, "test_ddp_comm_hook", lambda *case: cases.append(case)),
        mock.patch.object(stock, "PartialState"),
    ):
        stock.main()
    return cases


class OnCPU(torch.nn.parallel.DistributedDataParallel):
    """Their reference names a GPU, which DDP refuses for a model on the CPU."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)


@launched
def _run(case: tuple[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    handlers: list[Any] = []

    def handler(**kwargs: Any) -> Any:
        # Without a hook ours has nothing to do, and says so.
        plain = kwargs["comm_hook"] is Hook.NO
        handlers.append((DistributedDataParallelKwargs if plain else CommHookKwargs)(**kwargs))
        return handlers[-1]

    found: dict[str, Any] = {"stats": None}

    def compare(ours: torch.Tensor, reference: torch.Tensor, **tolerance: float) -> None:
        if getattr(handlers[0], "attached", None) is not None:
            found["stats"] = handlers[0].attached.stats()
        found["error"] = ((ours - reference).norm() / reference.norm()).item()
        theirs(ours, reference, **tolerance)

    theirs = torch.testing.assert_close
    with (
        mock.patch.object(stock, "DistributedDataParallelKwargs", handler),
        mock.patch.object(torch.nn.parallel, "DistributedDataParallel", OnCPU),
        mock.patch.object(torch.testing, "assert_close", compare),
    ):
        stock.test_ddp_comm_hook(*case)
    return found


def tolerance(hook: Hook, wrapper: Hook, options: dict[str, Any]) -> float:
    rounded = {Hook.FP16: 1e-3, Hook.BF16: 1e-2}
    return rounded.get(hook, rounded.get(wrapper, 1e-5))


@pytest.mark.parametrize("case", [*stock_cases(), *AT_ONCE], ids=lambda case: " ".join(str(each) for each in case))
def test_case(case: tuple[Any, Any, dict[str, Any]], run_ranks: Any) -> None:
    hook, _, options = case
    compressed = "start_powerSGD_iter" in options
    for found in run_ranks(_run, case):
        if hook is Hook.NO:
            assert found["stats"] is None
        else:
            assert found["stats"]["backward_passes"] == 1
            assert (found["stats"]["compressed_steps"] or 0) == compressed
        if compressed and options["matrix_approximation_rank"] == 2:
            assert 0.1 < found["error"] < 1  # a part of the gradient
        else:
            assert found["error"] <= tolerance(*case)


def test_it_has_cases() -> None:
    assert len(stock_cases()) >= 10
