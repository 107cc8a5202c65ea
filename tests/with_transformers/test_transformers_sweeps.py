"""Several Trainers one after another in a process, as of a hyperparameter search."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from accelerate_commhooks.transformers import CommHookTrainer  # noqa: E402
from tests.support.accelerators import launched  # noqa: E402
from tests.support.inside import session_of  # noqa: E402
from tests.support.sweeps import CollectsGarbage, assert_nothing_piles_up, threads_after_each  # noqa: E402
from tests.support.transformers_runs import TrainerCallback, TrainingArguments  # noqa: E402

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}


def _stacked(rows: list[Any]) -> dict[str, torch.Tensor]:
    x, y = zip(*rows, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(y)}


class Works(TrainerCallback):
    """Weak references to the buffers that the hook works with."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        known = session_of(self.trainer.comm_hook).consensus.buckets
        self.refs = [weakref.ref(each.work) for each in known if each.work is not None]


@launched
def _sweep(root: str) -> list[int]:
    def train() -> None:
        works = Works()
        args = TrainingArguments(
            os.path.join(root, str(dist.get_rank())),
            use_cpu=True,
            max_steps=3,
            save_steps=2,
            per_device_train_batch_size=2,
            dataloader_num_workers=1,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            report_to="none",
        )
        trainer = CommHookTrainer(
            Regression(),
            args,
            _stacked,
            CollectsGarbage(),
            callbacks=[works],
            hook="powerSGD",
            hook_options=OPTIONS,
            save_residual="mean",
        )
        works.trainer = weakref.proxy(trainer)
        trainer.train()
        assert works.refs and not any(work() for work in works.refs)
        assert trainer.comm_hook.stats()["compressed_steps"] > 0

    return threads_after_each(train)


def test_a_sweep_leaves_nothing_behind(run_ranks: Any, tmp_path: Path) -> None:
    for threads in run_ranks(_sweep, str(tmp_path)):
        assert_nothing_piles_up(threads)


def test_a_trainer_does_not_wait_for_the_garbage_collector(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = CommHookTrainer(Regression(), args, hook="powerSGD")
    gone = [weakref.ref(each) for each in (trainer, trainer.model)]
    gc.disable()
    try:
        del trainer
        assert not any(each() for each in gone)
    finally:
        gc.enable()
