"""`CommHookKwargs(hook=None)` is DDP without a hook; so is `hook: null` in a file, whatever else the file says."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.settings import VARIABLE, Settings
from tests.support.accelerate_checkpoints import train_and_save, truncate
from tests.support.accelerators import Training, Warnings, hook_files, launched
from tests.support.ddp_steps import log_lines
from tests.support.training import SEVERAL_BUCKETS_MB


@launched
def _trained(folder: str, variable: str) -> dict[str, Any]:
    plain = Training(DistributedDataParallelKwargs(bucket_cap_mb=SEVERAL_BUCKETS_MB)).train(4)
    with log_lines() as lines, Warnings() as warned:
        run = Training(CommHookKwargs(hook=None, bucket_cap_mb=SEVERAL_BUCKETS_MB)).train(4).save(folder)
        run.load(folder, 4)
    with mock.patch.dict(os.environ, {VARIABLE: variable}):
        from_outside = Training(CommHookKwargs()).train(4)
    return {
        "plain": plain.weights(),
        "none": run.weights(),
        "outside": from_outside.weights(),
        "attached": (run.handler.attached, from_outside.handler.attached, run.handler.is_attached(run.model)),
        "files": hook_files(folder),
        "said": lines,
        "warned": warned,
    }


def test_it_trains_and_saves_as_plain_ddp(run_ranks: Any, tmp_path: Path) -> None:
    settings = {"hook": "none", "hook_options": {"matrix_approximation_rank": 2}, "bucket_cap_mb": SEVERAL_BUCKETS_MB}
    given = Settings(settings, "my.yaml", tmp_path / "message")
    ranks = run_ranks(_trained, str(tmp_path / "state"), given.to_environment())
    for rank in ranks:
        assert torch.equal(rank["none"], rank["plain"]) and torch.equal(rank["outside"], rank["plain"])
        assert rank["attached"] == (None, None, False) and rank["files"] == [] and rank["warned"] == []
    assert ranks[0]["said"] == ["commhooks: none: no hook, DDP averages the gradients itself"]
    assert ranks[1]["said"] == []
    assert given.message_file.read_text() == ""  # the launcher has nothing to say


@launched
def _reads(folder: str) -> None:
    given, later = CommHookKwargs(hook=None), CommHookKwargs(hook=None)
    accelerators = Accelerator(kwargs_handlers=[given]), Accelerator()
    for handler, accelerator in zip((given, later.attach(accelerators[1])), accelerators, strict=True):
        run = Training(handler, accelerator=accelerator)
        run.save(f"{folder}/own").load(f"{folder}/of a hook", 1)


def test_it_reads_no_files_of_a_hook(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(train_and_save, str(tmp_path / "of a hook"), 1, 0)
    truncate(tmp_path / "of a hook" / "comm_hook.pt")
    run_ranks(_reads, str(tmp_path))
