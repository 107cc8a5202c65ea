"""Runs tests of other projects with our hooks in place, each beside the same test without us.

    # make test-peers ARGS="accelerate"; names of suites or cases
    # make test-peers ARGS="lightning --source /path/to/pytorch-lightning"
    python tests/peers/peers.py [NAME ...] [--source FOLDER ...]

From Accelerate: scripts of `accelerate.test_utils.scripts`, on two CPU ranks. From torch: the DDP
cases of `torch.testing._internal.distributed.distributed_test` that CPU ranks with gloo can run.
Both are installed; the suites of `suites.py` need a checkout. Nothing of any is copied or changed.
Ends with 1 if a case fails with a hook and passes without, unless EXPLAINED says why; or if no hook
ran.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(HERE)]

import clean_env  # noqa: E402
from peer_hooks import CONFIGS, HOOK, RECORD  # noqa: E402
from suites import EXPLAINED, SOURCE, SUITES, Suite  # noqa: E402

SCRIPT_LIMIT_S = 240
"""Of one script of Accelerate: they take 10 to 60 s on a busy machine, and a rank that waits would
end after 30 minutes only.
"""
CASE_LIMIT_S = 60
"""Of one case of torch: they take some 2 s."""

ACCELERATE = ("test_script", "test_sync", "test_ddp_comm_hook", "test_distributed_data_loop")
TORCH = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_grads_same_across_ranks_with_no_sync",
)

INSTALLED = {"accelerate": ACCELERATE, "torch": TORCH}
ALL = (*INSTALLED, *SUITES)

Outcome = tuple[str, str]
"""What became of a case: "passed", "failed", "skipped" or "timed out"; and the output."""


def run(cases: Sequence[str], hook: str) -> tuple[dict[str, Outcome], int]:
    """Run the cases, and return their outcomes and the backward passes of hooks on all ranks."""
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        for script in (case for case in cases if case in ACCELERATE):
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
            status, output = _run(
                [*torchrun, f"{HERE}/accelerate_peer.py", script], folder, hook, SCRIPT_LIMIT_S
            )
            outcomes[script] = {0: "passed", None: "timed out"}.get(status, "failed"), output
        if of_torch := [case for case in cases if case in TORCH]:
            file = Path(folder, "outcomes.json")
            limit_s = 60 + CASE_LIMIT_S * len(of_torch)
            status, output = _run(
                [f"{HERE}/torch_peer.py", str(file), *of_torch], folder, hook, limit_s
            )
            recorded = json.loads(file.read_text()) if status == 0 else {}
            lost = ("timed out" if status is None else "failed", output)
            outcomes |= {case: tuple(recorded.get(case, lost)) for case in of_torch}
        record = Path(folder, "record")
        return outcomes, sum(map(int, record.read_text().split())) if record.exists() else 0


def run_suite(
    suite: Suite, names: Sequence[str], source: Path, hook: str
) -> tuple[dict[str, Outcome], int]:
    """Run the cases of a suite with one of the `names` (all if there are none) on two ranks. Return
    what `run` does.
    """
    pytest = ["-m", "pytest", "-rA", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull]
    pytest += ["--tb=short", "-k", " or ".join(names)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    file = f"{HERE}/{suite.module}.py"
    more = {SOURCE: str(source)}
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        listed = _run([*pytest, "--collect-only", "-q", file], folder, hook, SCRIPT_LIMIT_S, more)[
            1
        ]
        cases = re.findall(rf"{suite.module}\.py::(\S+)", listed)
        for chosen in [[case] for case in cases] if suite.apart else [cases]:
            command = [*torchrun, *pytest, *(f"{file}::{case}" for case in chosen)]
            limit_s = SCRIPT_LIMIT_S + CASE_LIMIT_S * len(chosen)
            status, output = _run(command, folder, hook, limit_s, more)
            for case in chosen:
                outcomes[case] = outcome_of(case, output, status is None), output
        record = Path(folder, "record")
        return outcomes, sum(map(int, record.read_text().split())) if record.exists() else 0


def outcome_of(case: str, output: str, timed_out: bool) -> str:
    """Return the worst outcome of a case on any rank, which pytest -rA prints."""
    # pytest 9 counts a case as passed if only some of its `subTest` have failed. Both ranks write
    # to one file, and a line may follow another without a line break.
    word = "PASSED|FAILED|SUBFAILED|ERROR"
    of_case = rf"({word})\b(?:(?!{word}).)*{re.escape(case)}(?=\s|$|{word})"
    words = set(re.findall(of_case, output, re.M))
    if words - {"PASSED"}:
        return "failed"
    if "PASSED" in words:
        return "passed"
    return "timed out" if timed_out else "skipped" if "SKIPPED" in output else "failed"


def _run(
    command: list[str],
    folder: str,
    hook: str,
    limit_s: float,
    more: Mapping[str, str] | None = None,
) -> tuple[int | None, str]:
    """The exit status of Python with these arguments (None: it took too long), and its output.
    `more`: environment variables.
    """
    environment = clean_env.cleaned(os.environ, folder) | {
        HOOK: hook,
        RECORD: f"{folder}/record",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE))),
        "BACKEND": "gloo",  # this and what follows: torch's tests
        "WORLD_SIZE": "2",
        "TEMP_DIR": folder,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(CASE_LIMIT_S),
        **(more or {}),
    }
    status = None
    words = [sys.executable, *command]
    # A file and no pipe, which ranks of a torchrun that was killed would keep open.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        process.terminate()  # torchrun ends its ranks, and kills those that do not end within 30 s
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(45)
        with contextlib.suppress(ProcessLookupError):  # ranks that it has left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return status, output.read()


def compare(outcomes: dict[str, tuple[dict[str, Outcome], int]], console: Console) -> list[str]:
    """Print a table of `found[hook]`, which `run` returned, and the outputs of what is wrong;
    return what is wrong.
    """
    plain, _ = outcomes[""]
    hooks = [hook for hook in outcomes if hook]
    table = Table("case", "without us", *hooks)
    problems = []
    for case, (expected, output) in plain.items():
        if expected != "passed":
            console.print(output[-1500:], markup=False, highlight=False)
        cells = []
        for hook in hooks:
            outcome, output = outcomes[hook][0][case]
            reason = EXPLAINED.get((case, hook)) if outcome == "failed" else None
            cells.append(outcome + (f" ({reason})" if reason else ""))
            if expected == "passed" != outcome and not reason:
                problems.append(f"{case} with {hook}: {outcome}")
                console.print(output[-3000:], markup=False, highlight=False)
        table.add_row(case, expected, *cells)
    console.print(table)
    problems += [f"{hook}: no hook ran" for hook in hooks if not outcomes[hook][1]]
    if all(expected != "passed" for expected, _ in plain.values()):
        problems.append("nothing passes without us, so there is nothing to compare")
    return problems


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of suites ({', '.join(ALL)}) or of cases"
    )
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="a checkout of a peer's repository; which one, is found out",
    )
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    suites = [name for name in options.names if name in ALL]
    cases = [name for name in options.names if name not in ALL]
    problems = []
    ran = False
    for name in suites or ALL:
        outcomes = _outcomes(name, cases, options.source, console, wanted=bool(suites))
        if any(expected for expected, _ in outcomes.values()):
            ran = True
            problems += compare(outcomes, console)
    for problem in problems:
        console.print(f"WRONG: {problem}", markup=False)
    if not ran:
        print(f"nothing ran. Suites: {', '.join(ALL)}; cases: {', '.join(ACCELERATE + TORCH)}")
        return 2
    return 1 if problems else 0


def _outcomes(
    name: str, cases: Sequence[str], sources: Sequence[Path], console: Console, *, wanted: bool
) -> dict[str, tuple[dict[str, Outcome], int]]:
    """Run the `cases` of a suite (all if there are none) without us, and with every hook."""
    if name in INSTALLED:
        chosen = [case for case in INSTALLED[name] if not cases or case in cases]
        return {hook: run(chosen, hook) for hook in ("", *CONFIGS)} if chosen else {}
    suite = SUITES[name]
    source = next((folder for folder in sources if suite.is_in(folder)), None)
    if source is None:
        if wanted or not cases:
            where = f"{' '.join(map(str, sources))} has none" if sources else "FOLDER"
            console.print(
                f"skipped: {name} needs a checkout of {suite.repository}, with"
                f" {', '.join(suite.files)}: --source {where}",
                markup=False,
                highlight=False,
            )
        return {}
    for case, reason in suite.left_out.items():
        console.print(f"left out: {case} ({reason})", markup=False, highlight=False)
    hooks = ("", *suite.hooks)
    return {hook: run_suite(suite, cases, source.absolute(), hook) for hook in hooks}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
