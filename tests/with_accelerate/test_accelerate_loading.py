"""Ways in which people call `accelerator.load_state` with a hook."""

from pathlib import Path
from typing import Any

import pytest
import torch

import commhooks
from accelerate_commhooks import CommHookKwargs
from tests.support.accelerate_checkpoints import assert_equal, outcome, resume
from tests.support.accelerators import WRONG, Training, launched, new_accelerator, power_sgd
from tests.support.ddp_steps import log_lines


@launched
def _load_before_prepare(folder: str) -> dict[str, Any]:
    handler = power_sgd(WRONG)
    accelerator = new_accelerator()
    handler.attach(accelerator)
    accelerator.load_state(folder)
    early = Training(handler, accelerator=accelerator)
    kept = outcome(early)
    # Accelerate restores no weights then, so these come the usual way, which must not disturb the hook.
    again = outcome(early.load(folder, 6))
    return {"kept": kept, "again": again, "trained": outcome(early.train(3))}


def test_load_before_prepare(run_ranks: Any, checkpoint: Path) -> None:
    intact = run_ranks(resume, str(checkpoint))
    for result, expected in zip(run_ranks(_load_before_prepare, str(checkpoint)), intact, strict=True):
        for when in ("kept", "again"):
            assert result[when]["stats"]["step"] == 6
            assert all(torch.equal(result[when]["residuals"][k], v) for k, v in expected["loaded"].items())
        assert_equal(result["trained"], expected)


@launched
def _rewind(folder: str) -> dict[str, Any]:
    run = Training().train(6).save(folder).train(3)
    through = outcome(run)
    run.train(2).load(folder, 6).load(folder, 6).train(3)
    return {"through": through, "rewound": outcome(run)}


def test_load_twice_and_into_a_running_hook(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_rewind, str(tmp_path)):
        assert_equal(result["through"], result["rewound"])


@launched
def _loaded_on_one_rank(folder: str) -> str:
    run = Training(power_sgd(WRONG))
    if run.accelerator.process_index == 1:
        run.accelerator.load_state(folder)
    with pytest.raises(commhooks.HookRunError) as caught:
        run.train(1)
    return str(caught.value)


def test_loading_on_some_ranks_only_is_an_error_on_all(run_ranks: Any, checkpoint: Path) -> None:
    for error in run_ranks(_loaded_on_one_rank, str(checkpoint)):
        assert "rank 0: 0, rank 1: 6" in error


@launched
def _loads_by_yaml(folder: str, file: str) -> list[str]:
    run, changed = Training(CommHookKwargs.from_config(file)), f"{file} folder"
    with log_lines() as lines:
        run.load(folder, 6).train(1).save(changed).load(changed, 7)
    return lines


def test_a_load_without_strict_says_so_each_time(run_ranks: Any, checkpoint: Path, tmp_path: Path) -> None:
    """Or `strict: false`, written once for a changed hook, would hide what goes wrong later."""
    file = tmp_path / "hook.yaml"
    file.write_text("hook: int8\nstrict: false\n")
    lines, others = run_ranks(_loads_by_yaml, str(checkpoint), str(file))
    assert sum("int8_compress: strict=False: this load leaves out what does not fit" in each for each in lines) == 2
    assert not any("strict=False" in each for each in others)
