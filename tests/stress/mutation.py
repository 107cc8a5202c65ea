"""Changes the code in small ways (by cosmic-ray, in a copy), each of which a test must notice.

    python -m tests.stress.mutation [AREA ...] [--sample N | --all] [--seed S]

`mutation_areas.py` has the areas: files, and the tests that are to notice. Of each area a sample is
tried, the same for the same seed and code. What these tests do not notice is tried again with all
of `WIDER`, which takes minutes; a mutant that only those notice is printed with the test that did.
What no test notices is printed as a diff and makes the exit status 1, unless EXPLAINED has a reason
for it. Run by `make test-mutants`.
"""

import argparse
import ast
import importlib.util
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkResult
from rich.console import Console
from rich.table import Table

from tests.stress.mutation_areas import (
    AREAS,
    EXPLAINED,
    EXPLAINED_NUMBERS,
    FOLDERS,
    OPERATORS,
    Part,
    stale,
)
from tests.support import warm
from tests.support.repository import REPOSITORY

COPIED = (
    "commhooks",
    "lightning_commhooks",
    "accelerate_commhooks",
    "tests",
    "examples",
    "docs",
    "pyproject.toml",
    "constraints-dev.txt",
)
SAMPLE, SEED = 10, 1
HAS_TRITON = importlib.util.find_spec("triton") is not None
BASE_LIMIT_S = 600  # for tests of the code as it is
WIDER = " ".join(
    f"tests/{folder}"
    for folder in (
        "engine",
        "checkpoint",
        "compressors",
        "hook",
        "ddp_comm_hooks",
        "gradients",
        "sharded",
    )
)
WIDER_LIMIT_S = 1200
CACHE, CACHE_BEFORE = Path(".cache"), Path(".cache-before")


def enter_copy(folder: str) -> None:
    """The current folder is a copy of the repository from now on, and the tests that are started
    use nothing else: not the user's cache either, where the libraries of a mutant would stay.
    """
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(
                source, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(source, folder)
    os.chdir(folder)
    CACHE.mkdir()
    os.environ |= {"PYTHONPATH": folder, "XDG_CACHE_HOME": str(CACHE.absolute())}


def warm_pytest() -> str:
    """Return a command that starts pytest where torch is imported already, which saves seconds."""
    python = warm.python(
        "torch.distributed", "torch.nn.parallel", "hypothesis", "numpy", "omegaconf", "rich"
    )
    warm.python(server=1)
    warm.share()
    return f"{shlex.quote(python)} -m pytest -x -q -p no:cacheprovider"


def possible(file: Path) -> list[MutationSpec]:
    """All mutants of a file, in one order."""
    tree = get_ast(file.read_text())
    specs = []
    for name in OPERATORS:
        places = (
            place
            for node in ast_nodes(tree)
            for place in get_operator(name)().mutation_positions(node)
        )
        specs += [MutationSpec(file, name, number, *place) for number, place in enumerate(places)]
    return specs


def is_python(mutant: MutationSpec) -> bool:
    """cosmic-ray takes the star of `def f(*, x)` for a multiplication, too."""
    text = mutant.module_path.read_text()
    try:
        compile(
            mutate_code(text, get_operator(mutant.operator_name)(), mutant.occurrence),
            "mutant",
            "exec",
        )
    except SyntaxError:
        return False
    return True


def modules(area: str) -> list[tuple[Path, Part]]:
    """Return the modules of an area with their parts; without Triton, not its kernels."""
    paths = [
        path
        for path in sorted(Path(FOLDERS[area]).glob("[a-z]*.py"))
        if HAS_TRITON or "triton" not in path.stem
    ]
    left = {path.stem: path for path in paths}
    pairs = []
    for part in AREAS[area]:
        for name in list(left) if part.files == "*" else part.files.split():
            if name not in left:
                sys.exit(
                    f"mutation_areas.py names the module {name} in the area {area}, which does not"
                    " exist"
                )
            pairs.append((left.pop(name), part))
    return pairs


def chosen(area: str, sample: int | None, seed: int) -> list[tuple[MutationSpec, Part]]:
    """A sample of the mutants of an area, or all of them."""
    mutants = [(spec, part) for file, part in modules(area) for spec in possible(file)]
    random.Random(seed).shuffle(mutants)
    chosen: list[tuple[MutationSpec, Part]] = []
    for mutant, part in mutants:
        if sample is not None and len(chosen) == sample:
            break
        if is_python(mutant):
            chosen.append((mutant, part))
    return sorted(
        chosen, key=lambda pair: (pair[1].tests, str(pair[0].module_path), pair[0].start_pos)
    )


def changed_lines(diff: str) -> tuple[str, str]:
    """What the mutant has made of which line."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    old, new = ("\n".join(line[1:].strip() for line in lines if line[:1] == sign) for sign in "-+")
    return old, new


def is_explained(mutant: MutationSpec, old: str, new: str) -> bool:
    file = str(mutant.module_path)
    line = mutant.start_pos[0]
    functions = [
        node
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    inside = {
        (file, function.name)
        for function in functions
        if function.lineno <= line <= (function.end_lineno or 0)
    }
    is_number = mutant.operator_name == "core/NumberReplacer"
    # of `zip`: where nothing is wrong, the lengths are equal
    if old.replace("strict=True", "strict=False") == new:
        return True
    return (file, old, new) in EXPLAINED or (is_number and not inside.isdisjoint(EXPLAINED_NUMBERS))


def arguments(part: Part) -> str:
    """The tests of a part as pytest wants them."""
    tests = (test.partition("::") for test in part.tests)
    return " ".join(f"tests/{file}.py{colons}{name}" for file, colons, name in tests)


class Tester:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._pytest = warm_pytest()
        self._limits: dict[Part, float] = {}

    def _prepare(self, part: Part, command: str) -> float:
        """The time limit of a mutant. Without a fault the tests pass; what they compile is kept."""
        if part not in self._limits:
            started = time.monotonic()
            outcome, output = run_tests(command, BASE_LIMIT_S)
            if outcome != TestOutcome.SURVIVED:
                sys.exit(f"without a fault, these tests do not pass: {command}\n{output}")
            seconds = time.monotonic() - started
            self._limits[part] = 60 + 2 * seconds
            self._console.print(
                f"without a fault {seconds:.0f} s: {arguments(part)}", markup=False, soft_wrap=True
            )
            shutil.rmtree(CACHE_BEFORE, ignore_errors=True)
            shutil.copytree(CACHE, CACHE_BEFORE)
        return self._limits[part]

    def outcome(self, mutant: MutationSpec, part: Part) -> str:
        command = f"{self._pytest} {arguments(part)}"
        limit_s = self._prepare(part, command)
        started = time.monotonic()
        result = self._tried(mutant, command, limit_s)
        old, new = changed_lines(result.diff or "")
        outcome = "killed"
        how = ", by the time limit" if result.output == "timeout" else ""
        if result.test_outcome == TestOutcome.SURVIVED and is_explained(mutant, old, new):
            outcome = "explained"
        elif result.test_outcome == TestOutcome.SURVIVED:
            result = self._tried(
                mutant,
                f"{sys.executable} -m pytest -x -q -n 4 --dist loadfile {WIDER}",
                WIDER_LIMIT_S,
            )
            failed = re.findall(r"^FAILED (\S+)", result.output or "", re.MULTILINE)
            how = f", by {failed[0]}" if failed else ""
            outcome = "SURVIVED" if result.test_outcome == TestOutcome.SURVIVED else "killed"
        where = f"{mutant.module_path}:{mutant.start_pos[0]}"
        seconds = time.monotonic() - started
        self._console.print(
            f"{outcome}{how} ({seconds:.0f} s) {where}\n    {old}\n    {new}",
            markup=False,
            soft_wrap=True,
        )
        return outcome

    @staticmethod
    def _tried(mutant: MutationSpec, command: str, limit_s: float) -> WorkResult:
        result = mutate_and_test([mutant], command, limit_s)
        shutil.rmtree(CACHE)
        shutil.copytree(CACHE_BEFORE, CACHE)
        if result.worker_outcome != WorkerOutcome.NORMAL:
            sys.exit(f"{mutant}: {result.output}")
        return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; all of them if not given"
    )
    parser.add_argument(
        "--sample", type=int, default=SAMPLE, help=f"mutants of each area (default {SAMPLE})"
    )
    parser.add_argument("--all", action="store_true", help="every mutant; hours")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    if unknown := set(options.areas) - set(AREAS):
        parser.error(f"no area {', '.join(sorted(unknown))}: there are {', '.join(AREAS)}")
    if entries := stale():
        sys.exit(f"EXPLAINED has entries whose code has gone: {entries}")
    console = Console()
    table = Table("area", "mutants", "killed", "explained", "SURVIVED", "score")
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        enter_copy(folder)
        tester = Tester(console)
        for area in options.areas or AREAS:
            mutants = chosen(area, None if options.all else options.sample, options.seed)
            count = Counter(tester.outcome(*mutant) for mutant in mutants)
            survived += count["SURVIVED"]
            score = f"{100 * count['killed'] / max(1, len(mutants) - count['explained']):.0f} %"
            numbers = (len(mutants), count["killed"], count["explained"], count["SURVIVED"])
            table.add_row(area, *map(str, numbers), score)
        os.chdir(REPOSITORY)
    console.print(table)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
