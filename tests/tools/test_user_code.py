"""What the user names on a command line is imported as by `python -m`: without our arguments, in the current folder."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commhooks import HookConfigError
from commhooks.tools.cli import main
from commhooks.tools.user_code import call

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
    """The current folder. Its scripts are forgotten afterwards, and nothing of the import is left."""
    monkeypatch.chdir(tmp_path)
    path, argv = list(sys.path), sys.argv
    yield tmp_path
    assert sys.path == path and sys.argv is argv
    for name in ("script_of_this_test", "inner.script_of_this_test", "inner"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("target", ["script_of_this_test:build", "./script_of_this_test.py:Nets.build"])
def test_a_script_does_not_see_the_arguments_of_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    """As with `commhooks plan train:build --hook int8` where the script has a flag of that name, too."""
    (folder / "script_of_this_test.py").write_text(SCRIPT.format(PARSES.format("default=None")))
    monkeypatch.setattr(sys, "argv", given := ["commhooks", "plan", target, "--hook", "int8"])
    assert main() == 0
    assert repr([target.partition(":")[0]]) in capsys.readouterr().out
    assert sys.argv is given
    monkeypatch.undo()


def test_a_script_in_a_folder(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "script_of_this_test.py").write_text(SCRIPT.format(""))
    assert len(list(call("inner/script_of_this_test.py:build").parameters())) == 2


@pytest.mark.parametrize("ends", [PARSES.format("required=True"), "sys.exit()", "sys.exit('no data')"])
def test_a_script_that_ends_the_program_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], ends: str
) -> None:
    (folder / "script_of_this_test.py").write_text(SCRIPT.format(ends))
    for arguments in (
        ["plan", "script_of_this_test:build"],
        ["plan", "torch.nn:Identity", "--hook", "script_of_this_test:build"],
    ):
        assert main(arguments) == 1
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("commhooks plan: 'script_of_this_test:build' has called sys.exit(")
        assert last.endswith("belongs under `if __name__ == '__main__':`")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("plan_models", "is not a path: expected 'package.module:function'"),
        ("plan_models.py", "is not a path: expected 'package.module:function'"),
        ("tests.support.plan_models:", "expected 'package.module:function' with the full name"),
        ("no_such_module:build", "cannot import 'no_such_module': No module named 'no_such_module'; start where"),
        ("no/such_module.py:build", "cannot import 'no.such_module': No module named 'no'; start where"),
        ("tests.support.plan_models:build", "'tests.support.plan_models' has no 'build' .did you mean 'build_mlp'"),
        ("tests.support.plan_models:Net.biuld", "'tests.support.plan_models.Net' has no 'biuld'"),
        ("tests.support.plan_models:not_callable", "is a int; expected a function that builds the model"),
        ("tests.support.plan_models:needs_an_argument", "cannot be called without arguments"),
    ],
)
def test_what_is_no_function_is_told(target: str, text: str) -> None:
    with pytest.raises(HookConfigError, match=text):
        call(target)


def test_other_errors_of_the_script_pass_through(folder: Path) -> None:
    (folder / "script_of_this_test.py").write_text(SCRIPT.format("raise KeyError('mine')"))
    with pytest.raises(KeyError, match="mine"):
        call("script_of_this_test:build")


def test_the_argument_of_sys_exit_is_shown(folder: Path, capsys: Any) -> None:
    (folder / "script_of_this_test.py").write_text(SCRIPT.format("sys.exit('no data')"))
    assert main(["plan", "script_of_this_test:build"]) == 1 and "sys.exit('no data')" in capsys.readouterr().err
