"""The `commhooks` command, and what a hook says of itself."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import commhooks
from commhooks.registry import COMPRESSORS
from commhooks.tools import arguments
from commhooks.tools.cli import main
from commhooks.tools.hooks_command import explained_options
from tests.support import warm
from tests.support.ddp_steps import mlp, process_group_of_one, wrap
from tests.support.repository import REPOSITORY


def test_alone_it_prints_its_help(capsys):
    assert main([]) == 0
    assert "list the hooks and their options" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["plan", "m:f", "--exclud", "a"], "there is no flag --exclud (did you mean '--exclude'?)"),
        (["doctor", "m:f", "--step", "4"], "there is no flag --step (did you mean '--steps'?)"),
        (["network", "--js"], "there is no flag --js (did you mean '--json'?)"),
        (["--json", "network"], "write --json behind the command: commhooks network ... --json"),
        (["hooks", "powerSGD"], "unrecognized arguments: powerSGD"),
        (["--vers"], "unrecognized arguments: --vers"),
        (["hoks"], "invalid choice: 'hoks'"),
    ],
)
def test_what_no_command_takes(given: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(given)
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_help_and_completion_need_no_torch(tmp_path: Path) -> None:
    """Which takes seconds to import: here nothing can import it. Completion as bash asks argcomplete for it."""
    commands, typed = ["hooks", "plan", "doctor", "network"], "commhooks plan --wr"
    code = f"""
import contextlib, os, sys
sys.modules |= dict.fromkeys(["torch", "accelerate", "omegaconf", "rich"])
from commhooks.tools.cli import main
for arguments in ["--help"], ["--version"], *([command, "--help"] for command in {commands}):
    with contextlib.suppress(SystemExit):
        main(arguments)
os.environ |= dict(_ARGCOMPLETE="1", COMP_LINE={typed!r}, COMP_POINT="{len(typed)}", COMP_TYPE="9")
os.environ["_ARGCOMPLETE_STDOUT_FILENAME"] = "found"
main([])
"""
    run: Any = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(REPOSITORY)}, "timeout": 280}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **run)
    assert done.returncode == 0 and done.stdout.count("usage: ") == 1 + len(commands), done.stderr
    assert (tmp_path / "found").read_text().strip() == "--wrapper"


def test_what_the_arguments_repeat() -> None:
    assert "powerSGD" in arguments.hook_names() and "noop" not in arguments.hook_names()


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_names_and_options_are_whole(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["hooks"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= columns
    words = set(re.split(r"[\s│()]+", output))
    for name, hook in commhooks.available_hooks().items():
        assert name in words
        assert {f"{option}={default!r}" for option, default in hook["options"].items()} <= words
    assert {"fp16", "bf16"} <= words
    assert "wrapper='fp16' or 'bf16'" in " ".join(output.split())


def test_every_option_is_explained_and_none_is_listed_in_vain():
    explained = {name: explained_options(compressor.Config) for name, compressor in COMPRESSORS.items()}
    for name, options in explained.items():
        assert all(5 < len(text) < 200 for text in options.values() if name != "int4_compress"), name
    text = explained["powerSGD"]["matrix_approximation_rank"]
    assert text == "rank of the factors; 1 to 4 is usual, more is closer to all-reduce and sends more"
    assert explained["powerSGD"].keys() == commhooks.available_hooks()["powerSGD"]["options"].keys()
    left_out = explained["powerSGD"].keys() - explained["batched_powerSGD"].keys()
    assert left_out == {"exclude", "min_compression_rate"}
    with pytest.raises(commhooks.HookConfigError):
        commhooks.BatchedPowerSGD(exclude=["*"])


def test_the_explanation_stands_below_its_option(capsys):
    assert main(["hooks"]) == 0
    output = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "matrix_approximation_rank=1 rank of the factors; 1 to 4 is usual" in output
    assert "block_size=256 consecutive elements of a parameter that share a scale; a multiple of 16" in output


def test_as_a_module():
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [warm.python(), "-m", "commhooks", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, env=dict(os.environ))

    done = run("--version")
    assert done.returncode == 0 and done.stdout.strip() == f"commhooks {commhooks.__version__}"
    assert run("hoks").returncode == 2


def test_the_representation_of_a_hook():
    with process_group_of_one():
        ddp = wrap(mlp())
        hook = commhooks.attach(ddp, "powerSGD", hook_options={"start_powerSGD_iter": 7}, wrapper="bf16")
        text = repr(hook)
        assert text.startswith("<CommHook('powerSGD', matrix_approximation_rank=1, start_powerSGD_iter=7, ")
        assert text.endswith(", wrapper='bf16'), attached to Sequential, rank 0 of 1>")
        plain = wrap(mlp())
        assert repr(commhooks.attach(plain, "fp16")) == (
            "<CommHook('fp16_compress'), attached to Sequential, rank 0 of 1>"
        )
        del ddp
        gc.collect()
        assert "its model is gone" in repr(hook)


def test_a_reader_that_has_seen_enough() -> None:
    """As in `commhooks hooks | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [warm.python(), "-m", "commhooks", "hooks"], stdout=writing, stderr=subprocess.PIPE, timeout=280
    )
    os.close(writing)
    assert done.returncode == 1 and done.stderr == b""
