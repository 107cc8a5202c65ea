"""One rank: all strategies say the same line, which claims no savings. (Without Lightning: `test_start_step.py`; with
Accelerate, which wraps no model then: `test_accelerate_log.py`, `test_transformers_settings.py`.)"""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.fabric
import lightning.pytorch
import pytest
import pytorch_lightning
import torch

import lightning_commhooks.fabric
import lightning_commhooks.pytorch_lightning
from tests.support.ddp_steps import log_lines
from tests.support.kernels import computing_with
from tests.support.lightning_support import data

HOOK = {"hook": "powerSGD", "hook_options": {"start_powerSGD_iter": 1}}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def _fit(package: Any, ours: Any) -> None:
    class Model(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(16, 8)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    strategy = ours.CommHookDDP(**HOOK, process_group_backend="gloo")
    package.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET).fit(Model(), data())


def _fabric() -> None:
    fabric = lightning.fabric.Fabric(accelerator="cpu", strategy=lightning_commhooks.fabric.CommHookDDP(**HOOK))
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(16, 8))
    fabric.backward(model(torch.ones(2, 16)).sum())


FRONTS: dict[str, Callable[[], None]] = {
    "lightning.pytorch": lambda: _fit(lightning.pytorch, lightning_commhooks),
    "pytorch_lightning": lambda: _fit(pytorch_lightning, lightning_commhooks.pytorch_lightning),
    "Fabric": _fabric,
}


@computing_with("torch")
def _said(front: str) -> list[str]:
    with mock.patch.dict(os.environ), log_lines() as lines:  # Lightning sets variables for processes that it starts
        FRONTS[front]()
    return [line for line in lines if line.startswith("commhooks: ")]


@pytest.mark.parametrize("front", FRONTS)
def test_one_rank_is_told_alike(run_ranks: Any, front: str) -> None:
    [lines] = run_ranks(_said, front, world_size=1)
    assert lines == [
        "commhooks: powerSGD (rank 1): there is one rank, so nothing is sent. From step 1 on the gradients are "
        "compressed as among several, so that the run can go on with any number of them; hook=None trains on "
        "exact gradients"
    ]
