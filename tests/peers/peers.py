"""Runs tests of installed packages with our hooks in place, each beside the same test without us.

    # make test-peers ARGS="accelerate"; words of the cases' names
    python tests/peers/peers.py [WORD ...]

From Accelerate: scripts of `accelerate.test_utils.scripts`, on two CPU ranks. From torch: the DDP
cases of `torch.testing._internal.distributed.distributed_test` that CPU ranks with gloo can run.
Nothing of either is copied or changed. Ends with 1 if a case fails with a hook and passes without,
unless EXPLAINED says why; or if no hook ran.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(HERE)]

import clean_env  # noqa: E402
from peer_hooks import CONFIGS, HOOK, RECORD  # noqa: E402

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

# Where a case fails with a hook and passes without, and why it must. docs/reliability.md has it for
# readers. With torch 2.13.0 and Accelerate 1.15.0.
_ROUNDED = ("test_script", "test_sync", *TORCH[:2], *TORCH[3:5])
EXPLAINED = {
    (case, "fp16_compress"): "float16 rounds, by more than the case allows" for case in _ROUNDED
}
EXPLAINED |= {
    (case, "powerSGD"): "it expects the exact mean, and this hook approximates"
    for case in TORCH[:2]
}

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


def _run(command: list[str], folder: str, hook: str, limit_s: float) -> tuple[int | None, str]:
    """The exit status of Python with these arguments (None: it took too long), and its output."""
    environment = clean_env.cleaned(os.environ, folder) | {
        HOOK: hook,
        RECORD: f"{folder}/record",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE))),
        "BACKEND": "gloo",  # this and what follows: torch's tests
        "WORLD_SIZE": "2",
        "TEMP_DIR": folder,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(CASE_LIMIT_S),
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


def main(words: Sequence[str]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 160)
    kinds = {"accelerate": ACCELERATE, "torch": TORCH}
    cases = [
        case
        for kind in kinds
        for case in kinds[kind]
        if not words or not {kind, case}.isdisjoint(words)
    ]
    if not cases:
        print(f"no case is named {' or '.join(words)}: {', '.join((*kinds, *ACCELERATE, *TORCH))}")
        return 2
    problems = compare({hook: run(cases, hook) for hook in ("", *CONFIGS)}, console)
    for problem in problems:
        console.print(f"WRONG: {problem}", markup=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
