"""Several Trainers one after another in a process, and what each leaves behind."""

import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint

from commhooks import PowerSGD
from lightning_commhooks import fabric as ours
from lightning_commhooks.checkpoint import CHECKPOINT_KEY
from tests.support.inside import session_of
from tests.support.lightning_support import (
    SEVERAL_BUCKETS_MB,
    Model,
    PoolEnvironment,
    strategy,
    trainer,
)
from tests.support.sweeps import assert_nothing_piles_up, loader, threads_after_each

HOOK = PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2)


class Works(pl.Callback):
    """Weak references to the buffers that the hook works with."""

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        buckets = session_of(trainer.strategy.comm_hook).consensus.buckets
        self.refs = [weakref.ref(bucket.work) for bucket in buckets if bucket.work is not None]


def _fit(root: str) -> pl.Trainer:
    works = Works()
    callbacks = [works, ModelCheckpoint(root, filename="last", enable_version_counter=False)]
    run = trainer(root, strategy=strategy(hook=HOOK), callbacks=callbacks, max_epochs=1)
    model = Model()
    run.fit(model, loader())
    run.validate(model, loader(), verbose=False)
    assert works.refs and not any(work() for work in works.refs)
    assert run.strategy.comm_hook.stats()["compressed_steps"] > 0
    return run


def _sweep(root: str) -> list[int]:
    return threads_after_each(lambda: _fit(root).save_checkpoint(f"{root}/after.ckpt"))


def test_a_sweep_leaves_nothing_behind(run_ranks: Any, tmp_path: Path) -> None:
    """And a save after fit is exact, though the hook is closed by then."""
    for threads in run_ranks(_sweep, str(tmp_path)):
        assert_nothing_piles_up(threads)
    last, after = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("last", "after")
    )
    assert after[CHECKPOINT_KEY]["exact"] and after[CHECKPOINT_KEY]["residual"] == "mean"
    for name, entry in last[CHECKPOINT_KEY]["parameters"].items():
        if entry["residual"] is not None:
            assert torch.equal(
                entry["residual"], after[CHECKPOINT_KEY]["parameters"][name]["residual"]
            )


def _fabric(root: str) -> list[int]:
    def train() -> None:
        strategy = ours.CommHookDDP(
            HOOK,
            bucket_cap_mb=SEVERAL_BUCKETS_MB,
            cluster_environment=PoolEnvironment(),
            process_group_backend="gloo",
        )
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8))
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y in loader():
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
        fabric.save(f"{root}/state.ckpt", {"model": model})
        hooks.append(weakref.ref(strategy.hook_of(model)))

    hooks: list[weakref.ref[Any]] = []
    threads = threads_after_each(train)
    gc.collect()  # Fabric's own objects refer to each other
    assert not any(hook() for hook in hooks)
    return threads


def test_a_sweep_with_fabric_leaves_nothing_behind(run_ranks: Any, tmp_path: Path) -> None:
    for threads in run_ranks(_fabric, str(tmp_path)):
        assert_nothing_piles_up(threads)
