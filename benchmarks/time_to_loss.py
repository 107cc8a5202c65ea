"""How soon does a training over a limited link reach the loss that plain DDP reaches at its end?

    sudo python benchmarks/time_to_loss.py [--tasks language digits] [--rates 100mbit 1gbit unlimited] [--hooks ...]
                                           [--seeds 0] [--timed 60] [--results FILE] [--plot PNG]

Two ranks, each in a network namespace, are joined by a link that is limited as in link.py. `language` is the
transformer of language_model.py (1,500 steps), `digits` the network of convergence.py (880 steps). Every hook trains
for that many steps with the same data and schedule, and nothing is tuned; in `int8@2` the learning rate is doubled.
PowerSGD begins after 10 % of the steps. Labels with "native" are the defaults on a CPU with a C compiler; auto and
auto-close choose during training.

With --timed N the trainings run only without a limit, which does not change their losses, and at each rate the seconds
of a step are the mean of N steps. Use it for hooks whose steps all cost the same, not for PowerSGD or auto.

  seconds    of all steps from the first one on, without the validations, by rank 0's clock
  MB sent    by the interface of rank 0, including headers
  reached    seconds until the loss was at most --within above plain DDP's last loss with the same seed and rate,
             interpolated linearly between two validations. "no": not within these steps
  sooner     the seconds until plain DDP has reached it, divided by the seconds in `reached`

Finished trainings are appended to --results and not repeated: all of them take hours, and can be interrupted. When none
is missing, neither root nor a link is needed.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import Row, number, parse, parser, report
from hooks import CHOOSING, LABELS, starts_late
from link_ranks import LinkRanks
from loss_curves import draw, reached_after
from machine import machine
from namespaces import Link, bits_per_second

HOOKS = ["ddp", "bf16", "native-int8", "native-int4", "native-4", "torch-4", "auto", "auto-close"]
STEPS = {"language": 1500, "digits": 880}
POINTS = 20
LIMIT_S = 7200.0
WORKER = Path(__file__).with_name("time_to_loss_worker.py")


class Job(NamedTuple):
    task: str
    rate: str
    seed: int
    label: str
    steps: int
    timed: int = 0

    @property
    def learns(self) -> "Job":
        """Return the training that has the losses of this one."""
        return self._replace(rate="unlimited", timed=0) if self.timed else self


def run_missing(jobs: list[Job], results: Path, points: int) -> dict[Job, Row]:
    """Return the rows of all `jobs`. Jobs that are not in `results` are run and appended."""
    lines = results.read_text().splitlines() if results.exists() else []
    done = {Job(*row["job"]): row for row in map(json.loads, lines)}
    todo = [job for job in dict.fromkeys(jobs) if job not in done]
    if not todo:
        return done
    for rate in {job.rate for job in todo} - {"unlimited"}:
        bits_per_second(rate)
    at = machine()
    with Link(2) as link, LinkRanks(link, WORKER) as ranks:
        ranks.answer(timeout_s=600)
        for job in todo:
            link.limit(job.rate)
            order = {"task": job.task, "label": job.label, "seed": job.seed, "steps": job.steps, "points": points}
            row = {"job": job, "machine": at, **ranks.job(LIMIT_S, **order, timed=job.timed)}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            done[job] = json.loads(json.dumps(row))
            print(f"{' '.join(map(str, job))}: {row['curve'][-1][1]:.0f} s", file=sys.stderr, flush=True)
    return done


def curve_of(job: Job, done: dict[Job, Row]) -> list[list[float]]:
    curve: list[list[float]] = done[job]["curve"]
    if not job.timed:
        return curve
    (first, begun, sent, _), (last, ended, sent_then, _) = curve
    seconds, megabytes = (ended - begun) / (last - first), (sent_then - sent) / (last - first)
    return [[step, step * seconds, step * megabytes, loss] for step, _, _, loss in done[job.learns]["curve"]]


def table(done: dict[Job, Row], args: argparse.Namespace) -> list[Row]:
    """Make one row per task, rate and hook: means over the seeds."""
    rows = []
    for task, rate in itertools.product(args.tasks, args.rates):

        def job(seed: int, label: str, task: str = task, rate: str = rate) -> Job:
            return Job(task, rate, seed, label, args.steps or STEPS[task], args.timed)

        plain = {seed: curve_of(job(seed, "ddp"), done) for seed in args.seeds}
        for label in args.hooks:
            runs = {seed: done[job(seed, label)] for seed in args.seeds}
            curves = {seed: curve_of(job(seed, label), done) for seed in args.seeds}
            goals = {seed: curve[-1][3] * (1 + args.within) for seed, curve in plain.items()}
            reached = [reached_after(curve, goals[seed]) for seed, curve in curves.items()]
            of_plain = [reached_after(curve, goals[seed]) or math.nan for seed, curve in plain.items()]
            sooner = [p / t for p, t in zip(of_plain, reached, strict=True) if t is not None]
            everywhere = len(sooner) == len(reached)
            rows.append(
                {
                    "section": f"{task} {rate}",
                    "task": task,
                    "rate": rate,
                    "hook": label,
                    "chosen": ", ".join(sorted({run["chosen"] for run in runs.values()} - {None})),
                    "seconds": statistics.fmean(curve[-1][1] for curve in curves.values()),
                    "megabytes": statistics.fmean(curve[-1][2] for curve in curves.values()),
                    "loss": statistics.fmean(curve[-1][3] for curve in curves.values()),
                    "reached_s": statistics.fmean(t for t in reached if t is not None) if everywhere else None,
                    "sooner": statistics.fmean(sooner) if everywhere else None,
                    "slowest": min(sooner) if everywhere else None,
                    "fastest": max(sooner) if everywhere else None,
                    "curves": list(curves.values()),
                }
            )
    return rows


def or_no(key: str, form: str) -> Any:
    return lambda row: "no" if row[key] is None else form.format(**row)


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--tasks", nargs="+", choices=list(STEPS), default=list(STEPS))
    made.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "unlimited"], help="as tc writes them")
    made.add_argument("--hooks", nargs="+", default=HOOKS, metavar="HOOK", help=LABELS)
    made.add_argument("--seeds", type=int, nargs="+", default=[0])
    made.add_argument("--steps", type=int, help="instead of those above; curves are comparable only as a whole")
    made.add_argument("--timed", type=int, default=0, help="steps that are timed at each rate; 0: all are run there")
    made.add_argument("--within", type=float, default=0.005, help="share of plain DDP's loss")
    made.add_argument("--results", type=Path, default=Path("time_to_loss.jsonl"), help="finished trainings")
    made.add_argument("--plot", type=Path, metavar="PNG", help="draw loss against time")
    return made


def main() -> None:
    args = parse(arguments(), tasks=["digits"], rates=["100mbit"], hooks=["ddp", "native-2"], steps=30)
    if "ddp" not in args.hooks:
        args.hooks.insert(0, "ddp")
    changing = [label for label in args.hooks if label in CHOOSING or starts_late(label)]
    if args.timed and changing:
        raise SystemExit(f"--timed with {changing[0]}, whose steps do not all cost the same")
    jobs = [
        Job(task, rate, seed, label, args.steps or STEPS[task], args.timed)
        for task, seed, rate, label in itertools.product(args.tasks, args.seeds, args.rates, args.hooks)
    ]
    jobs += [job.learns for job in jobs]
    at = machine()
    if args.quick:
        with tempfile.TemporaryDirectory() as folder:
            done = run_missing(jobs, Path(folder, "runs.jsonl"), 3)
    else:
        done = run_missing(jobs, args.results, POINTS)
    rows = table(done, args)
    columns = {
        "task": number("task"),
        "rate": number("rate"),
        "hook": number("hook"),
        "chosen": number("chosen"),
        "seconds": number("seconds", "{:.0f}"),
        "MB sent": number("megabytes", "{:.1f}"),
        "loss at the end": number("loss", "{:.4f}"),
        "reached, s": or_no("reached_s", "{reached_s:.0f}"),
        "x sooner (of the seeds)": or_no("sooner", "{sooner:.2f} ({slowest:.2f} .. {fastest:.2f})"),
    }
    report("time_to_loss", f"time to loss: 2 ranks, {len(args.seeds)} seeds", args, at, rows, columns)
    if args.plot is not None:
        draw(rows, args.within).savefig(args.plot, dpi=300)


if __name__ == "__main__":
    main()
