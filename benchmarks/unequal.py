"""Machines of unequal speeds: what do they cost in loss?

    python benchmarks/unequal.py [--tasks digits language] [--speeds 1,1,1 1,0.5,0.2]
                                 [--seeds 0 1 2] [--batch-size 2]

Machines that train with `members="torchft"` and the defaults of DiLoCo are simulated in one
process, as the ranks of local_steps.py: a round ends with the fastest machine, each counts with the
steps that it has done (`share_of`), learning rates follow the fastest and are multiplied for the
effective number of machines. (tests/members/test_machines.py compares real machines with such a
simulation.) Each machine draws batches of its own. All rows have the same number of samples, so
slower machines make more rounds. Finished runs are appended to --results and not repeated.

  difference  of the loss at the end to the first of --speeds with the same seed: mean, and standard
              error of the mean
"""

import functools
import math
import statistics
from pathlib import Path

import torch
from common import Row, machine, number, parse, parser, report, run_missing
from language_model import Job, compressor_of, on_all_cores, text_sum
from local_steps import TASKS, Ranks, Setting

from commhooks.members.report import Report, effective_number, share_of
from tests.support.simulation import SimulatedRanks

EVERY = 20


def train(job: Job) -> Row:
    """Train as long as machines of speed 1 would for `steps` steps of each."""
    label, seed, count, steps, text_of_job = job
    torch.set_num_threads(1)
    task_name, speeds, batch_size = label.split(" ")
    done = [round(EVERY * float(speed)) for speed in speeds.split(",")]
    machines = [Report(id=f"{place}", steps=count) for place, count in enumerate(done)]
    factor = effective_number(machines) ** 0.5
    task = TASKS[task_name]()
    task.size = int(batch_size) or task.size
    rounds = round(count * steps / sum(done))
    torch.manual_seed(seed)
    ranks = Ranks(count, rounds * EVERY, Setting(task=task_name, inner=f"{factor}"), task)
    wire = SimulatedRanks(lambda: compressor_of("int4"), count, ranks.named)
    batches = [torch.Generator().manual_seed(1000 * seed + place) for place in range(count)]
    anchor = ranks.weights()[0]
    for _ in range(rounds):
        for place, own_steps in enumerate(done):
            for _ in range(own_steps):
                _step(ranks, place, task.batch(batches[place]))
        deltas = [
            (anchor - weights) * share_of(own, machines)
            for own, weights in zip(machines, ranks.weights(), strict=True)
        ]
        wire.step(deltas)
        anchor = anchor - deltas[0]
        ranks.set_weights(anchor)
        _follow_the_fastest(ranks)
    with torch.no_grad():
        result = task.result(ranks.models[0], steps)
    row = {"label": label, "seed": seed, "machines": count, "steps": steps, "text": text_of_job}
    return row | result | {"rounds": rounds}


def _step(ranks: Ranks, place: int, batch: torch.Tensor) -> None:
    model = ranks.models[place]
    model.zero_grad()
    ranks.task.loss(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ranks.optimizers[place][0].step()
    ranks.schedules[place].step()


def _follow_the_fastest(ranks: Ranks) -> None:
    first, *others = (optimizers[0] for optimizers in ranks.optimizers)
    for optimizer, schedule in zip(others, ranks.schedules[1:], strict=True):
        schedule.load_state_dict(ranks.schedules[0].state_dict())
        for group, of_first in zip(optimizer.param_groups, first.param_groups, strict=True):
            group.update({key: value for key, value in of_first.items() if key != "params"})


# ---- the table -----------------------------------------------------------------------------------


def job_of(row: Row) -> Job:
    return row["label"], row["seed"], row["machines"], row["steps"], row["text"]


def row_of(task: str, speeds: str, runs: dict[tuple[str, str], dict[int, Row]], first: str) -> Row:
    of_seeds = runs[task, speeds]
    equal = runs[task, first]
    differences = [100 * (run["loss"] / equal[seed]["loss"] - 1) for seed, run in of_seeds.items()]
    several = len(differences) > 1
    return {
        "section": task,
        "task": task,
        "speeds": speeds,
        "rounds": next(iter(of_seeds.values()))["rounds"],
        "loss": statistics.fmean(run["loss"] for run in of_seeds.values()),
        "difference": statistics.fmean(differences),
        "error": statistics.stdev(differences) / math.sqrt(len(differences)) if several else 0.0,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    arguments.add_argument(
        "--speeds", nargs="+", default=["1,1,1", "1,0.5,0.2"], help="of machines, at most 1"
    )
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--steps", type=int, default=600, help="of each of equal machines")
    arguments.add_argument(
        "--batch-size", type=int, default=0, help="of each machine (0: 8 sequences, 64 digits)"
    )
    arguments.add_argument(
        "--results", type=Path, default=Path("unequal.jsonl"), help="finished runs"
    )
    quick = {"tasks": ["digits"], "seeds": [0], "steps": 40, "results": Path("/dev/null")}
    args = parse(arguments, **quick)
    at = machine()
    jobs = [
        (f"{task} {speeds} {args.batch_size}", seed, len(speeds.split(",")), args.steps, text_sum())
        for task in args.tasks
        for seed in args.seeds
        for speeds in args.speeds
    ]
    done = run_missing(jobs, args.results, job_of, functools.partial(on_all_cores, train))
    runs: dict[tuple[str, str], dict[int, Row]] = {}
    for job in jobs:
        task, speeds, _ = job[0].split(" ")
        runs.setdefault((task, speeds), {})[job[1]] = done[job]
    rows = [
        row_of(task, speeds, runs, args.speeds[0]) for task in args.tasks for speeds in args.speeds
    ]
    columns = {
        "task": number("task"),
        "speeds": number("speeds"),
        "rounds": number("rounds"),
        "loss": number("loss", "{:.4f}"),
        "difference (error)": lambda row: f"{row['difference']:+.2f} ({row['error']:.2f}) %",
    }
    title = f"{args.steps} steps of each of equal machines, {len(args.seeds)} seeds"
    report("unequal", title, args, at, rows, columns)


if __name__ == "__main__":
    main()
