"""How soon does a training over a limited link reach the loss that plain DDP reaches at its end?

    sudo python benchmarks/time_to_loss.py [--rates 100mbit 1gbit unlimited] [--hooks ...] [--seeds
                                           0] [--timed 60] [--results FILE] [--plot PNG]

The transformer of language_model.py trains for 1,500 steps on two ranks, joined by the link of
limited_link.py. Every hook has the same data and schedule, and nothing is tuned; PowerSGD begins
after 10 % of the steps. Labels with "native" are the defaults on a CPU with a C compiler; auto and
auto-close choose during training.

With --timed N the trainings run only without a limit, which does not change their losses, and at
each rate the seconds of a step are the mean of N steps. Use it for hooks whose steps all cost the
same, not for PowerSGD or auto.

  seconds    of all steps from the first one on, without the validations, by rank 0's clock
  MB sent    by the interface of rank 0, including headers
  reached    seconds until the loss was at most 0.5 % above plain DDP's last loss with the same
             seed and rate, interpolated linearly between two validations. "no": not within these
             steps
  sooner     the seconds until plain DDP has reached it, divided by the seconds in `reached`

Finished trainings are appended to --results and not repeated. When none is missing, neither root
nor a link is needed.
"""

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import language_model
import torch
import torch.distributed as dist
from common import Row, machine, number, parse, parser, report, run_missing
from hooks import CHOOSING, LABELS, starts_late, wrap
from limited_link import Link, Ranks, bits_per_second, bytes_sent, is_rank, serve
from torch import nn

HOOKS = ["ddp", "bf16", "native-int8", "native-int4", "native-4", "torch-4", "auto", "auto-close"]
POINTS = 20
VALIDATION_BATCHES = 32  # at each point of a curve
WARM_UP = 10  # steps before those that are timed; in the first two DDP builds its buckets
LIMIT_S = 7200.0
WITHIN = 0.005  # of plain DDP's last loss, as a share
Curve = list[list[float]]
"""Of [step, seconds, MB, loss]."""


class Job(NamedTuple):
    rate: str
    seed: int
    label: str
    steps: int
    timed: int = 0

    @property
    def learns(self) -> "Job":
        """Return the training that has the losses of this one."""
        return self._replace(rate="unlimited", timed=0) if self.timed else self


# ---- on each rank --------------------------------------------------------------------------------


def worker(rank: int, world_size: int, ranks_per_node: int, interface: str) -> Callable[..., Row]:
    def train(rate: str, seed: int, label: str, steps: int, timed: int, points: int) -> Row:
        """Run one training from its first step on; or, with `timed`, only that many steps, after a
        warm-up. Times are from rank 0's clock, which stops during validations.
        """
        torch.manual_seed(seed)
        model = language_model.ByteTransformer()
        optimizer, schedule = language_model.recipe(model, steps)
        batches = parts(torch.Generator().manual_seed(seed), rank, world_size)
        wrapped, hook = wrap(model, label, start=steps // 10 if starts_late(label) else 0)
        seconds = 0.0
        megabytes = 0.0
        curve = []
        ends = (
            [WARM_UP, WARM_UP + timed]
            if timed
            else [steps * (point + 1) // points for point in range(points)]
        )
        for begin, end in itertools.pairwise([0, *ends]):
            dist.barrier()
            before = bytes_sent(interface)
            started = time.perf_counter()
            for batch in itertools.islice(batches, end - begin):
                wrapped.zero_grad(set_to_none=True)
                language_model.loss_of(wrapped, batch).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
            if hook is not None:
                hook.synchronize()  # what is validated is the model of all ranks
            dist.barrier()
            seconds += time.perf_counter() - started
            megabytes += (bytes_sent(interface) - before) / 1e6
            if rank == 0:
                loss = None if timed else language_model.validation_loss(model, VALIDATION_BATCHES)
                curve.append([end, seconds, megabytes, loss])
        chosen = hook.stats()["chosen"] if hook is not None and label in CHOOSING else None
        return {"curve": curve, "chosen": chosen}

    return train


def parts(generator: torch.Generator, rank: int, world_size: int) -> Iterator[torch.Tensor]:
    """Yield this rank's part of each batch, without end."""
    while True:
        batch = language_model.windows(language_model.text()[0], language_model.BATCH, generator)
        yield batch.chunk(world_size)[rank]


# ---- the table -----------------------------------------------------------------------------------


def run(jobs: list[Job], points: int) -> Iterator[Row]:
    for rate in {job.rate for job in jobs} - {"unlimited"}:
        bits_per_second(rate)
    at = machine()
    with Link() as link, Ranks(link, Path(__file__)) as ranks:
        for job in jobs:
            link.limit(job.rate)
            yield {"job": job, "machine": at, **ranks.job(LIMIT_S, **job._asdict(), points=points)}


def curve_of(job: Job, done: dict[Job, Row]) -> Curve:
    curve: Curve = done[job]["curve"]
    if not job.timed:
        return curve
    (first, begun, sent, _), (last, ended, sent_then, _) = curve
    seconds, megabytes = (ended - begun) / (last - first), (sent_then - sent) / (last - first)
    return [
        [step, step * seconds, step * megabytes, loss]
        for step, _, _, loss in done[job.learns]["curve"]
    ]


def reached_after(curve: Curve, loss: float) -> float | None:
    """Return the seconds until the curve reached `loss`, or None."""
    if curve[0][3] <= loss:
        return curve[0][1]
    for before, point in itertools.pairwise(curve):
        if point[3] <= loss:
            share = (before[3] - loss) / (before[3] - point[3])
            return before[1] + share * (point[1] - before[1])
    return None


def row_of(rate: str, label: str, done: dict[Job, Row], args: argparse.Namespace) -> Row:
    """Make the row of a hook at a rate: means over the seeds."""
    jobs = [Job(rate, seed, label, args.steps, args.timed) for seed in args.seeds]
    curves = [curve_of(job, done) for job in jobs]
    plain = [curve_of(job._replace(label="ddp"), done) for job in jobs]
    goals = [curve[-1][3] * (1 + WITHIN) for curve in plain]
    reached = [reached_after(curve, goal) for curve, goal in zip(curves, goals, strict=True)]
    of_plain = [
        reached_after(curve, goal) or math.nan for curve, goal in zip(plain, goals, strict=True)
    ]
    row = {
        "section": rate,
        "rate": rate,
        "hook": label,
        "curves": curves,
        "reached_s": None,
        "sooner": None,
    }
    row["chosen"] = ", ".join(sorted({done[job]["chosen"] for job in jobs} - {None}))
    for place, name in ((1, "seconds"), (2, "megabytes"), (3, "loss")):
        row[name] = statistics.fmean(curve[-1][place] for curve in curves)
    if None not in reached:
        row["reached_s"] = statistics.fmean(reached)
        row["sooner"] = statistics.fmean(p / t for p, t in zip(of_plain, reached, strict=True))
    return row


DRAWN = {
    "ddp": ("plain DDP", "#222222"),
    "bf16": ("bf16", "#8c6d1f"),
    "native-int4": ("int4", "#22a699"),
    "auto": ("auto", "#1d4ed8"),
    "diloco-10": ("diloco", "#c2410c"),
}
"""Name and colour of the hooks that are drawn."""


def draw(rows: list[Row], file: Path) -> None:
    """Draw loss against time at the first rate, for the first seed, with a dot where plain DDP's
    last loss is reached but for a share of `WITHIN`.
    """
    from matplotlib.figure import Figure

    by_hook = {row["hook"]: row for row in rows if row["rate"] == rows[0]["rate"]}
    plain: Curve = by_hook["ddp"]["curves"][0]
    goal = plain[-1][3] * (1 + WITHIN)
    unit_s, unit = (60, "min") if plain[-1][1] > 120 else (1, "s")
    rate = rows[0]["rate"].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.axhline(goal, color="#cccccc", lw=1, zorder=0)
    for hook in [hook for hook in DRAWN if hook in by_hook]:
        name, color = DRAWN[hook]
        curve: Curve = by_hook[hook]["curves"][0]
        if chosen := by_hook[hook]["chosen"]:
            name += f", which chose {chosen}"
        seconds = reached_after(curve, goal)
        if seconds is not None:
            time_s = seconds / unit_s
            name += f": {time_s:.0f} {unit}" if time_s >= 10 else f": {time_s:.2g} {unit}"
            axis.plot(time_s, goal, color=color, marker="o", ms=7)
        axis.plot(
            [point[1] / unit_s for point in curve],
            [point[3] for point in curve],
            color=color,
            lw=2,
            label=name,
        )
    axis.set(
        xlabel=f"{unit} of {plain[-1][0]:,} steps on two ranks, {rate} between them",
        ylabel="validation loss, nats per byte",
        xlim=(0, None),
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, title=f"within {100 * WITHIN:g} % of plain DDP's last loss after")
    figure.savefig(file, dpi=300)


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument(
        "--rates", nargs="+", default=["100mbit", "1gbit", "unlimited"], help="as tc writes them"
    )
    made.add_argument("--hooks", nargs="+", default=HOOKS, metavar="HOOK", help=LABELS)
    made.add_argument("--seeds", type=int, nargs="+", default=[0])
    made.add_argument(
        "--steps", type=int, default=1500, help="curves are comparable only as a whole"
    )
    made.add_argument(
        "--timed", type=int, default=0, help="steps that are timed at each rate; 0: all run there"
    )
    made.add_argument(
        "--results", type=Path, default=Path("time_to_loss.jsonl"), help="finished trainings"
    )
    made.add_argument("--plot", type=Path, metavar="PNG", help="draw loss against time")
    return made


def main() -> None:
    quick: dict[str, Any] = {
        "rates": ["1gbit"],
        "hooks": ["ddp", "native-2"],
        "results": Path(os.devnull),
    }
    args = parse(arguments(), **quick, steps=2)
    if "ddp" not in args.hooks:
        args.hooks.insert(0, "ddp")
    changing = [label for label in args.hooks if label in CHOOSING or starts_late(label)]
    if args.timed and changing:
        raise SystemExit(f"--timed with {changing[0]}, whose steps do not all cost the same")
    jobs = [
        Job(rate, seed, label, args.steps, args.timed)
        for seed, rate, label in itertools.product(args.seeds, args.rates, args.hooks)
    ]
    at = machine()
    points = 1 if args.quick else POINTS
    jobs += [job.learns for job in jobs]
    done = run_missing(
        jobs, args.results, lambda row: Job(*row["job"]), lambda missing: run(missing, points)
    )
    rows = [row_of(rate, label, done, args) for rate in args.rates for label in args.hooks]
    columns = {
        "rate": number("rate"),
        "hook": number("hook"),
        "chosen": number("chosen"),
        "seconds": number("seconds", "{:.0f}"),
        "MB sent": number("megabytes", "{:.1f}"),
        "loss at the end": number("loss", "{:.4f}"),
        "reached, s": lambda row: "no" if row["reached_s"] is None else f"{row['reached_s']:.0f}",
        "x sooner": lambda row: "no" if row["sooner"] is None else f"{row['sooner']:.2f}",
    }
    report(
        "time_to_loss", f"time to loss: 2 ranks, {len(args.seeds)} seeds", args, at, rows, columns
    )
    if args.plot is not None:
        draw(rows, args.plot)


if __name__ == "__main__":
    if is_rank():
        serve(worker)
    main()
