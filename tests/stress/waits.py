"""Takes out each wait for a stream in turn: a test on the simulated accelerator must fail.

    python -m tests.stress.waits [PART OF A PLACE ...]

Each mutant is a copy of the repository without one statement that waits for a stream, records an
event or keeps memory for a stream. Prints a table: the place, and what found the mutant: "clocks"
(an access that nothing orders), "allocator" (memory freed too early), "late execution" (other
numbers), or an assertion of the test. A mutant that no test finds makes the exit status 1, unless
EXPLAINED has a reason. `make test-waits` runs this: some minutes.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.stress.mutation import enter_copy, warm_pytest
from tests.support.repository import REPOSITORY, sources

WAITS = {
    "wait_stream",
    "wait_event",
    "record_stream",
    "record",
    "keep_for_current_stream",
    "wait_for_codec",
    "wait_for_copies",
    "wait_for_background",
    "self._mark.set",
    "self._mark.wait",
}
SETTLES = {"self.held.settle", "before"}
"""Waits in `local_steps/outer_steps.py` and `exchange.py`; elsewhere they bring the counters up to
date.
"""
TESTS = "tests/engine/test_simulated_accelerator.py tests/sharded/test_shards_streams.py"
FIRST = {
    "comm/collectives.py": "reads",
    "comm/counters.py": "allreduce",
    "engine/consensus.py": "loads",
    "engine/immediate.py": "ones_own",
    "engine/session.py": "fails",
    "engine/state.py": "saves or reads",
    "engine/streams.py": "saves or reads or fails or dropped or loads or diloco",
    "gradients/fully_shard.py": "shards",
    "gradients/precision.py": "saves and mean",
    "local_steps/exchange.py": "diloco",
    "local_steps/outer_steps.py": "diloco",
    "local_steps/outer_state.py": "diloco",
    "local_steps/offload.py": "diloco",
    "local_steps/outer_step.py": "diloco",
    "sharded/memory.py": "streams",
}
"""Tests that are tried first, because they probably find the mutants of a module. Then come all
others.
"""
EXPLAINED = {
    (
        "engine/immediate.py",
        "run",
        "keep_for_current_stream([self.answer])",
    ): "the future has kept its value already",
    (
        "engine/streams.py",
        "overwrite",
        "stream.wait_stream(torch.accelerator.current_stream(device))",
    ): "the host has waited for the copy to the device",
    (
        "local_steps/outer_steps.py",
        "prepare",
        "self.held.settle()",
    ): "machines that come and go are not simulated",
    (
        "local_steps/outer_steps.py",
        "replay",
        "self.held.settle()",
    ): "machines that come and go are not simulated",
    (
        "local_steps/outer_state.py",
        "as_behind",
        "wait_for_background(device)",
    ): "the host has waited for the outcome",
    (
        "local_steps/outer_steps.py",
        "apply",
        "wait_for_background(exchange.device)",
    ): "the host has waited for the outcome",
}
LAYERS = {
    "clocks": ("nothing orders them", "not have written yet"),
    "allocator": ("is freed while",),
    "late execution": ("late operators give other numbers",),
}
LIMIT_S = 900


def places() -> Iterator[tuple[str, str, ast.AST]]:
    """Yield file and function of each wait, with the statement or devices that are taken out."""
    for file, text in sources().items():
        waits = WAITS | (
            SETTLES
            if file.endswith(("local_steps/outer_steps.py", "local_steps/exchange.py"))
            else set()
        )
        yield from ((file, *place) for place in _in(ast.parse(text), "", waits))


def _in(node: ast.AST, function: str, waits: set[str]) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            called = ast.unparse(child.value.func)
            if {called, called.rpartition(".")[2]} & waits:
                yield function, child
        elif isinstance(child, ast.keyword) and child.arg == "devices":
            yield function, child.value
        yield from _in(child, child.name if isinstance(child, ast.FunctionDef) else function, waits)


def without(text: str, node: Any) -> str:
    """The source without this statement, or with an empty list in the place of this expression."""
    lines = text.splitlines(keepends=True)
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    lines[node.lineno - 1 : node.end_lineno] = [
        before,
        "pass" if isinstance(node, ast.stmt) else "[]",
        after,
    ]
    return "".join(lines)


def found_by(pytest: str) -> str | None:
    """What found the mutant; None: nothing."""
    done = subprocess.run(pytest, shell=True, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode in (0, 5):  # 5: no test of that name
        return None
    test = re.search(r"^(?:FAILED|ERROR) \S+::(.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if test is None:
        sys.exit(done.stdout + done.stderr)
    layers = [
        layer for layer, texts in LAYERS.items() if any(text in done.stdout for text in texts)
    ]
    return f"{' and '.join(layers) or 'assertion'}: {test[1]}"


def main(wanted: list[str]) -> int:
    survived = 0
    with tempfile.TemporaryDirectory(prefix="waits-") as folder:
        enter_copy(folder)
        pytest = f"{warm_pytest()} {TESTS}"
        print("| place | taken out | found by |\n|---|---|---|")
        for file, function, node in places():
            short = file.removeprefix("commhooks/")
            statement = ast.unparse(node)
            if wanted and not any(part in f"{short}:{function}" for part in wanted):
                continue
            by = EXPLAINED.get((short, function, statement))
            if by is None:
                text = Path(file).read_text(encoding="utf-8")
                Path(file).write_text(without(text, node), encoding="utf-8")
                first = FIRST.get(short)
                by = first and found_by(f"{pytest} -k '{first}'") or found_by(pytest)
                Path(file).write_text(text, encoding="utf-8")
            else:
                by = f"nothing: {by}"
            survived += by is None
            print(
                f"| `{short}`, `{function}` | `{statement}` | {by or '**SURVIVED**'} |", flush=True
            )
        os.chdir(REPOSITORY)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
