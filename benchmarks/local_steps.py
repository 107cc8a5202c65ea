"""Communicating every H steps (local SGD, DiLoCo): what does it cost in loss, and what makes that small?

    python benchmarks/local_steps.py [--settings every=5 "every=30 momentum=0.9" ...] [--seeds 0] [--ranks 2 4]

The language model of language_model.py or a small network on scikit-learn's digits is trained by ranks that are
simulated in one process. Each has weights and an optimizer of its own, and a share of the batch of a step. Every
`every` steps their weights become

    g = mean over the ranks of (anchor - weights);  v = momentum v + g;  anchor -= outer_lr (g + momentum v)

A setting is a list of `name=value`; `Setting` has the defaults. `every=1 momentum=0 outer_lr=1` is not plain DDP,
because the optimizer runs on each rank's own gradients; `exact=1` (an exact mean of the gradients in every step) is.
Finished runs are appended to --results and not repeated; the whole table takes hours, and can be interrupted.

  loss      validation or test loss at the end (nats per byte for the language model): mean over the seeds
  to exact  difference to an all-reduce in every step, with the same seeds, task, optimizer and learning rate
  accuracy  of the digits: mean over the seeds
  bytes     sent per rank and step on average, as a share of what an all-reduce in float32 sends
"""

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from common import Row, number, parse, parser, report
from convergence import digits
from language_model import (
    ALL,
    BATCH,
    ByteTransformer,
    compressor_of,
    loss_of,
    recipe,
    run_missing,
    text,
    text_sum,
    windows,
)
from machine import machine
from torch import nn
from torch.nn import functional

from tests.support.simulation import SimulatedRanks

Job = tuple[str, int, int, int]  # setting, seed, ranks, steps


@dataclass(frozen=True)
class Setting:
    """How a training communicates.

    Attributes:
        task: "language", or "digits": an MLP, batches of 64 images.
        optimizer: each rank's: "adamw", "sgd" (momentum 0.9), or "muon" (torch's, on matrices, with 20 times the
            learning rate; AdamW on the rest).
        lr: the learning rate; 0: 1e-3, with SGD 0.05.
        exact: an all-reduce of the gradients in every step, and no local steps.
        every: H, steps between two outer steps.
        outer_lr: a number, or a rule in the number of ranks W: a name in `RULES`.
        wire: how the weight differences are sent, with error feedback: a hook of language_model.py, or "int2" (three
            levels), "int4-residual8" (the residual as 8-bit integers), "sparse" (one of 64 values).
        begin, end: shares of the run, at its beginning and end, in which `phase` averages the gradients of every step.
        phase: a hook of language_model.py.
        shrink: H follows the learning rate, from `every` down to 1.
        grow: H = max(every, (grow * peak / learning rate)^2) (QSR, arXiv 2310.14423), at most 100.
        moments: the ranks average AdamW's moments at each outer step.
        inner: factor of every optimizer's learning rate, or a rule of `RULES`, which applies to AdamW only: "sqrt" is
            the default of commhooks.
        clip: maximum norm of a rank's gradient; 0: no limit.
    """

    task: str = "language"
    optimizer: str = "adamw"
    lr: float = 0.0
    exact: bool = False
    every: int = 5
    momentum: float = 0.0
    outer_lr: str = "1"
    wire: str = "allreduce"
    begin: float = 0.0
    end: float = 0.0
    phase: str = "int4"
    shrink: bool = False
    grow: float = 0.0
    moments: bool = False
    inner: str = "1"
    clip: float = 1.0

    @classmethod
    def parse(cls, words: str) -> "Setting":
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        given = dict(word.split("=", 1) for word in words.split())
        if unknown := given.keys() - kinds.keys():
            raise SystemExit(f"--settings: no {sorted(unknown)[0]!r}; there are {', '.join(kinds)}")
        return cls(**{name: kinds[name](int(v) if kinds[name] is bool else v) for name, v in given.items()})


RULES = {
    "sqrt": lambda ranks: ranks**0.5,
    "sqrt2": lambda ranks: min(2.0, ranks**0.5),
    "1.2sqrt": lambda ranks: 1.2 * ranks**0.5,
    "w0.75": lambda ranks: ranks**0.75,
}


class Task(Protocol):
    """Data and a model: `train` and `loss` on a batch."""

    def model(self) -> nn.Module: ...
    def batch(self, generator: torch.Generator) -> Any: ...
    def parts(self, batch: Any, count: int) -> list[Any]: ...
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor: ...
    def result(self, model: nn.Module, steps: int) -> Row: ...


class Language:
    def __init__(self) -> None:
        self.source, self.held_out = text()

    def model(self) -> nn.Module:
        return ByteTransformer()

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return windows(self.source, BATCH, generator)

    def parts(self, batch: torch.Tensor, count: int) -> list[torch.Tensor]:
        return list(batch.chunk(count))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(model, batch)

    def result(self, model: nn.Module, steps: int) -> Row:
        validation = windows(self.held_out, ALL * BATCH, torch.Generator().manual_seed(1234)).split(BATCH)
        return {"loss": statistics.fmean(loss_of(model, batch).item() for batch in validation[: min(ALL, steps)])}


class Digits:
    def __init__(self) -> None:
        images, self.labels, test_images, self.test_labels = digits()
        self.images, self.test_images = images.flatten(1), test_images.flatten(1)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(len(self.labels), (64,), generator=generator)

    def parts(self, batch: torch.Tensor, count: int) -> list[torch.Tensor]:
        return list(batch.chunk(count))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(self.images[batch]), self.labels[batch])

    def result(self, model: nn.Module, steps: int) -> Row:
        output = model(self.test_images)
        right = (output.argmax(1) == self.test_labels).float().mean().item()
        return {"loss": functional.cross_entropy(output, self.test_labels).item(), "accuracy": right}


TASKS: dict[str, Callable[[], Task]] = {"language": Language, "digits": Digits}


def optimizers_of(model: nn.Module, setting: Setting, steps: int, count: int) -> list[tuple[Any, Any]]:
    """Return the optimizers of one rank, each with its schedule."""
    lr = setting.lr or (0.05 if setting.optimizer == "sgd" else 1e-3)
    factor = RULES[setting.inner](count) if setting.inner in RULES else float(setting.inner)
    of_adam = factor * lr
    if setting.inner not in RULES:
        lr *= factor
    if setting.optimizer == "adamw" and setting.task == "language":
        return [recipe(model, steps, of_adam / 1e-3)]
    every = list(model.parameters())
    matrices = [p for p in every if p.ndim == 2 and setting.optimizer == "muon"]
    rest = [p for p in every if not any(p is m for m in matrices)]
    made: list[tuple[torch.optim.Optimizer, float]] = []
    if setting.optimizer == "sgd":
        made.append((torch.optim.SGD(rest, lr=lr, momentum=0.9), lr))
    else:
        made.append((torch.optim.AdamW(rest, lr=of_adam, weight_decay=0.01), of_adam))
    if matrices:
        made.append((torch.optim.Muon(matrices, lr=20 * lr, weight_decay=0.01), 20 * lr))
    return [
        (each, torch.optim.lr_scheduler.OneCycleLR(each, peak, steps, pct_start=0.1, cycle_momentum=False))
        for each, peak in made
    ]


class Ranks:
    """The models, optimizers and schedules of all ranks."""

    def __init__(self, count: int, steps: int, setting: Setting, task: Task) -> None:
        self.task, self.clip = task, setting.clip
        self.models = [task.model() for _ in range(count)]
        for model in self.models[1:]:
            model.load_state_dict(self.models[0].state_dict())
        made = [optimizers_of(model, setting, steps, count) for model in self.models]
        self.optimizers = [[each[0] for each in own] for own in made]
        self.schedules = [each[1] for own in made for each in own]
        self.named = dict(reversed(list(self.models[0].named_parameters())))  # the order of DDP's buckets
        names = list(self.named)
        self.parameters = [[dict(model.named_parameters())[name] for name in names] for model in self.models]

    def gradients(self, batch: Any) -> list[torch.Tensor]:
        for model, part in zip(self.models, self.task.parts(batch, len(self.models)), strict=True):
            model.zero_grad()
            self.task.loss(model, part).backward()
        return [
            torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]) for parameters in self.parameters
        ]

    def set_gradients(self, flats: list[torch.Tensor]) -> None:
        for parameters, flat in zip(self.parameters, flats, strict=True):
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter)

    def step(self) -> None:
        for model, optimizers in zip(self.models, self.optimizers, strict=True):
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            for optimizer in optimizers:
                optimizer.step()
        for schedule in self.schedules:
            schedule.step()

    def weights(self) -> list[torch.Tensor]:
        return [torch.cat([p.detach().flatten() for p in parameters]) for parameters in self.parameters]

    @torch.no_grad()
    def set_weights(self, flat: torch.Tensor) -> None:
        for parameters in self.parameters:
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.copy_(part.view_as(parameter))

    def average_moments(self) -> None:
        for own in zip(*self.parameters, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                moments = [optimizer.state[p][name] for (optimizer,), p in zip(self.optimizers, own, strict=True)]
                mean = torch.stack(moments).mean(0)
                for each in moments:
                    each.copy_(mean)


class Wire(Protocol):
    """Averages a flat tensor per rank in place."""

    bytes_sent: float

    def step(self, buckets: list[torch.Tensor], /) -> Any: ...


class Coarse:
    """Error feedback around one of `CODES`, on flat tensors. Each rank codes its own numbers. Then, unless the code is
    sparse, each rank codes the part of the mean that it averages, and keeps the error."""

    def __init__(self, name: str, count: int, numel: int) -> None:
        self.name, self.count, self.numel, self.bytes_sent = name, count, numel, 0.0
        self.lost = [torch.zeros(numel) for _ in range(count)]
        self.lost_of_mean = torch.zeros(numel)

    def step(self, buckets: list[torch.Tensor]) -> None:
        total = torch.zeros(self.numel)
        for own, lost in zip(buckets, self.lost, strict=True):
            whole = own + lost
            sent = CODES[self.name](whole)
            lost.copy_(whole - sent)
            total += sent
        mean = total / self.count
        if self.name == "sparse":  # every rank gathers: 2 bits of value, 12 of place
            self.bytes_sent += (self.count - 1) * self.numel / 64 * 14 / 8
        else:
            whole = mean + self.lost_of_mean
            mean = CODES[self.name](whole)
            self.lost_of_mean = whole - mean
            bits = 2 + 16 / 64 if self.name == "int2" else 4 + 16 / 128
            self.bytes_sent += 2 * (self.count - 1) / self.count * self.numel * bits / 8
        if self.name == "int4-residual8":
            for lost in [*self.lost, self.lost_of_mean]:
                lost.copy_(integers(lost, 127, 128))
        for own in buckets:
            own.copy_(mean)


def blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    return functional.pad(x, (0, -len(x) % size)).view(-1, size)


def integers(x: torch.Tensor, levels: int, size: int) -> torch.Tensor:
    b = blocks(x, size)
    scale = b.abs().amax(1, keepdim=True).div(levels).clamp(min=1e-38)
    return (b / scale).round().mul(scale).flatten()[: len(x)]


def ternary(x: torch.Tensor) -> torch.Tensor:
    """Quantise to three levels with a scale per 64 values: values above 0.7 times the mean magnitude become their mean
    (Li, Liu, 2016)."""
    b = blocks(x, 64)
    large = b.abs() > 0.7 * b.abs().mean(1, keepdim=True)
    scale = (b.abs() * large).sum(1, keepdim=True) / large.sum(1, keepdim=True).clamp(min=1)
    return (b.sign() * large * scale).flatten()[: len(x)]


def sparse(x: torch.Tensor) -> torch.Tensor:
    """Keep the largest of 64 values in chunks of 4096, as one of two magnitudes with a sign (SparseLoCo)."""
    b = blocks(x, 4096)
    values, places = b.abs().topk(64, 1)
    high = values > values.mean(1, keepdim=True)
    means = [(values * each).sum(1, keepdim=True) / each.sum(1, keepdim=True).clamp(min=1) for each in (high, ~high)]
    sizes = torch.where(high, means[0], means[1])
    return torch.zeros_like(b).scatter_(1, places, sizes * b.gather(1, places).sign()).flatten()[: len(x)]


CODES = {"int2": ternary, "sparse": sparse, "int4-residual8": lambda x: integers(x, 7, 128)}


def train(job: Job) -> Row:
    words, seed, count, steps = job
    setting = Setting.parse(words)
    torch.set_num_threads(1)
    task = TASKS[setting.task]()
    torch.manual_seed(seed)
    ranks = Ranks(count, steps, setting, task)
    phase = SimulatedRanks(lambda: compressor_of("allreduce" if setting.exact else setting.phase), count, ranks.named)
    numel = sum(p.numel() for p in ranks.named.values())
    wire: Wire = (
        Coarse(setting.wire, count, numel)
        if setting.wire in CODES
        else SimulatedRanks(lambda: compressor_of(setting.wire), count, ranks.named)
    )
    batches = torch.Generator().manual_seed(seed)
    anchor, velocity = ranks.weights()[0], torch.zeros(numel)
    outer_lr = RULES[setting.outer_lr](count) if setting.outer_lr in RULES else float(setting.outer_lr)
    every_step = range(int(steps * setting.begin)), range(steps - int(steps * setting.end), steps)
    first = ranks.optimizers[0][0].param_groups[0]
    peak = first["max_lr"]
    local = rounds = 0
    for step in range(steps):
        averaged = setting.exact or step in every_step[0] or step in every_step[1]
        flats = ranks.gradients(task.batch(batches))
        if averaged:
            phase.step(flats)
            ranks.set_gradients(flats)
        lr = first["lr"]
        ranks.step()
        if averaged and not local:
            anchor = ranks.weights()[0]
            continue
        local += 1
        due = max(1, round(setting.every * lr / peak)) if setting.shrink else setting.every
        if setting.grow:
            due = min(100, max(due, int((setting.grow * peak / lr) ** 2)))
        if local < due and step + 1 < steps and step + 1 not in every_step[1]:
            continue
        local, rounds = 0, rounds + 1
        deltas = [anchor - weights for weights in ranks.weights()]
        wire.step(deltas)
        velocity = setting.momentum * velocity + deltas[0]
        anchor = anchor - outer_lr * (deltas[0] + setting.momentum * velocity)
        ranks.set_weights(anchor)
        if setting.moments or step + 1 in every_step[1]:  # else the same gradients would lead to different weights
            ranks.average_moments()
    with torch.no_grad():
        found = task.result(ranks.models[0], steps)
    sent = (phase.bytes_sent + wire.bytes_sent) / (steps * 4 * len(anchor))
    job_keys = {"setting": words, "seed": seed, "ranks": count, "steps": steps, "text": text_sum()}
    return {**job_keys, **found, "share": sent, "rounds": rounds}


# ---- the table -------------------------------------------------------------------------------------------------------

EXACT = "exact=1"


def baseline(words: str) -> str:
    """Return the all-reduce with which a setting is compared."""
    kept = [word for word in words.split() if word.split("=")[0] in ("task", "optimizer", "lr", "clip")]
    return " ".join([*kept, EXACT])


SETTINGS = [EXACT, "begin=1.0"]  # all-reduce, and int4 in every step
SETTINGS += [f"every={h}" for h in (2, 5, 30, 16, 3, 8, 100)]
SETTINGS += [f"every={h} momentum={m} outer_lr={lr}" for h in (5, 30) for m in (0.3, 0.5, 0.9) for lr in (0.7, 1.0)]
SETTINGS += [f"every={h} outer_lr={lr}" for h in (5, 30) for lr in (0.7, 1.2)]
SETTINGS += [f"every={h} wire={wire}" for h in (5, 30) for wire in ("int8", "int4")]
SETTINGS += [f"every={h} wire=int4 end={e}" for h in (5, 30) for e in (0.1, 0.2)]
SETTINGS += [f"every={h} wire=int4 begin={b}" for h in (5, 30) for b in (0.1, 0.3)]
SETTINGS += [f"every={h} wire=int4 begin=0.1 end=0.2" for h in (5, 30)]
SETTINGS += [f"every={h} {more}" for h in (5, 30) for more in ("shrink=1", "moments=1", "inner=0.7")]
# AdamW takes shorter steps on noisier gradients: which learning rate is best differs.
LOCAL = ["every=5", "every=5 wire=int4", "every=16 wire=int4", "every=30", "every=30 wire=int4"]
SETTINGS += [f"{words} inner={lr}" for words in (EXACT, "begin=1.0", *LOCAL) for lr in (1.4, 2.0, 2.8)]
SETTINGS += [f"every=5{wire} outer_lr=1.4" for wire in ("", " wire=int4")]
# Which outer learning rate needs no other inner one?
KINDS = ["", "task=digits ", "task=digits lr=0.003 ", "task=digits optimizer=sgd ", "task=digits optimizer=muon "]
SETTINGS += [f"{k}every={h} outer_lr={r} wire=int4" for k in KINDS for h in (5, 10, 16, 30) for r in ("1", *RULES)]
# Which inner one does the default of commhooks have? SGD without a limit of the norm needs none.
KINDS = [*(kind for kind in KINDS if "sgd" not in kind), "task=digits optimizer=sgd clip=0 "]
SETTINGS += [f"{k}every={h} inner=sqrt wire={w}" for k in KINDS for h in (5, 10, 20, 30) for w in ("int4", "int2")]
SETTINGS += [f"{k}every=30 inner=sqrt wire=sparse" for k in KINDS]
SETTINGS += [f"{k}every={h} inner=sqrt wire=int4 grow=1" for k in KINDS for h in (5, 10)]


def table(found: list[Row], settings: list[str], counts: list[int]) -> list[Row]:
    rows = []
    for count in counts:
        of_count = [run for run in found if run["ranks"] == count]
        for words in settings:
            exact = {run["seed"]: run["loss"] for run in found if run["setting"] == baseline(words)}
            if not (runs := [run for run in of_count if run["setting"] == words]):
                continue
            more = [run["loss"] / exact[run["seed"]] - 1 for run in runs]
            rows.append(
                {
                    "setting": words,
                    "ranks": count,
                    "loss": statistics.fmean(run["loss"] for run in runs),
                    "more": 100 * statistics.fmean(more),
                    "error": 100 * statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else None,
                    "accuracy": 100 * statistics.fmean(run.get("accuracy", 0) for run in runs) or None,
                    "share": 100 * statistics.fmean(run["share"] for run in runs),
                }
            )
    return rows


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--settings", nargs="+", default=SETTINGS, metavar="SETTING", help="see Setting")
    made.add_argument("--seeds", type=int, nargs="+", default=[0])
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    made.add_argument("--steps", type=int, default=1500)
    made.add_argument("--results", type=Path, default=Path("local_steps.jsonl"), help="finished runs")
    made.add_argument("--finished", action="store_true", help="show all runs in --results, and run nothing")
    return made


def main() -> None:
    quick = "task=digits every=3 momentum=0.5 wire=int4 begin=0.2 end=0.2 moments=1"
    args = parse(arguments(), ranks=[2], steps=12, settings=[quick])
    results = Path(os.devnull) if args.quick else args.results
    if args.finished:
        runs = [json.loads(line) for line in results.read_text().splitlines()]
        args.settings = list(dict.fromkeys(run["setting"] for run in runs if run["steps"] == args.steps))
        args.ranks = sorted({run["ranks"] for run in runs})
    settings = list(dict.fromkeys(each for words in args.settings for each in (baseline(words), words)))
    for words in settings:
        Setting.parse(words)
    at = machine()
    # An all-reduce sees the same batches with any number of ranks.
    jobs = [
        (words, seed, count, args.steps)
        for count in args.ranks
        for seed in args.seeds
        for words in settings
        if count == args.ranks[0] or words != baseline(words)
    ]
    found = runs if args.finished else run_missing(jobs, results, train, "setting")
    rows = table([run for run in found if run["steps"] == args.steps], settings, args.ranks)
    columns = {
        "setting": number("setting"),
        "ranks": number("ranks"),
        "loss": number("loss", "{:.4f}"),
        "to exact": lambda row: f"{row['more']:+.2f} %" + (f" ({row['error']:.2f})" if row["error"] else ""),
        "accuracy": lambda row: f"{row['accuracy']:.2f} %" if row["accuracy"] else "",
        "bytes": number("share", "{:.2f} %"),
    }
    report("local_steps", f"local steps: {args.steps} steps, {len(args.seeds)} seeds", args, at, rows, columns)


if __name__ == "__main__":
    main()
