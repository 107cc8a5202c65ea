"""Ways in which people call `accelerator.load_state` with a hook."""

from pathlib import Path
from typing import Any

import pytest

import commhooks
from accelerate_commhooks import CommHookKwargs
from tests.support.accelerate_checkpoints import assert_equal, outcome
from tests.support.accelerators import WRONG, Training, launched, power_sgd
from tests.support.ddp_steps import log_lines


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
