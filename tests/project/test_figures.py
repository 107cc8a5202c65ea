"""`make figures`: it knows every picture and every benchmark, and its commands and places exist."""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.repository import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
import figures  # noqa: E402

COMMANDS = [
    (name, command)
    for name, figure in figures.FIGURES.items()
    for command in (figure.command, figure.stored)
    if command
]
NOT_PRINTED = {"figures", "gpu", "size"}  # gpu was not run yet; size is for reviews


def _options(script: Path) -> set[str]:
    files = [script, REPOSITORY / "benchmarks" / "common.py"]
    calls = [
        node
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    ]
    names = [
        call.args[0]
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
    ]
    return {name.value for name in names if isinstance(name, ast.Constant)}


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_a_command_would_run(name: str, command: str) -> None:
    first, *words = shlex.split(command)
    script = REPOSITORY / (f"{words.pop(0).replace('.', '/')}.py" if first == "-m" else first)
    assert {word for word in words if word.startswith("--")} <= _options(script)
    assert [
        word for word in words if word.startswith("docs/") and not (REPOSITORY / word).is_file()
    ] == []


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_printed_where_it_says(name: str) -> None:
    for place in figures.FIGURES[name].printed:
        assert figures.section(place).count("\n") > 3


def test_pictures_have_twice_the_pixels_of_a_page() -> None:
    """A page shows at most 1000 pixels in a line, and a screen may have twice as many."""
    for path in figures.PICTURES.glob("*.png"):
        width = int.from_bytes(path.read_bytes()[16:20], "big")
        assert width >= 2000


def test_every_picture_and_benchmark_is_known() -> None:
    pictures = {figure.picture for figure in figures.FIGURES.values() if figure.picture}
    assert pictures == {path.name for path in figures.PICTURES.glob("*.png")}
    drawn = {name for _, command in COMMANDS for name in re.findall(r"FOLDER/(\w+\.png)", command)}
    assert drawn == pictures
    run = {Path(shlex.split(command)[0]).stem for _, command in COMMANDS}
    programs = {
        path.stem
        for path in REPOSITORY.glob("benchmarks/*.py")
        if "import report" in _imports(path)
    }
    assert programs - NOT_PRINTED - run == set()


def _imports(path: Path) -> str:
    return re.sub(r"from common import [^\n]*\breport\b", "import report", path.read_text())


def test_measured_stands_beside_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = "docs/performance.md#classifying-digits"
    figures_known = {
        "good": figures.Figure("-c print(700+7)", 1, (place,)),
        "bad": figures.Figure("-c 1/0", 1, (place,)),
    }
    monkeypatch.setattr(figures, "FIGURES", figures_known)
    printed = {}
    for names, status in (("", 0), ("good", 0), ("good bad", 1)):
        monkeypatch.setattr(sys, "argv", ["figures.py", *names.split(), f"--folder={tmp_path}"])
        assert figures.main() == status
        printed[names] = capfd.readouterr().out
    assert "good" in printed[""] and place in printed[""] and "707" not in printed[""]
    assert re.search(
        rf"measured\n.*707.*printed in {place}\n\n## Classifying digits\n",
        printed["good"],
        re.DOTALL,
    )
    assert "FAILED: bad" in printed["good bad"] and "FAILED" not in printed["good"]
