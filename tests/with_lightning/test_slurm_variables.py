"""SLURM's variables, set by hand: Lightning takes rank and world size from them, and the hook is attached and resumes.
No cluster is used."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.lightning_support import Model, assert_equal, data, trainer, weights


def _variables() -> dict[str, str]:
    """Those of `srun --ntasks-per-node=2` that Lightning 2.6 reads."""
    rank = str(dist.get_rank())
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",  # "bash" and "interactive" would mean that nothing was started by srun
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
    }


def _fits(root: str) -> dict[str, Any]:
    with mock.patch.dict(os.environ, _variables()):
        for epochs in (1, 2):
            saver = ModelCheckpoint(root, save_last=True)
            run = trainer(root, pool=False, callbacks=[saver], max_epochs=epochs)
            model = Model(seed=epochs)
            run.fit(model, data(), ckpt_path="last")
        return {
            "environment": type(run.strategy.cluster_environment).__name__,
            "place": (run.global_rank, run.world_size),
            "stats": run.strategy.comm_hook.stats(),
            "weights": weights(model),
        }


def test_a_training_started_by_srun_has_its_hook_and_resumes(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_fits, str(tmp_path))
    for number, rank in enumerate(ranks):
        assert rank["environment"] == "SLURMEnvironment" and rank["place"] == (number, 2)
        assert rank["stats"]["step"] == 8 and rank["stats"]["backward_passes"] == 4  # since the resume
        assert_equal(rank["weights"], ranks[0]["weights"])
