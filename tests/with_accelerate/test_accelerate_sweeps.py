"""Several accelerators one after another in a process: what a training leaves behind when its model is released."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.accelerators import accelerate_launched, new_accelerator, power_sgd
from tests.support.sweeps import assert_nothing_piles_up, loader, threads_after_each

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


def _sweep(root: str) -> list[int]:
    hooks: list[weakref.ref[Any]] = []

    def train() -> None:
        with accelerate_launched():
            handler = power_sgd(OPTIONS, save_residual="mean")
            accelerator = new_accelerator(handler)
            net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8))
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for x, y in loader():
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(root)
            assert handler.attached.stats()["compressed_steps"] > 0
            hooks.append(weakref.ref(handler.attached))
            model, optimizer = accelerator.free_memory(model, optimizer)
            assert hooks[-1]() is None and handler.attached is None

    return threads_after_each(train)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sweep_leaves_nothing_behind(run_ranks: Any, tmp_path: Path, world_size: int) -> None:
    for threads in run_ranks(_sweep, str(tmp_path), world_size=world_size):
        assert_nothing_piles_up(threads)
