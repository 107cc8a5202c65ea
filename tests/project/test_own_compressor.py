"""A user's compressor works in every front end without any other change."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from accelerate_commhooks import CommHookKwargs
from commhooks import HookConfigError, registry
from commhooks.tools.cli import main
from lightning_commhooks import CommHookDDP
from tests.support import warm
from tests.support.accelerators import Training, launched
from tests.support.inside import session_of
from tests.support.lightning_support import assert_equal, fit, path_at, residuals
from tests.support.repository import REPOSITORY
from tests.support.workers import WorkerPool

PATH = "examples.random_k:RandomKCompressor"
OPTIONS = {"share": 0.2, "start_iter": 2}
EVERYWHERE = {"hook": PATH, "hook_options": OPTIONS}


@pytest.fixture(scope="module", autouse=True)
def registered_here_only(worker_pool: WorkerPool) -> Iterator[None]:
    """Other tests list all compressors that there are."""
    with mock.patch.dict(registry.COMPRESSORS):
        yield
    sys.modules.pop("examples.random_k", None)  # so that an import registers it again
    worker_pool.close()  # those that come after them know no more than the built-in ones


# ---- Lightning -----------------------------------------------------------------------------------


def test_lightning_resumes_bit_equal(run_ranks: Any, tmp_path: Path) -> None:
    through = run_ranks(fit, str(tmp_path), save=True, save_residual="per_rank", **EVERYWHERE)
    resumed = run_ranks(
        fit,
        str(tmp_path),
        ckpt_path=path_at(tmp_path, 8),
        seed=9,
        save_residual="per_rank",
        **EVERYWHERE,
    )
    for run, again in zip(through, resumed, strict=True):
        assert_equal(run["final"], again["final"])
        assert again["warnings"] == [] and again["stats"]["compressed_steps"] == 8
        assert any(residual.any() for residual in residuals(again["hook state"]).values())


def test_lightning_cli_reads_it() -> None:
    """By its path or name in a YAML file."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(CommHookDDP, "strategy")
    for hook in (PATH, "random_k"):
        init_args = {"hook": hook, "hook_options": OPTIONS}
        content = {
            "strategy": {"class_path": "lightning_commhooks.CommHookDDP", "init_args": init_args}
        }
        made = parser.instantiate(parser.parse_string(yaml.safe_dump(content)))
        request = made.strategy._request
        assert request.name == "random_k" and request.config.share == 0.2
    with pytest.raises(
        HookConfigError, match=r"hook 'random_k' has no option 'shares' \(did you mean 'share'\?\)"
    ):
        CommHookDDP(hook="random_k", hook_options={"shares": 0.2})


HELP = """
import examples.random_k
from jsonargparse import ArgumentParser
from lightning_commhooks import CommHookDDP

parser = ArgumentParser()
parser.add_subclass_arguments(CommHookDDP, "strategy")
config = {"class_path": "examples.random_k.RandomK", "init_args": {"share": 0.3}}
strategy = {"class_path": "lightning_commhooks.CommHookDDP", "init_args": {"hook": config}}
made = parser.parse_object({"strategy": strategy})
assert parser.instantiate(made).strategy._request.config.share == 0.3
ours = "--strategy=lightning_commhooks.CommHookDDP"
parser.parse_args([ours, "--strategy.hook.help=examples.random_k.RandomK"])
"""


def test_help_explains_it_once_it_is_registered() -> None:
    """LightningCLI takes its config class if it was imported before `lightning_commhooks`."""
    command = [warm.python("lightning.pytorch"), "-c", HELP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "of the elements of each parameter that travel in a step" in " ".join(
        done.stdout.split()
    )


# ---- Accelerate ----------------------------------------------------------------------------------


@launched
def _accelerate(folder: Path, file: Path) -> dict[str, Any]:
    run = Training(CommHookKwargs.from_config(file)).train(4).save(folder)
    again = Training.resumed(folder, 4, CommHookKwargs.from_config(file))
    return {
        "whole": run.train(4).weights(),
        "resumed": again.train(4).weights(),
        "stats": again.hook.stats(),
        "residuals": sum(
            float(residual.norm()) for residual in session_of(again.hook).state["residual"].values()
        ),
    }


def test_accelerate_resumes_bit_equal(run_ranks: Any, tmp_path: Path) -> None:
    file = tmp_path / "hook.yaml"
    file.write_text(yaml.safe_dump(EVERYWHERE | {"bucket_cap_mb": 0.001}))
    for rank in run_ranks(_accelerate, tmp_path / "state", file):
        assert torch.equal(rank["whole"], rank["resumed"])
        assert (
            rank["stats"]["hook"] == "random_k"
            and rank["stats"]["compressed_steps"] == 4
            and rank["residuals"] > 0
        )


# ---- commands ------------------------------------------------------------------------------------


def test_the_commands_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    plan = [
        "plan",
        "tests.support.plan_models:build_mlp",
        "--hook",
        PATH,
        "--options",
        "share=0.05",
        "start_iter=0",
    ]
    assert main([*plan, "--json"]) == 0
    plan_shown = json.loads(capsys.readouterr().out)
    assert (
        plan_shown["hook"] == "random_k"
        and plan_shown["bytes_after"] < plan_shown["bytes_before"] / 10
    )
    assert main(plan) == 0 and "Memory per rank" in capsys.readouterr().out
    assert main(["hooks"]) == 0 and "random_k" in capsys.readouterr().out
