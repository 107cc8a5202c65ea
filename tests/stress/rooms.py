"""Take each feature out of a copy of the tree, as CONTRIBUTING.md says, and test the rest.

python -m tests.stress.rooms                # all of them
python -m tests.stress.rooms auto FSDP2     # those whose names begin so
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import REPOSITORY

TESTED = (
    "tests/options",
    "tests/hook",
    "tests/engine",
    "tests/comm",
    "tests/compressors",
    "tests/gradients",
    "tests/local_steps",
)
IMPORTS = """
import importlib, pkgutil
skipped = ("__main__", "triton_kernel", "pytorch_lightning", "_lightning")
for root in [{roots}]:
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, root + "."):
        if not module.name.endswith(skipped):
            importlib.import_module(module.name)
"""


@dataclass(frozen=True)
class Room:
    """A row of the table.

    Attributes:
        after: the name of the room that is taken out before this one; "": none.
        edits: file below commhooks/ -> (part of a line, what takes its place or "").
        words: a file of tests that contains one of them is not run.
    """

    name: str
    after: str
    removed: list[str]
    edits: dict[str, list[tuple[str, str]]]
    words: list[str]


def rooms() -> list[Room]:
    text = (
        (REPOSITORY / "CONTRIBUTING.md")
        .read_text()
        .partition("## Taking a feature out")[2]
        .partition("\n## ")[0]
    )
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")][2:]
    return [
        Room(name, after, _quoted(row[1]), _edits(row[2]), _quoted(row[3]))
        for row in rows
        for name, _, after in [row[0].strip().partition(", after ")]
    ]


def _quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _edits(text: str) -> dict[str, list[tuple[str, str]]]:
    if text.strip().startswith("none"):
        return {}
    edits = {}
    for part in text.split("; "):
        file, lines = re.fullmatch(r"\s*`([^`]+)`: (.*?)\s*", part).groups()  # type: ignore[union-attr]
        edits[file] = re.findall(r"`([^`]+)`(?: -> `([^`]+)`)?", lines)
    return edits


def take_out(room: Room, tree: Path) -> None:
    for place in room.removed:
        path = tree / place
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for file, edits in room.edits.items():
        lines = (tree / "commhooks" / file).read_text().splitlines()
        for part, instead in edits:
            word = re.compile(
                rf"(?<!\w){re.escape(part)}(?!\w)" if part[0].isalnum() else re.escape(part)
            )
            numbers = [
                number
                for number, line in enumerate(lines)
                if word.search(line) and not line.startswith('"""')
            ]
            if len(numbers) != 1:
                raise SystemExit(
                    f"{room.name}: {len(numbers)} lines of commhooks/{file} hold {part!r}, not 1"
                )
            lines[numbers[0] : numbers[0] + 1] = [instead] if instead else []
        (tree / "commhooks" / file).write_text("\n".join(lines) + "\n")


def test(name: str, words: list[str], tree: Path) -> bool:
    """Import what is left, and run the tests that do not name the feature."""
    roots = [
        root
        for root in ("commhooks", "lightning_commhooks", "accelerate_commhooks")
        if (tree / root).is_dir()
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    run = {"cwd": tree, "env": environment}
    imports = IMPORTS.format(roots=", ".join(map(repr, roots)))
    if subprocess.run([sys.executable, "-c", imports], **run).returncode:  # type: ignore[call-overload]
        return False
    names_it = re.compile("|".join(map(re.escape, words)))
    files = sorted(file for folder in TESTED for file in (tree / folder).rglob("test_*.py"))
    kept = [str(file.relative_to(tree)) for file in files if not names_it.search(file.read_text())]
    if not kept:
        raise SystemExit(f"{name}: every file of tests names it")
    print(f"{name}: {len(kept)} of {len(files)} files of tests", flush=True)
    options = "-q -x -n 2 --dist loadfile --durations 0 -p no:cacheprovider".split()
    tests = subprocess.run([sys.executable, "-m", "pytest", *options, *kept], **run)  # type: ignore[call-overload]
    return bool(tests.returncode == 0)


def main(names: list[str]) -> int:
    failed = []
    by_name = {room.name: room for room in rooms()}
    chosen = [room for room in by_name.values() if not names or room.name.startswith(tuple(names))]
    for room in chosen:
        with tempfile.TemporaryDirectory(prefix="commhooks-room-") as folder:
            tree = Path(folder)
            files = subprocess.run(
                ["git", "ls-files", "-z"],
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                check=True,
            )
            for name in filter(None, files.stdout.split("\0")):
                if (REPOSITORY / name).exists():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(REPOSITORY / name, tree / name)
            words = list(room.words)
            if room.after:
                take_out(by_name[room.after], tree)
                words += by_name[room.after].words
            take_out(room, tree)
            failed += [] if test(room.name, words, tree) else [room.name]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} features can be taken out")
    for name in failed:
        print(f"not: {name}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
