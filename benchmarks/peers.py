"""How soon do commhooks and other projects reach plain DDP's loss over a slow link?

    make bench-peers ARGS="--results FILE [--ranks 2 4] [--rates 100mbit] [--parts learn time]"

A byte-level transformer with 0.5 M parameters (the one of language_model.py, narrower) trains for
400 steps, with 4 sequences per rank and step. Each rank is a process in a network namespace of its
own; the namespaces are joined by a switch, and `tc tbf` limits what each of them sends. Needs
Linux, root, `ip` and `tc`.

Every method has the settings of its own documentation (peers_methods.py names the page), and the
same data, optimizer (AdamW), schedule and clipping. It runs with 1, 2, 4, 8 and 16 times the
learning rate of language_model.py. What is validated is the mean of the ranks' weights, which were
put aside during the run.

The losses do not depend on the link, nor the seconds of a step on the learning rate. So there are
two parts, and a check, which append to --results and may run at different times:

  learn    whole runs without a limit: the losses
  time     some steps at each rate, all methods in turn, several times: the seconds and bytes. The
           seconds of a run are its steps times their median
  check    whole runs over 100 Mbit/s of some methods, also of those whose losses might depend on
           the link: hivemind averages in the background, and `auto` chooses

  loss     validation loss at the end, nats per byte, with the learning rate x1, and with the best
           of the five
  sooner   the seconds until plain DDP is at most 0.5 % above its own last loss, divided by the
           seconds until the method is at most 0.5 % above that same loss: both with x1 / both with
           the best of their five. "no": not within these steps
  MB       sent by a rank in the run at the first rate, by its interface: the mean over the ranks

A run that ends with an error, or does not end within its limit, is a row that says so.
"""

import argparse
import contextlib
import datetime
import itertools
import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import (
    Cell,
    Row,
    machine,
    number,
    parse,
    parser,
    report,
    run_missing,
    spread,
    steady,
    summary,
)
from language_model import ByteTransformer, loss_of, recipe, text, validation_loss, windows
from limited_link import PORT, SUBNET, Switch, bits_per_second, bytes_sent_here
from peers_methods import BASE, METHODS, SEQUENCES, Training
from time_to_loss import WITHIN, Curve, reached_after
from torch import nn

WIDTH, LAYERS = 96, 4
POINTS, VALIDATION_BATCHES = 10, 16
WARM_UP, TIMED = 3, 8  # steps, at least; a method with rounds: whole ones
PARTS = ("learn", "time", "check")
FACTORS = [1.0, 2.0, 4.0, 8.0, 16.0]  # of the learning rate
LIMITS_S = {"learn": 900.0, "time": 300.0, "check": 900.0, "fails": 180.0}


class Job(NamedTuple):
    method: str
    ranks: int
    rate: str
    faster: float
    steps: int
    turn: int = 0  # of a timed run, from 1; 0: a whole run


CHECKED = ("commhooks int4", "commhooks auto", "hivemind")
"""Methods of which whole runs at 100 Mbit/s check what is put together from losses and seconds."""


# ---- on each rank --------------------------------------------------------------------------------


def marks_of(job: Job) -> list[int]:
    """Return the steps at which weights, seconds and bytes are put aside."""
    if job.turn:
        every = METHODS[job.method].every
        first = METHODS[job.method].settles or every * math.ceil(WARM_UP / every)
        return [first, first + every * math.ceil(TIMED / every)]
    return [job.steps * (point + 1) // POINTS for point in range(POINTS)]


def exact_steps(job: Job) -> int:
    """Return the steps of all-reduce before the method begins."""
    return min(METHODS[job.method].exact, job.steps // 4)


def train(link: Switch, rank: int, job: Job) -> Row:
    torch.manual_seed(0)
    model = ByteTransformer(WIDTH, LAYERS)
    optimizer, schedule = recipe(model, job.steps, job.faster)
    method = METHODS[job.method]
    exact = 0 if job.turn else exact_steps(job)
    marks = marks_of(job)
    batches = torch.Generator().manual_seed(0)
    aside: list[list[torch.Tensor]] = []
    curve: Curve = []
    with method.adapter(Training(rank, job.ranks, model, optimizer, exact)) as loop:
        dist.barrier()
        started = time.perf_counter()
        before = bytes_sent_here(link.interfaces[rank])
        for step in range(1, marks[-1] + 1):
            batch = windows(text()[0], SEQUENCES * job.ranks, batches).chunk(job.ranks)[rank]
            optimizer.zero_grad()
            loss_of(loop.model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loop.step()
            schedule.step()
            if step in marks:
                seconds = time.perf_counter() - started
                megabytes = (bytes_sent_here(link.interfaces[rank]) - before) / 1e6
                curve.append([step, seconds, megabytes])
                aside.append([p.detach().clone() for p in model.parameters()])
        dist.barrier()
        chosen = loop.chosen()
        if rank == 0:
            link.limit("unlimited")
    if not job.turn:
        for point, weights in zip(curve, aside, strict=True):
            point.append(loss_of_mean(weights, rank))
    return {"curve": curve, "chosen": chosen}


@torch.no_grad()
def loss_of_mean(weights: list[torch.Tensor], rank: int) -> float:
    """Return the validation loss of the mean over the ranks, on rank 0."""
    model = ByteTransformer(WIDTH, LAYERS)
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        dist.all_reduce(weight)
        parameter.copy_(weight / dist.get_world_size())
    return validation_loss(model, VALIDATION_BATCHES) if rank == 0 else math.nan


def rank_main(link: Switch, rank: int, job: Job, answers: Any) -> None:
    """Train in the rank's namespace, send the result or an error, and end this process."""
    os.setsid()  # with the daemons that it starts
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    if "PEERS_VERBOSE" not in os.environ:
        os.dup2(null, 2)
    link.enter(rank)
    os.environ |= {
        "GLOO_SOCKET_IFNAME": link.interfaces[rank],
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": f"{SUBNET}.1",
        "MASTER_PORT": str(PORT),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",  # or Accelerate takes as many threads as there are cores
        "RUST_LOG": "error",
    }
    try:
        with steady(pinned=False):
            dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
            answers.send(train(link, rank, job))
    except BaseException as error:
        line = (str(error).strip().splitlines() or [""])[0]
        answers.send({"error": f"{type(error).__name__}: {line}"})
    os._exit(0)


def run_job(link: Switch, job: Job, limit_s: float) -> Row:
    """Run all ranks of a job. A row with "error" says that they failed, or did not end."""
    link.limit(job.rate)
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(job.ranks)]
    ranks = [
        fork.Process(target=rank_main, args=(link, rank, job, sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    for _, sender in pipes:
        sender.close()
    try:
        answers = answers_of([receiver for receiver, _ in pipes], limit_s)
        died = [rank.exitcode for rank in ranks if rank.exitcode]
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # and the daemons that it has started
            rank.join()
    errors = [answer["error"] for answer in answers if "error" in answer]
    if died:
        errors = [f"a rank died (exit code {died[0]})"]
    if errors:
        return {"error": errors[0]}
    for point, *others in zip(*(answer["curve"] for answer in answers), strict=True):
        point[2] = statistics.fmean([point[2], *(other[2] for other in others)])
    return answers[0]


def answers_of(receivers: list[Any], limit_s: float) -> list[Row]:
    """Receive each rank's answer within the limit; after an error within some seconds."""
    deadline = time.monotonic() + limit_s
    answers: list[Row] = []
    for receiver in receivers:
        try:
            late = not receiver.poll(max(0.0, deadline - time.monotonic()))
            answers.append({"error": f"no end within {limit_s:.0f} s"} if late else receiver.recv())
        except EOFError:
            answers.append({"error": "a rank died"})
        if "error" in answers[-1]:
            deadline = min(deadline, time.monotonic() + 5)
    return answers


# ---- the table -----------------------------------------------------------------------------------


def jobs_of(part: str, args: argparse.Namespace) -> list[Job]:
    """Return the jobs of a part; only one of a method that fails."""
    works = [name for name in args.methods if not METHODS[name].once]
    if part == "time":
        return [
            Job(name, ranks, rate, 1.0, args.steps, turn + 1)
            for turn in range(args.turns)
            for ranks, rate, name in itertools.product(args.ranks, args.rates, works)
        ]
    if part == "check":
        return [Job(name, 2, "100mbit", 1.0, args.steps) for name in works if name in CHECKED]
    orders = itertools.product(args.factors, args.ranks, args.methods)
    jobs = [Job(name, ranks, "unlimited", faster, args.steps) for faster, ranks, name in orders]
    first = {job.method: job for job in reversed(jobs)}
    return [job for job in jobs if job.method in works or job == first[job.method]]


def run(jobs: list[Job], limit_s: float) -> Iterator[Row]:
    torch.set_num_threads(1)
    text()  # before the forks
    at = machine()
    for ranks, some in itertools.groupby(jobs, lambda job: job.ranks):
        with Switch(ranks) as link:
            for job in some:
                load = os.getloadavg()[0]
                limit = LIMITS_S["fails"] if METHODS[job.method].once else limit_s
                yield {"job": job, "machine": at, "load": load, **run_job(link, job, limit)}


Done = dict[Job, Row]


class Cost(NamedTuple):
    """Of a step: the seconds in each timed run, and the megabytes. `first`: of the steps before
    those, means.
    """

    seconds: list[float]
    megabytes: float
    first_seconds: float
    first_megabytes: float

    @classmethod
    def of(cls, job: Job, done: Done) -> "Cost | None":
        timed = [
            row["curve"]
            for other, row in done.items()
            if other.turn and other[:3] == job[:3] and "curve" in row
        ]
        if not timed:
            return None
        first, last = (int(point[0]) for point in timed[0])
        return cls(
            [(end[1] - begin[1]) / (last - first) for begin, end in timed],
            statistics.median(end[2] - begin[2] for begin, end in timed) / (last - first),
            statistics.median(begin[1] for begin, _ in timed) / first,
            statistics.median(begin[2] for begin, _ in timed) / first,
        )


def predicted(job: Job, done: Done) -> Curve | None:
    """Return the curve of a run at the job's rate from its losses without a limit, and from the
    costs of its steps. Before the method begins, these are plain DDP's.
    """
    learned = done.get(job._replace(rate="unlimited"), {}).get("curve")
    own = Cost.of(job, done)
    plain = Cost.of(job._replace(method=BASE), done)
    if learned is None or own is None or plain is None:
        return None
    early = METHODS[job.method].settles
    early_seconds = own.first_seconds
    early_megabytes = own.first_megabytes
    if exact := exact_steps(job):
        early = exact
        early_seconds = statistics.median(plain.seconds)
        early_megabytes = plain.megabytes
    curve = []
    for step, _, _, loss in learned:
        before = min(step, early)
        seconds = before * early_seconds + (step - before) * statistics.median(own.seconds)
        megabytes = before * early_megabytes + (step - before) * own.megabytes
        curve.append([step, seconds, megabytes, loss])
    return curve


def sooner(job: Job, plain: Job, done: Done) -> float | None:
    """Return the speed-up over `plain` until the job comes within a share of its last loss;
    0: not within these steps, None: not measured.
    """
    curve = predicted(job, done)
    of_plain = predicted(plain, done)
    if curve is None or of_plain is None:
        return None
    goal = of_plain[-1][3] * (1 + WITHIN)
    seconds = reached_after(curve, goal)
    return 0.0 if seconds is None else (reached_after(of_plain, goal) or math.nan) / seconds


def best_of(jobs: list[Job], done: Done) -> Job | None:
    """Return the job with the lowest loss at its end; None before all have run."""
    if not all(job in done for job in jobs):
        return None
    ends = {job: done[job]["curve"][-1][3] for job in jobs if "curve" in done[job]}
    return min(ends, key=ends.__getitem__, default=None)


def row_of(name: str, ranks: int, args: argparse.Namespace, done: Done) -> Row:
    def jobs(method: str) -> list[Job]:
        return [Job(method, ranks, "unlimited", faster, args.steps) for faster in args.factors]

    documented = jobs(name)[0]
    best = best_of(jobs(name), done)
    best_plain = best_of(jobs(BASE), done)
    row: Row = {"section": ranks, "method": name, "ranks": ranks}
    row["error"] = done.get(documented, {}).get("error")
    if "curve" in done.get(documented, {}):
        row["loss"] = done[documented]["curve"][-1][3]
    if best:
        row["best"] = f"{done[best]['curve'][-1][3]:.3f} (x{best.faster:g})"
    for rate in args.rates:
        here = documented._replace(rate=rate)
        row[f"sooner_{rate}"] = sooner(here, here._replace(method=BASE), done)
        if best and best_plain:
            plain = best_plain._replace(rate=rate)
            row[f"best_{rate}"] = sooner(best._replace(rate=rate), plain, done)
        if METHODS[name].settles:
            row[f"chosen_{rate}"] = done.get(here._replace(turn=1), {}).get("chosen")
        if cost := Cost.of(here, done):
            row[rate] = summary([1000 * seconds for seconds in cost.seconds], "ms")
        if curve := predicted(here, done):
            row.setdefault("megabytes", curve[-1][2])
    return row


def times(rate: str) -> Cell:
    """Format the speed-up: with the learning rate x1 / with the best."""

    def cell(row: Row) -> str:
        values = [row[f"sooner_{rate}"], row.get(f"best_{rate}")]
        words = [f"{v:.3g}" if v else "no" for v in values if v is not None]
        note = f" ({row[f'chosen_{rate}']})" if row.get(f"chosen_{rate}") else ""
        return " / ".join(words) + note if words else ""

    return cell


def check(done: Done) -> list[str]:
    """Compare whole runs with what their parts predict."""
    notes = []
    for job in [job for job in done if job.rate != "unlimited" and not job.turn]:
        real = done[job].get("curve")
        guess = predicted(job, done)
        if real and guess:
            notes.append(
                f"{job.method}, {job.ranks} ranks, {job.rate}, whole: {real[-1][1]:.1f} s, loss"
                f" {real[-1][3]:.4f}; from its parts {guess[-1][1]:.1f} s, {guess[-1][3]:.4f}"
            )
    return notes


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="none: the table")
    made.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD")
    made.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    made.add_argument("--rates", nargs="+", default=["10mbit", "100mbit", "1gbit"])
    made.add_argument("--factors", nargs="+", type=float, default=FACTORS, metavar="X")
    made.add_argument("--steps", type=int, default=400)
    made.add_argument("--turns", type=int, default=3, help="timed runs of each method and rate")
    made.add_argument("--results", type=Path, default=Path("peers.jsonl"), help="finished runs")
    return made


def main() -> None:
    args = parse(
        arguments(),
        methods=[BASE],
        ranks=[2],
        rates=["1gbit"],
        factors=[1.0],
        steps=2,
        turns=1,
        results=Path(os.devnull),
    )
    if unknown := set(args.methods) - set(METHODS):
        raise SystemExit(f"--methods {unknown.pop()!r} is none of {', '.join(METHODS)}")
    _ = [bits_per_second(rate) for rate in args.rates]  # refuses a wrong one
    at = machine()
    done: Done = {}
    for part in args.parts or PARTS:
        done |= run_missing(
            jobs_of(part, args) if args.parts else [],
            args.results,
            lambda row: Job(*row["job"]),
            lambda missing, limit_s=LIMITS_S[part]: run(missing, limit_s),
        )
    rows = [row_of(name, ranks, args, done) for ranks in args.ranks for name in args.methods]
    rows = [row for row in rows if "loss" in row or row["error"]]
    columns = {
        "ranks": number("ranks"),
        "method": number("method"),
        "loss": lambda row: f"{row['loss']:.3f}" if "loss" in row else row["error"] or "",
        "best": number("best"),
        "MB": number("megabytes", "{:.1f}"),
    }
    title = f"time to plain DDP's loss, {args.steps} steps: x sooner, with x1 / the best rate"
    at_rate = {rate: f"{rate[:-4]} {rate[-4].upper()}bit/s" for rate in args.rates}
    sooner_columns = columns | {at_rate[rate]: times(rate) for rate in args.rates}
    report("peers", title, args, at, rows, sooner_columns, check(done))
    args.json = None
    of_steps = {
        at_rate[rate]: lambda row, rate=rate: spread("ms", 0)(row.get(rate, {}))
        for rate in args.rates
    }
    steps_columns = {name: columns[name] for name in ("ranks", "method")} | of_steps
    report("peers", "ms of a step: median (quartiles)", args, at, rows, steps_columns)


if __name__ == "__main__":
    main()
