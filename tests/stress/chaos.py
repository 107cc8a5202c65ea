"""Kills runs again and again: they must go on, to the same weights.

    # what `make chaos` runs
    python examples/clean_env.py -m tests.stress.chaos [--runs 100] [--seed N]

Each run draws a front end, a topology, a hook and a death from chaos_cases.py, trains under
`torchrun`, dies, goes on from its newest complete checkpoint, and must end with the weights of a
run that was left alone, bit for bit. The exit status is 1 if a run hung, did not resume, went
back further than its last checkpoint, or ended in other weights.

A campaign in parts, with one report over all of them: the same command again until no runs are
left.

    ... chaos --seed 7 --results seed-7.jsonl --seconds 240

`--topologies members`: 20 runs with live membership, in which machines die and come back; with
`--busy 20` nobody dies, among so many busy processes. See chaos_members.py.
"""

import argparse
import dataclasses
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.stress import chaos_members
from tests.stress.chaos_cases import (
    DEATHS,
    FRONTS,
    HOOKS,
    TOPOLOGIES,
    Case,
    combinations,
    draw,
)
from tests.stress.chaos_runs import Outcome, judge, run
from tests.stress.chaos_twins import Twins
from tests.support import warm
from tests.support.workers import WorkerPool

PRELOADED = ("lightning.pytorch", "accelerate", "transformers.trainer")


# ---- report --------------------------------------------------------------------------------------


def summary(number: int, outcome: Outcome) -> dict[str, Any]:
    """What of an outcome is kept in `--results`."""
    case = outcome.case
    return {
        "run": number,
        **dataclasses.asdict(case.combination),
        "death": case.death.kind,
        "moment": str(case.death),
        "rank": case.death.rank,
        "died_in": outcome.died_in,
        "died_at": outcome.died_at,
        "resumed_at": outcome.resumed_at,
        "steps_again": outcome.steps_again,
        "message": outcome.message,
        "difference": outcome.difference,
        "seconds": round(outcome.seconds, 1),
        "survivors": [
            f"{error['type']} after {error['seconds']:.1f} s" for error in outcome.survivors
        ],
        "failures": outcome.failures,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    for column in ("death", "topology", "front", "hook"):
        table = Table(column, "runs", "failed", "bit-equal", "steps again", "s")
        for value, count in sorted(Counter(row[column] for row in rows).items()):
            of = [row for row in rows if row[column] == value]
            again = [row["steps_again"] for row in of if row["steps_again"] is not None] or [0]
            table.add_row(
                value,
                str(count),
                str(sum(bool(row["failures"]) for row in of)),
                str(sum(row["difference"] == 0 and not row["failures"] for row in of)),
                f"{min(again)} to {max(again)}",
                f"{sum(row['seconds'] for row in of) / count:.0f}",
            )
        console.print(table)
    console.print(f"died in: {dict(Counter(row['died_in'] or '-' for row in rows))}")
    console.print(
        "started from a damaged checkpoint:"
        f" {dict(Counter(row['message'] for row in rows if row['message']))}"
    )
    slowest = max(
        (survivor for row in rows for survivor in row["survivors"]), key=_seconds, default="-"
    )
    console.print(f"the last of the other ranks to end: {slowest}")


def _seconds(survivor: str) -> float:
    return float(survivor.split()[-2])


# ---- the campaign --------------------------------------------------------------------------------


def campaign(
    cases: dict[int, Case],
    folder: Path,
    console: Console,
    keep: Callable[[dict[str, Any]], None],
    end: float,
) -> None:
    """Run the numbered cases until `end` (monotonic), and hand each summary to `keep`."""
    pool = WorkerPool()
    pool.import_first(*PRELOADED)
    twins = Twins(pool.run)
    python = warm.python(*PRELOADED)
    try:
        for number, case in cases.items():
            if time.monotonic() > end:
                break
            where = folder / str(number)
            outcome = run(case, where, python)
            try:
                judge(outcome, twins.of(outcome))
            except AssertionError as error:  # RanksFailed is one
                outcome.failures.append(f"the training that was left alone failed: {error}")
            keep(summary(number, outcome))
            how = (
                f"died in {outcome.died_in} at step {outcome.died_at}, resumed at"
                f" {outcome.resumed_at}"
            )
            console.print(f"{number}: {case}: {how}, {outcome.seconds:.0f} s {outcome.message}")
            if outcome.failures:
                (where / "output.txt").write_text(outcome.output)
                console.print(
                    f"  FAILED: {'; '.join(outcome.failures)}; see {where}", style="bold red"
                )
            else:
                shutil.rmtree(where)
    finally:
        pool.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, help="default: 100; 20 of members")
    parser.add_argument(
        "--seed", type=int, default=None, help="of all that is drawn (default: a new one)"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no run after so many"
    )
    parser.add_argument("--fronts", nargs="+", choices=FRONTS, default=FRONTS)
    parser.add_argument(
        "--topologies", nargs="+", choices=[*TOPOLOGIES, "members"], default=list(TOPOLOGIES)
    )
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=HOOKS)
    parser.add_argument("--deaths", nargs="+", choices=DEATHS, default=list(DEATHS))
    parser.add_argument(
        "--results", type=Path, help="a line per run is added; runs that are in it are not repeated"
    )
    parser.add_argument(
        "--busy", type=int, metavar="N", help="of members: N busy processes instead of deaths"
    )
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    console = Console(width=150, highlight=False)
    if "members" in args.topologies:
        if args.topologies != ["members"]:
            parser.error("--topologies members goes alone")
        if args.busy is not None:
            return chaos_members.among_busy_processes(args.busy, console)
        return 1 if chaos_members.campaign(args.runs or 20, seed, console) else 0
    if not combinations(args.fronts, args.topologies, args.hooks):
        parser.error("none of these combinations exists; see left_out in chaos_cases.py")
    console.print(
        f"seed {seed}: the same runs again with ARGS='--seed {seed}' and otherwise the same"
        " arguments"
    )
    rows: list[dict[str, Any]] = []
    if args.results is not None and args.results.exists():
        rows = [json.loads(line) for line in args.results.read_text().splitlines()]

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        if args.results is not None:
            with open(args.results, "a") as file:
                file.write(json.dumps(row) + "\n")

    done = {row["run"] for row in rows}
    cases = dict(
        enumerate(
            draw(args.runs or 100, seed, args.fronts, args.topologies, args.hooks, args.deaths)
        )
    )
    left = {number: case for number, case in cases.items() if number not in done}
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="commhooks-chaos-"))
    campaign(left, folder, console, keep, started + args.seconds)
    show(rows, console)
    failed = sum(bool(row["failures"]) for row in rows)
    waiting = left.keys() - {row["run"] for row in rows}
    rest = f", {len(waiting)} are left" if waiting else ""
    console.print(
        f"seed {seed}: {len(rows)} runs, {failed} failed{rest}; {time.monotonic() - started:.0f} s"
    )
    if failed:
        console.print(f"Notes, checkpoints and outputs are in {folder}")
    return 1 if failed or waiting else 0


if __name__ == "__main__":
    sys.exit(main())
