"""The `commhooks` command checks its arguments and imports the user's functions as scripts do."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import commhooks
from commhooks import HookConfigError
from commhooks.comm.packing import WIRE_DTYPES
from commhooks.registry import COMPRESSORS
from commhooks.tools import cli
from commhooks.tools.cli import main
from commhooks.tools.common import call
from tests.support import warm
from tests.support.ddp_steps import mlp, process_group_of_one, wrap
from tests.support.repository import REPOSITORY

MODEL = "tests.support.plan_models:build_mlp"
NO_MODEL = "tests.support.plan_models:no_model"
ERRORS = [
    # arguments, what stderr says, exit status
    (
        ["plan", "m:f", "--exclud", "a"],
        "unrecognized arguments: --exclud (did you mean '--exclude'?)",
        2,
    ),
    (
        ["plan", "m:f", "--option", "a=4"],
        "unrecognized arguments: --option (did you mean '--options'?)",
        2,
    ),
    (["hooks", "powerSGD"], "unrecognized arguments: powerSGD", 2),
    (["--vers"], "unrecognized arguments: --vers", 2),
    (["hoks"], "invalid choice: 'hoks'", 2),
    (
        ["plan", MODEL, "--hook", "powerSDG"],
        "unknown hook 'powerSDG' (did you mean 'powerSGD'?)",
        1,
    ),
    (
        ["plan", MODEL, "--options", "rank=4"],
        "no option 'rank' (did you mean 'matrix_approximation_rank'?)",
        1,
    ),
    (["plan", MODEL, "--options", "rank"], "--options rank: expected NAME=VALUE", 1),
    (
        ["plan", MODEL, "--options", "exclude=[*a*]"],
        "--options exclude=[*a*]: a value is not YAML; quote text",
        1,
    ),
    (
        ["plan", MODEL, "--options", "rank=${x}"],
        "--options rank=${x}: rank: Interpolation key 'x' not found",
        1,
    ),
    (
        ["plan", MODEL, "--options", "exclude=['a']", "--exclude", "b"],
        "give the patterns in one of them",
        1,
    ),
    (
        ["plan", MODEL, "--options", "start_powerSGD_iter=0.5"],
        "is a fraction of the run, whose length is unknown",
        1,
    ),
    (["plan", MODEL, "--hook", NO_MODEL], "is a function, whose traffic cannot be planned", 1),
    (["plan", NO_MODEL], "returned a int, not an nn.Module", 1),
    (["plan", "torch.nn:Identity"], "has no parameter that requires a gradient", 1),
]


@pytest.mark.parametrize(
    ("arguments", "says", "status"), ERRORS, ids=lambda x: " ".join(x) if type(x) is list else None
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], says: str, status: int, capsys: Any
) -> None:
    if status == 2:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    else:
        assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert (
        out == ""
        and says in err
        and (status == 2 or err.startswith("commhooks plan: ") and err.count("\n") == 1)
    )


def test_help_and_completion_need_no_torch(tmp_path: Path) -> None:
    """Which takes seconds to import: here nothing can import it. Completion as bash asks
    argcomplete for it.
    """
    commands = ["hooks", "plan", "network", "env"]
    typed = "commhooks plan --wr"
    code = f"""
import contextlib, os, sys
sys.modules |= dict.fromkeys(["torch", "accelerate", "omegaconf", "rich"])
from commhooks.tools.cli import main
for arguments in [], ["--version"], *([command, "--help"] for command in {commands}):
    with contextlib.suppress(SystemExit):
        main(arguments)
os.environ |= dict(_ARGCOMPLETE="1", COMP_LINE={typed!r}, COMP_POINT="{len(typed)}", COMP_TYPE="9")
os.environ["_ARGCOMPLETE_STDOUT_FILENAME"] = "found"
main([])
"""
    run: Any = {
        "cwd": tmp_path,
        "env": {**os.environ, "PYTHONPATH": str(REPOSITORY)},
        "timeout": 280,
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **run)
    assert done.returncode == 0 and done.stdout.count("usage: ") == 1 + len(commands), done.stderr
    assert f"commhooks {commhooks.__version__}\n" in done.stdout and "--step-ms" in done.stdout
    assert (tmp_path / "found").read_text().strip() == "--wrapper"
    assert (
        "powerSGD" in cli.hook_names()
        and "noop" not in cli.hook_names()
        and tuple(WIRE_DTYPES) == cli.WRAPPERS
    )


def test_a_reader_may_close_the_pipe() -> None:
    """As in `python -m commhooks hooks | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [warm.python(), "-m", "commhooks", "hooks"],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=280,
    )
    os.close(writing)
    assert done.returncode == 1 and done.stderr == b""


# ---- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 200])
def test_names_options_and_explanations_are_whole(
    columns: int, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["hooks"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= columns
    words = set(re.split(r"[\s│()]+", output))
    text = " ".join(output.replace("│", " ").split())
    for name, hook in commhooks.available_hooks().items():
        assert name in words
        assert {f"{option}={default!r}" for option, default in hook["options"].items()} <= words
    assert {"fp16", "bf16"} <= words and "wrapper='fp16' or 'bf16'" in text
    assert "matrix_approximation_rank=1 rank of the factors, usually 1 to 4" in text


def test_every_option_is_explained_and_none_is_listed_in_vain() -> None:
    explained = {
        name: cli.explained_options(compressor.Config) for name, compressor in COMPRESSORS.items()
    }
    for name, options in explained.items():
        assert all(5 < len(text) < 200 for text in options.values()), name
    assert explained["powerSGD"].keys() == commhooks.available_hooks()["powerSGD"]["options"].keys()
    left_out = explained["powerSGD"].keys() - explained["batched_powerSGD"].keys()
    assert left_out == {"exclude", "min_compression_rate"}


# ---- plan ----------------------------------------------------------------------------------------


def test_the_flags_of_plan_and_its_json(capsys: Any) -> None:
    options = [
        "--options",
        "matrix_approximation_rank=2",
        "start_powerSGD_iter=0.1",
        "--total-steps",
        "50",
    ]
    assert main(["plan", MODEL, *options, "--exclude", "4.*", "--wrapper", "bf16", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["hook"], plan["start_step"], plan["wire_dtype"]) == ("powerSGD", 5, "bfloat16")
    rows = {row["name"]: row for row in plan["parameters"]}
    assert (
        rows["0.weight"]["bytes_after"] == 2 * (32 + 24) * 2
        and rows["0.weight"]["bytes_before"] == 4 * 32 * 24
    )
    assert rows["4.weight"]["reason"] == "excluded by '4.*'" and rows["4.weight"]["matrix"] is None
    for total in ("bytes_before", "bytes_after"):
        assert sum(row[total] for row in rows.values()) == plan[total]
    memory = plan["memory_bytes"]
    assert memory["total"] == sum(value for key, value in memory.items() if key != "total")


def test_a_pattern_without_a_match_is_told(capsys: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["plan", MODEL, "--exclude", "0.wieght"]) == 0
    assert "matches '0.wieght' (the closest name is '0.weight')" in caplog.text


@pytest.mark.parametrize("hook", ["powerSGD", "int8", "fp16", "diloco", "auto"])
def test_it_prints_the_plan_of_the_attached_hook(hook: str, capsys: Any) -> None:
    """Memory depends on the ranks' kernel and may differ, as may checkpoints of all ranks."""

    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith(("Memory", "Residuals"))]

    with process_group_of_one():
        expected = lines(str(commhooks.attach(wrap(mlp()), hook).plan()))
    assert main(["plan", MODEL, "--hook", hook]) == 0
    assert lines(capsys.readouterr().out) == expected


def test_env_prints_what_a_bug_report_needs(capsys: Any) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    environment = json.loads(capsys.readouterr().out)
    assert (
        environment["torch"] == torch.__version__
        and "gloo" in environment["backends"]
        and environment["interfaces"]
    )
    assert environment["native kernels"] in (
        "compiled and loaded",
        "turned off by COMMHOOKS_NATIVE=0",
    )
    assert all(name in text and value in text for name, value in environment.items())


# ---- the user's functions ------------------------------------------------------------------------

SCRIPT = """
import argparse, sys
from torch import nn
{}
def build():
    print(sys.argv)
    return nn.Linear(3, 3)
class Nets:
    build = build
"""
PARSES = """
parser = argparse.ArgumentParser()
parser.add_argument("--hook", {})
hook = parser.parse_args().hook
assert hook is None
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder. Nothing of an import is left afterwards."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    argv = sys.argv
    yield tmp_path
    assert sys.path == path and sys.argv is argv
    sys.modules.pop("script_of_this_test", None)


@pytest.mark.parametrize(
    "target", ["script_of_this_test:build", "./script_of_this_test.py:Nets.build"]
)
def test_a_script_does_not_see_the_arguments_of_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    """The script may have a flag that `commhooks plan` has, too."""
    (folder / "script_of_this_test.py").write_text(SCRIPT.format(PARSES.format("default=None")))
    monkeypatch.setattr(sys, "argv", argv := ["commhooks", "plan", target, "--hook", "int8"])
    assert main() == 0
    assert repr([target.partition(":")[0]]) in capsys.readouterr().out
    assert sys.argv is argv
    monkeypatch.undo()


@pytest.mark.parametrize("ends", [PARSES.format("required=True"), "sys.exit('no data')"])
def test_a_script_that_ends_the_program_is_an_error(folder: Path, capsys: Any, ends: str) -> None:
    (folder / "script_of_this_test.py").write_text(SCRIPT.format(ends))
    argument = "'no data'" if "no data" in ends else "2"
    for arguments in (
        ["plan", "script_of_this_test:build"],
        ["plan", "torch.nn:Identity", "--hook", "script_of_this_test:build"],
    ):
        assert main(arguments) == 1
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith(
            f"commhooks plan: 'script_of_this_test:build' has called sys.exit({argument})"
        )
        assert last.endswith("belongs under `if __name__ == '__main__':`")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("plan_models.py", "is not a path: expected 'package.module:function'"),
        ("tests.support.plan_models:", "expected 'package.module:function' with the full name"),
        (
            "no_such_module:build",
            "cannot import 'no_such_module': No module named 'no_such_module'; start where",
        ),
        ("no/such_module.py:build", "there is no file '/.*/no/such_module.py'"),
        ("../no/such_module.py:build", "there is no file '/.*/no/such_module.py'"),
        (
            "tests.support.plan_models:build",
            "'tests.support.plan_models' has no 'build' .did you mean 'build_mlp'",
        ),
        ("tests.support.plan_models:Net.biuld", "'tests.support.plan_models.Net' has no 'biuld'"),
        (
            "tests.support.plan_models:not_callable",
            "is a int; expected a function that builds the model",
        ),
        ("tests.support.plan_models:needs_an_argument", "cannot be called without arguments"),
    ],
)
def test_what_is_no_function_is_told(target: str, text: str) -> None:
    with pytest.raises(HookConfigError, match=text):
        call(target)


JOB = """
from torch import nn
{}
def build():
    import beside_script_of_this_test
    return nn.Linear(3, beside_script_of_this_test.WIDTH)
"""


@pytest.mark.parametrize("written", ["../job/NAME", "{absolute}/NAME", "~/job/NAME"])
@pytest.mark.parametrize("package", [False, True])
def test_a_path_of_a_file_is_a_path(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    written: str,
    package: bool,
) -> None:
    """It may lie in another folder or in a package, and import from its own folder at any time."""
    (folder / "job" / "inside").mkdir(parents=True)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    monkeypatch.setenv("HOME", str(folder))
    (folder / "job" / "beside_script_of_this_test.py").write_text("WIDTH = 5\n")
    name = "inside/script_of_this_test.py" if package else "script_of_this_test.py"
    if package:
        (folder / "job" / "inside" / "__init__.py").write_text("NET = 1\n")
    (folder / "job" / name).write_text(JOB.format("from . import NET" if package else ""))
    target = written.format(absolute=folder / "job").replace("NAME", name)
    try:
        assert main(["plan", f"{target}:build", "--hook", "int8"]) == 0
    finally:
        for module in ("beside_script_of_this_test", "inside", "inside.script_of_this_test"):
            sys.modules.pop(module, None)
    assert "0.080 kB" in capsys.readouterr().out  # 3 x 5 + 5 numbers


def test_a_path_whose_name_another_module_has_is_an_error(folder: Path) -> None:
    (folder / "json.py").write_text(JOB.format(""))
    with pytest.raises(
        HookConfigError,
        match=r"`import json` finds /.*json/__init__.py instead of /.*json.py: rename",
    ):
        call("json.py:build")
    (folder / "train.v2.py").write_text(JOB.format(""))
    with pytest.raises(HookConfigError, match="a file with a '.' in its name: rename it"):
        call("train.v2.py:build")


def test_other_errors_of_the_script_pass_through(folder: Path) -> None:
    (folder / "script_of_this_test.py").write_text(SCRIPT.format("raise KeyError('mine')"))
    with pytest.raises(KeyError, match="mine"):
        call("script_of_this_test:build")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("lighthouse --wait-s -1", "--wait-s -1; expected seconds, more than 0"),
        ("lighthouse --heartbeat-timeout-s nan", "--heartbeat-timeout-s nan; expected seconds"),
        ("machines --once", "no lighthouse: give --lighthouse http://host:29510, or set TORCHFT_"),
        ("machines --once --lighthouse 10.0.0.5", "'10.0.0.5'; expected one with http:// and a"),
        ("machines --once --lighthouse http://127.0.0.1:1", "not answer: [Errno 111] Connection"),
    ],
)
def test_what_members_need_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, sentence: str
) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    assert main(words.split()) == 1
    assert sentence in capsys.readouterr().err


def test_lighthouse_prints_its_address_and_ends_with_ctrl_c() -> None:
    command = [warm.python("torchft.coordination"), "-m", "commhooks", "lighthouse", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert re.fullmatch(
            r"export TORCHFT_LIGHTHOUSE=http://\S+:[1-9]\d+\n", process.stdout.readline()
        )
        assert "Ctrl-C ends it" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert (process.wait(30), process.communicate()[1].count("Traceback")) == (0, 0)
