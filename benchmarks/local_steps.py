"""What does communicating every H steps (local SGD, DiLoCo) cost in loss?

    python benchmarks/local_steps.py [--settings every=5 "every=30 momentum=0.9" ...] [--seeds 0]
                                     [--ranks 2 4]

The language model of language_model.py, a smaller one, or a small network on scikit-learn's digits
is trained by ranks that are simulated in one process. Each has weights and an optimizer of its own,
and a share of the batch of a step, or with `sequences` a batch of its own. Every `every` steps
their weights become

    g = mean over the ranks of (anchor - weights)
    v = momentum v + g
    anchor -= outer_lr (g + momentum v)

A setting is a list of `name=value`; `Setting` has the defaults. `every=1 momentum=0 outer_lr=1` is
not plain DDP, because the optimizer runs on each rank's own gradients; `exact=1` (an exact mean of
the gradients in every step) is. Finished runs are appended to --results and not repeated.

  loss      validation or test loss at the end (nats per byte for the language model): mean over
            the seeds
  to exact  difference to an all-reduce in every step, with the same seeds, task, optimizer and
            learning rate; empty if that was not run
  to best   the same, to the best of the all-reduces with the most seeds, at whatever `lr` and
            `inner`; with several seeds also the range
  accuracy  of the digits: mean over the seeds
  bytes     sent per rank and step on average, as a share of what an all-reduce in float32 sends
"""

import argparse
import functools
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from common import Row, machine, number, parse, parser, report, run_missing, setting_from
from language_model import (
    ALL,
    BATCH,
    ByteTransformer,
    Job,
    compressor_of,
    loss_of,
    on_all_cores,
    recipe,
    text,
    text_sum,
    validation_loss,
    windows,
)
from torch import nn
from torch.nn import functional

from tests.support.simulation import SimulatedRanks


@dataclass(frozen=True)
class Setting:
    """How a training communicates.

    Attributes:
        task: "language"; "small": the same with 0.14 M parameters; "digits": an MLP, batches of
            64 images.
        optimizer: each rank's: "adamw", "sgd" (momentum 0.9), or "muon" (torch's, on the matrices
            between the embeddings and the output; AdamW on the rest).
        muon: Muon's learning rate relative to that of the rest.
        lr: the learning rate; 0: 1e-3, with SGD 0.05.
        exact: an all-reduce of the gradients in every step, and no local steps.
        every: H, steps between two outer steps.
        start: so many steps with an all-reduce of the gradients in float32 before the first round.
            Their learning rate, too, has the factor `inner`, which commhooks applies only later.
        wire: how the weight differences, with `exact` the gradients, are sent: a hook of
            language_model.py.
        inner: factor of every optimizer's learning rate; "sqrt", the default of commhooks, is the
            square root of the number of ranks, for AdamW only.
        clip: maximum norm of a rank's gradient; 0: no limit.
        sequences: of each rank in a step; 0: the batch of the task is divided among the ranks.
        radial: multiply the mean difference of each tensor by the mean of the ranks' norms over its
            own norm ("radial averaging" of Decoupled DiLoCo, arXiv 2604.21428).
    """

    task: str = "language"
    optimizer: str = "adamw"
    muon: float = 20.0
    lr: float = 0.0
    exact: bool = False
    every: int = 5
    start: int = 0
    momentum: float = 0.0
    outer_lr: float = 1.0
    wire: str = "allreduce"
    inner: str = "1"
    clip: float = 1.0
    sequences: int = 0
    radial: bool = False


class Task(Protocol):
    """Data and a model. `size`: of the batch of a step, of all ranks."""

    size: int

    def model(self) -> nn.Module: ...
    def batch(self, generator: torch.Generator) -> torch.Tensor: ...
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor: ...
    def result(self, model: nn.Module, steps: int) -> Row: ...


class Language:
    size = BATCH

    def model(self) -> nn.Module:
        return ByteTransformer()

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return windows(text()[0], self.size, generator)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(model, batch)

    def result(self, model: nn.Module, steps: int) -> Row:
        return {"loss": validation_loss(model, min(ALL, steps))}


class Small(Language):
    def model(self) -> nn.Module:
        return ByteTransformer(width=64, layers=2, heads=2)


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images and labels, test images and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train = order[:1437]
    test = order[1437:]
    return images[train], labels[train], images[test], labels[test]


class Digits:
    size = 64

    def __init__(self) -> None:
        images, self.labels, test_images, self.test_labels = digits()
        self.images = images.flatten(1)
        self.test_images = test_images.flatten(1)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(len(self.labels), (self.size,), generator=generator)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(self.images[batch]), self.labels[batch])

    def result(self, model: nn.Module, steps: int) -> Row:
        output = model(self.test_images)
        right = (output.argmax(1) == self.test_labels).float().mean().item()
        return {
            "loss": functional.cross_entropy(output, self.test_labels).item(),
            "accuracy": right,
        }


TASKS: dict[str, Callable[[], Task]] = {"language": Language, "small": Small, "digits": Digits}


def optimizers_of(
    model: nn.Module, setting: Setting, steps: int, count: int
) -> list[tuple[Any, Any]]:
    """Return the optimizers of one rank, each with its schedule."""
    lr = setting.lr or (0.05 if setting.optimizer == "sgd" else 1e-3)
    factor = count**0.5 if setting.inner == "sqrt" else float(setting.inner)
    of_adam = factor * lr
    if setting.inner != "sqrt":
        lr *= factor
    if setting.optimizer == "adamw" and setting.task != "digits":
        return [recipe(model, steps, of_adam / 1e-3)]
    parameters = list(model.parameters())
    inside = getattr(model, "blocks", model).parameters()
    matrices = [p for p in inside if p.ndim == 2 and setting.optimizer == "muon"]
    rest = [p for p in parameters if not any(p is m for m in matrices)]
    made: list[tuple[torch.optim.Optimizer, float]] = []
    if setting.optimizer == "sgd":
        made.append((torch.optim.SGD(rest, lr=lr, momentum=0.9), lr))
    else:
        made.append((torch.optim.AdamW(rest, lr=of_adam, weight_decay=0.01), of_adam))
    if matrices:
        of_muon = setting.muon * lr
        made.append((torch.optim.Muon(matrices, lr=of_muon, weight_decay=0.01), of_muon))
    return [
        (
            optimizer,
            torch.optim.lr_scheduler.OneCycleLR(
                optimizer, peak, steps, pct_start=0.1, cycle_momentum=False
            ),
        )
        for optimizer, peak in made
    ]


def _in_order(model: nn.Module, names: list[str]) -> list[nn.Parameter]:
    parameters = dict(model.named_parameters())
    return [parameters[name] for name in names]


def _flat(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])


class Ranks:
    """The models, optimizers and schedules of all ranks."""

    def __init__(self, count: int, steps: int, setting: Setting, task: Task) -> None:
        self.task = task
        self.clip = setting.clip
        self.models = [task.model() for _ in range(count)]
        for model in self.models[1:]:
            model.load_state_dict(self.models[0].state_dict())
        self.optimizers: list[list[torch.optim.Optimizer]] = []
        self.schedules: list[Any] = []
        for model in self.models:
            pairs = optimizers_of(model, setting, steps, count)
            self.optimizers.append([optimizer for optimizer, _ in pairs])
            self.schedules += [schedule for _, schedule in pairs]
        # the order of DDP's buckets
        self.named = dict(reversed(list(self.models[0].named_parameters())))
        names = list(self.named)
        self.parameters = [_in_order(model, names) for model in self.models]

    def gradients(self, batch: torch.Tensor) -> list[torch.Tensor]:
        for model, part in zip(self.models, batch.chunk(len(self.models)), strict=True):
            model.zero_grad()
            self.task.loss(model, part).backward()
        return [_flat(p.grad for p in parameters) for parameters in self.parameters]

    def set_gradients(self, flats: list[torch.Tensor]) -> None:
        for parameters, flat in zip(self.parameters, flats, strict=True):
            for parameter, part in zip(
                parameters, flat.split([p.numel() for p in parameters]), strict=True
            ):
                parameter.grad = part.view_as(parameter)

    def step(self) -> None:
        for model, optimizers in zip(self.models, self.optimizers, strict=True):
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            for optimizer in optimizers:
                optimizer.step()
        for schedule in self.schedules:
            schedule.step()

    def norms(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the norm of each parameter's part of `flat`."""
        parts = flat.split([parameter.numel() for parameter in self.parameters[0]])
        return torch.stack([part.norm() for part in parts])

    def scale(self, flat: torch.Tensor, factors: torch.Tensor) -> None:
        """Multiply each parameter's part of `flat`."""
        parts = flat.split([parameter.numel() for parameter in self.parameters[0]])
        for part, factor in zip(parts, factors, strict=True):
            part *= factor

    def weights(self) -> list[torch.Tensor]:
        return [_flat(p.detach() for p in parameters) for parameters in self.parameters]

    @torch.no_grad()
    def set_weights(self, flat: torch.Tensor) -> None:
        for parameters in self.parameters:
            for parameter, part in zip(
                parameters, flat.split([p.numel() for p in parameters]), strict=True
            ):
                parameter.copy_(part.view_as(parameter))


@dataclass
class Trained:
    ranks: Ranks
    rounds: int
    bytes_sent: int


def train_ranks(setting: Setting, task: Task, seed: int, count: int, steps: int) -> Trained:
    torch.manual_seed(seed)
    ranks = Ranks(count, steps, setting, task)
    wire = SimulatedRanks(lambda: compressor_of(setting.wire), count, ranks.named)
    of_gradients = wire
    if not setting.exact:
        of_gradients = SimulatedRanks(lambda: compressor_of("allreduce"), count, ranks.named)
    averaged = steps if setting.exact else setting.start
    batches = torch.Generator().manual_seed(seed)
    anchor = ranks.weights()[0]
    velocity = torch.zeros_like(anchor)
    rounds = 0
    for step in range(1, steps + 1):
        gradients = ranks.gradients(task.batch(batches))
        if step <= averaged:
            of_gradients.step(gradients)
            ranks.set_gradients(gradients)
        ranks.step()
        if step <= averaged:
            anchor = ranks.weights()[0]
            continue
        if (step - averaged) % setting.every and step < steps:
            continue
        rounds += 1
        deltas = [anchor - weights for weights in ranks.weights()]
        norms = torch.stack([ranks.norms(delta) for delta in deltas]).mean(0)
        wire.step(deltas)
        if setting.radial:
            ranks.scale(deltas[0], norms / ranks.norms(deltas[0]).clamp_min(1e-30))
        velocity = setting.momentum * velocity + deltas[0]
        anchor = anchor - setting.outer_lr * (deltas[0] + setting.momentum * velocity)
        ranks.set_weights(anchor)
    return Trained(ranks, rounds, sum(sent.bytes_sent for sent in {wire, of_gradients}))


def train(job: Job) -> Row:
    words, seed, count, steps, text_of_job = job
    setting = setting_from(words, Setting)
    torch.set_num_threads(1)
    task = TASKS[setting.task]()
    if setting.sequences:
        task.size = setting.sequences * count
    trained = train_ranks(setting, task, seed, count, steps)
    with torch.no_grad():
        result = task.result(trained.ranks.models[0], steps)
    sent = trained.bytes_sent / (steps * 4 * len(trained.ranks.weights()[0]))
    row = {"setting": words, "seed": seed, "ranks": count, "steps": steps, "text": text_of_job}
    return row | result | {"share": sent, "rounds": trained.rounds}


# ---- the table -----------------------------------------------------------------------------------

EXACT = "exact=1"


TUNED = ("lr", "muon", "inner")


def baseline(words: str) -> str:
    """Return the all-reduce with which a setting is compared."""
    same = ("task", "optimizer", "muon", "lr", "clip", "sequences")
    kept = [word for word in words.split() if word.split("=")[0] in same]
    return " ".join([*kept, EXACT])


def exact_runs(words: str, losses: dict[str, dict[int, float]]) -> list[dict[int, float]]:
    """Return the losses of the all-reduces that differ from a setting's baseline in the learning
    rate alone; only those with the most seeds.
    """

    def but_for_the_rate(words: str) -> list[str]:
        return [word for word in words.split() if word.split("=")[0] not in TUNED]

    rates = [
        by_seed
        for setting, by_seed in losses.items()
        if but_for_the_rate(setting) == but_for_the_rate(baseline(words))
    ]
    most = max(map(len, rates))
    return [by_seed for by_seed in rates if len(by_seed) == most]


def sees_the_same(words: str) -> bool:
    """Whether an all-reduce sees the same batches with any number of ranks."""
    return "sequences=" not in words


TASKS_AND_OPTIMIZERS = [
    "",
    "task=digits ",
    "task=digits lr=0.003 ",
    "task=digits optimizer=muon ",
    "task=digits optimizer=sgd clip=0 ",
]
SETTINGS = [EXACT, f"{EXACT} wire=int4"]
for every in (5, 10, 20, 30):
    SETTINGS += [f"every={every}", f"every={every} wire=int4"]
    SETTINGS += [f"{start}every={every} inner=sqrt wire=int4" for start in TASKS_AND_OPTIMIZERS]
# AdamW takes shorter steps on noisier gradients: which learning rate is best differs.
for words in (EXACT, f"{EXACT} wire=int4", "every=5 wire=int4", "every=30"):
    SETTINGS += [f"{words} inner={factor}" for factor in (1.4, 2.0, 2.8)]


def job_of(row: Row) -> Job:
    return row["setting"], row["seed"], row["ranks"], row["steps"], row["text"]


def losses_by_seed(runs: list[Row]) -> dict[str, dict[int, float]]:
    """Return the losses of each setting, by seed."""
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        losses.setdefault(run["setting"], {})[run["seed"]] = run["loss"]
    return losses


def row_of(words: str, count: int, runs: list[Row]) -> Row | None:
    """Make a row from the runs of a setting, one for each seed, compared with its baseline; None
    without runs.
    """
    comparable = [run for run in runs if run["ranks"] == count or sees_the_same(words)]
    of_setting = [run for run in runs if (run["setting"], run["ranks"]) == (words, count)]
    if not of_setting:
        return None
    losses = losses_by_seed(comparable)
    exact = losses.get(baseline(words), {})
    more = [run["loss"] / exact[run["seed"]] - 1 for run in of_setting if run["seed"] in exact]
    best = min(exact_runs(words, losses), key=lambda by_seed: statistics.fmean(by_seed.values()))
    to_best = [run["loss"] / best[run["seed"]] - 1 for run in of_setting]
    return {
        "section": count,
        "setting": words,
        "ranks": count,
        "seeds": len(of_setting),
        "loss": statistics.fmean(run["loss"] for run in of_setting),
        "more": 100 * statistics.fmean(more) if more else None,
        "to_best": 100 * statistics.fmean(to_best),
        "to_best_range": [100 * min(to_best), 100 * max(to_best)],
        "error": 100 * statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else None,
        "accuracy": 100 * statistics.fmean(run.get("accuracy", 0) for run in of_setting) or None,
        "share": 100 * statistics.fmean(run["share"] for run in of_setting),
    }


def cell_of_same_rate(row: Row) -> str:
    if row["more"] is None:
        return ""
    return f"{row['more']:+.2f} %" + (f" ({row['error']:.2f})" if row["error"] else "")


def cell_of_best(row: Row) -> str:
    mean = f"{row['to_best']:+.1f} %"
    if row["seeds"] == 1:
        return mean
    low, high = row["to_best_range"]
    return f"{mean} ({low:+.1f} .. {high:+.1f})"


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument(
        "--settings", nargs="+", default=SETTINGS, metavar="SETTING", help="see Setting"
    )
    made.add_argument("--seeds", type=int, nargs="+", default=[0])
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    made.add_argument("--steps", type=int, default=1500)
    made.add_argument(
        "--results", type=Path, default=Path("local_steps.jsonl"), help="finished runs"
    )
    made.add_argument(
        "--finished", action="store_true", help="show all runs in --results, and run nothing"
    )
    return made


def main() -> None:
    quick = ["task=digits every=3 momentum=0.5 wire=int4 inner=sqrt"]
    args = parse(arguments(), ranks=[2], steps=12, settings=quick, results=Path(os.devnull))
    at = machine()
    if args.finished:
        finished = [json.loads(line) for line in args.results.read_text().splitlines()]
        runs = [run for run in finished if run["steps"] == args.steps]
        settings = list(dict.fromkeys(run["setting"] for run in runs))
        args.ranks = sorted({run["ranks"] for run in runs})
    else:
        settings = list(
            dict.fromkeys(
                setting for words in args.settings for setting in (baseline(words), words)
            )
        )
        for words in settings:
            setting_from(words, Setting)
        jobs = [
            (words, seed, count, args.steps, text_sum())
            for count, seed, words in itertools.product(args.ranks, args.seeds, settings)
            if count == args.ranks[0] or words != baseline(words) or not sees_the_same(words)
        ]
        done = run_missing(jobs, args.results, job_of, functools.partial(on_all_cores, train))
        runs = [done[job] for job in jobs]
    rows = [
        row for count in args.ranks for words in settings if (row := row_of(words, count, runs))
    ]
    columns = {
        "setting": number("setting"),
        "ranks": number("ranks"),
        "seeds": number("seeds"),
        "loss": number("loss", "{:.4f}"),
        "to exact": cell_of_same_rate,
        "to best": cell_of_best,
        "accuracy": lambda row: f"{row['accuracy']:.2f} %" if row["accuracy"] else "",
        "bytes": number("share", "{:.2f} %"),
    }
    report("local_steps", f"local steps: {args.steps} steps", args, at, rows, columns)


if __name__ == "__main__":
    main()
