"""If one rank of three is slow, stopped or gone: who waits how long, and what does the user read?

    python -m tests.stress.stragglers [--hooks ddp powerSGD diloco] [--pause 60] [--limit 10]

Prints a Markdown table, then the errors. A step is a sleep of 50 ms, so that the processor does not
count. Run by `make stragglers`; `test_stragglers.py` runs a short one.
"""

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.models import mlp
from tests.support.workers import RanksFailed, WorkerPool

RANKS, LATE_RANK = 3, 1
STEPS, LATE_STEP, ROUND, DELAY = 60, 22, 10, 5
STEP_S = 0.05

HOOKS: dict[str, commhooks.HookConfig | None] = {
    "ddp": None,
    "fp16": commhooks.FP16Compress(),
    "int8": commhooks.Int8Compress(),
    "powerSGD": commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=2),
    "diloco": commhooks.DiLoCo(sync_every=ROUND),
    "diloco, delay": commhooks.DiLoCo(sync_every=ROUND, delay=DELAY),
}


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What happens to `LATE_RANK`.

    Attributes:
        factor: its steps take so many times as long.
        stopped_s: it is stopped (SIGSTOP) for so many seconds at `LATE_STEP`; inf: for ever.
        killed: it is killed there.
        limit_s: of the process group.
    """

    factor: float = 1.0
    stopped_s: float = 0.0
    killed: bool = False
    limit_s: float = 30.0


@dataclasses.dataclass
class Outcome:
    """Of one rank.

    Attributes:
        step_s: the time of a step on average, without the first two, in which all is set up.
        longest_s: the time of the longest step; that in which the error came, if one did.
        waited_after: steps after `LATE_STEP` before the longest.
        error: what `backward` or the optimizer's step raised.
        weights: a hash, by which they can be compared.
    """

    step_s: float
    longest_s: float
    waited_after: int
    error: str
    weights: str


def train(
    folder: str, hook: str, trouble: Trouble, steps: int = STEPS, step_s: float = STEP_S
) -> None:
    """What each rank does; writes its `Outcome` into the folder."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=trouble.limit_s))
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp(32, 3), bucket_cap_mb=0.004, process_group=group)
    config = HOOKS[hook]
    attached = None if config is None else commhooks.attach(ddp, config)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    times: list[float] = []
    late = rank == LATE_RANK
    error = ""
    for step in range(steps):
        started = time.monotonic()
        if late and step == LATE_STEP:
            _get_into(trouble)
        time.sleep(step_s * (trouble.factor if late else 1.0))
        optimizer.zero_grad()
        try:
            ddp(torch.randn(8, 32, generator=generator)).square().mean().backward()
            optimizer.step()
            if attached is not None and step == steps - 1:
                attached.synchronize()
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
        times.append(time.monotonic() - started)
        if error:
            break
    longest = len(times) - 1 if error else times.index(max(times))
    weights = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    rest = times[2:]
    outcome = Outcome(sum(rest) / len(rest), times[longest], longest - LATE_STEP, error, digest)
    Path(folder, f"{rank}.json").write_text(json.dumps(dataclasses.asdict(outcome)))


def _get_into(trouble: Trouble) -> None:
    if trouble.killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble.stopped_s:
        if trouble.stopped_s < float("inf"):
            is_stopped = f"grep -q '^State:.T' /proc/{os.getpid()}/status"
            waits = f"until {is_stopped}; do sleep 0.02; done; sleep {trouble.stopped_s}"
            subprocess.Popen(["sh", "-c", f"{waits}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def outcomes(
    run_ranks: Callable[..., list[Any]],
    hook: str,
    trouble: Trouble,
    world_size: int = RANKS,
    **course: Any,
) -> dict[int, Outcome]:
    """Of the ranks that came to an end. `course`: for `train`."""
    timeout_s = STEPS * STEP_S * trouble.factor + trouble.limit_s + 15
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(RanksFailed):  # one of them is gone
            run_ranks(
                train, folder, hook, trouble, **course, world_size=world_size, timeout_s=timeout_s
            )
        outcomes = {
            int(file.stem): Outcome(**json.loads(file.read_text()))
            for file in Path(folder).glob("*.json")
        }
    return dict(sorted(outcomes.items()))


def row(
    run_ranks: Callable[..., list[Any]], hook: str, pause_s: float, limit_s: float
) -> tuple[list[str], list[str]]:
    """A line of the table, and the errors."""
    even = outcomes(run_ranks, hook, Trouble())
    half = outcomes(run_ranks, hook, Trouble(factor=2.0))
    stopped = outcomes(run_ranks, hook, Trouble(stopped_s=pause_s, limit_s=pause_s + limit_s))
    killed = outcomes(run_ranks, hook, Trouble(killed=True, limit_s=limit_s))
    hanging = outcomes(run_ranks, hook, Trouble(stopped_s=float("inf"), limit_s=limit_s))
    same = all(
        stopped[rank].weights == even[rank].weights and not stopped[rank].error
        for rank in range(RANKS)
    )
    cells = [
        hook,
        f"{1e3 * even[0].step_s:.0f} ms",
        f"{half[0].step_s / even[0].step_s:.2f}",
        f"{stopped[0].longest_s:.1f} s, {stopped[0].waited_after} steps later",
        "equal" if same else "DIFFERENT",
        _when(killed),
        _when(hanging),
    ]
    errors = [
        f"{hook}, {how}, rank {rank}: {outcome.error}"
        for how, outcomes in (("killed", killed), ("stopped for good", hanging))
        for rank, outcome in outcomes.items()
    ]
    return cells, errors


def _when(outcomes: dict[int, Outcome]) -> str:
    """When the other ranks got their errors, and whether these name the rank."""
    if sorted(outcomes) != [rank for rank in range(RANKS) if rank != LATE_RANK]:
        return f"only ranks {sorted(outcomes)} ended"
    times = sorted(outcome.longest_s for outcome in outcomes.values())
    named = all(
        f"rank {LATE_RANK} has ended or hangs" in outcome.error for outcome in outcomes.values()
    )
    return f"{times[0]:.1f} to {times[-1]:.1f} s, {'named' if named else 'not named'}"


def main() -> int:
    from tests.stress import stragglers  # the workers find nothing that is defined in `__main__`

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=list(HOOKS))
    parser.add_argument(
        "--pause", type=float, default=60.0, help="seconds for which the rank is stopped"
    )
    parser.add_argument(
        "--limit", type=float, default=10.0, help="seconds: the time-out of the process group"
    )
    options = parser.parse_args()
    pool = WorkerPool()
    errors = []
    print(
        f"| hook | step | one at half speed: step | one stopped for {options.pause:g} s: others"
        " wait | weights then | one killed: error after | one stopped for good, limit"
        f" {options.limit:g} s: error after |"
    )
    print("|---" * 7 + "|")
    for hook in options.hooks:
        cells, wrong = stragglers.row(pool.run, hook, options.pause, options.limit)
        print("|", " | ".join(cells), "|", flush=True)
        errors += wrong
    pool.close()
    print("\n" + "\n\n".join(errors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
