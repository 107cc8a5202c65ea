"""Runs tests that ship inside installed packages with our hooks in place, each beside the same test without us.

    python tests/peers/peers.py [WORD ...]      # make test-peers ARGS="accelerate"; words of the cases' names

From Accelerate: scripts of `accelerate.test_utils.scripts`, on two CPU ranks. From torch: the DDP cases of
`torch.testing._internal.distributed.distributed_test` that CPU ranks with gloo can run. Nothing of either is copied or
changed. Ends with 1 if a case fails with a hook and passes without, unless `explained.py` says why; or if no hook ran.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(HERE)]

import clean_env  # noqa: E402
from explained import EXPLAINED  # noqa: E402
from peer_hooks import CONFIGS, HOOK, RECORD  # noqa: E402

SCRIPT_LIMIT_S = 240
"""Of one script of Accelerate: they take 10 to 60 s on a busy machine, and a rank that waits would end after 30 minutes
only."""
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


@dataclass(frozen=True)
class Outcome:
    """What became of one case, with one hook or without."""

    outcome: str
    """ "passed", "failed", "skipped" or "timed out"."""
    output: str
    seconds: float
    passes: int
    """Backward passes of hooks on all ranks together."""
    compressed: int

    @property
    def in_words(self) -> str:
        ran = f", {self.passes} passes" if self.passes else ""
        return self.outcome + ran + (f", {self.compressed} compressed" if self.compressed else "")


def run_accelerate(scripts: Sequence[str], hook: str) -> Iterator[tuple[str, Outcome]]:
    for script in scripts:
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
            code, output, seconds = _run([*launch, f"{HERE}/accelerate_peer.py", script], folder, hook, SCRIPT_LIMIT_S)
            outcome = {0: "passed", None: "timed out"}.get(code, "failed")
            yield script, Outcome(outcome, output, seconds, *_record(folder, "case"))


def run_torch(cases: Sequence[str], hook: str) -> Iterator[tuple[str, Outcome]]:
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        rows = Path(folder, "rows.json")
        command = [f"{HERE}/torch_peer.py", str(rows), *cases]
        code, output, seconds = _run(command, folder, hook, 60 + CASE_LIMIT_S * len(cases))
        known = json.loads(rows.read_text()) if code == 0 else {}
        for case in cases:
            row = known.get(
                case, {"outcome": "timed out" if code is None else "failed", "output": output, "seconds": 0}
            )
            yield case, Outcome(**row, **dict(zip(("passes", "compressed"), _record(folder, case), strict=True)))


def _run(command: list[str], folder: str, hook: str, limit_s: float) -> tuple[int | None, str, float]:
    """The exit status (None: it took too long), the output, and the seconds of Python with these arguments."""
    environment = clean_env.cleaned(os.environ, folder) | {
        HOOK: hook,
        RECORD: folder,
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE))),
        "BACKEND": "gloo",  # this and what follows: torch's tests
        "WORLD_SIZE": "2",
        "TEMP_DIR": folder,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(CASE_LIMIT_S),
    }
    began = time.monotonic()
    file = Path(folder, "output")  # not a pipe, which ranks of a torchrun that was killed would keep open
    with file.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        code = _waited_for(process, limit_s)
    with contextlib.suppress(ProcessLookupError):  # ranks that it has left behind
        os.killpg(process.pid, signal.SIGKILL)
    return code, file.read_text(), time.monotonic() - began


def _waited_for(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit status, or None if it had to be ended."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks, and kills those that do not end within 30 s
    try:
        process.wait(45)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


def _record(folder: str, case: str) -> tuple[int, int]:
    """Backward passes and compressed ones, of all ranks."""
    ranks = [json.loads(file.read_text()) for file in Path(folder).glob(f"{case}-*.json")]
    return sum(rank["passes"] for rank in ranks), sum(rank["compressed"] for rank in ranks)


def verdict(case: str, hook: str, plain: Outcome, ours: Outcome) -> str:
    """How the run with the hook compares: "" (alike), a remark in brackets, or what is wrong."""
    if plain.outcome == ours.outcome:
        return ""
    if plain.outcome == "passed":
        reason = EXPLAINED.get((case, hook))
        return f"(explained: {reason})" if reason and ours.outcome == "failed" else "DIFFERS"
    return f"({ours.outcome} with {hook} only)"


def compare(found: dict[str, dict[str, Outcome]], console: Console) -> list[str]:
    """Print the table of `found[hook][case]`; return what is wrong."""
    plain = found[""]
    table = Table("case", "without us", *list(found)[1:], "difference")
    problems = []
    for case, beside in plain.items():
        remarks = {hook: verdict(case, hook, beside, found[hook][case]) for hook in found if hook}
        if beside.outcome != "passed":
            console.print(beside.output[-1500:], markup=False, highlight=False)
        shown = "\n".join(f"{hook}: {remark}" for hook, remark in remarks.items() if remark)
        table.add_row(case, *(found[hook][case].in_words for hook in found), shown)
        for hook, remark in remarks.items():
            if remark == "DIFFERS":
                problems.append(f"{case} with {hook}: {found[hook][case].outcome}")
                console.print(found[hook][case].output[-3000:], markup=False, highlight=False)
    console.print(table)
    problems += [f"{hook}: no hook ran" for hook in found if hook and not sum(o.passes for o in found[hook].values())]
    if not any(each.outcome == "passed" for each in plain.values()):
        problems.append("nothing passes without us, so there is nothing to compare")
    return problems


def main(words: Sequence[str]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 160)
    found: dict[str, dict[str, Outcome]] = {}
    for hook in ("", *CONFIGS):
        found[hook] = {}
        for name, run, cases in (("accelerate", run_accelerate, ACCELERATE), ("torch", run_torch, TORCH)):
            chosen = [case for case in cases if not words or any(word in (name, case) for word in words)]
            for case, outcome in run(chosen, hook) if chosen else ():
                console.print(f"{name} {case}, {hook or 'without us'}: {outcome.in_words} ({outcome.seconds:.0f} s)")
                sys.stdout.flush()
                found[hook][f"{name} {case}"] = outcome
    if not found[""]:
        console.print(
            f"no case is named {' or '.join(words)}: {', '.join(('accelerate', *ACCELERATE, 'torch', *TORCH))}"
        )
        return 2
    problems = compare(found, console)
    for problem in problems:
        console.print(f"WRONG: {problem}", markup=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
