"""Communicating every H steps (local SGD, DiLoCo): what does it cost in loss, and what makes that small?

    python benchmarks/local_steps.py [--settings every=5 "every=30 momentum=0.9" ...] [--seeds 0] [--ranks 2 4]

The language model of language_model.py, its data and its schedule, trained by ranks that are simulated in one process:
each has weights and an AdamW of its own, and a share of the batch of a step. Every `every` steps their weights become

    g = mean over the ranks of (anchor - weights);  v = momentum v + g;  anchor -= outer_lr (g + momentum v)

A setting is a list of `name=value`; what it leaves out is as in `Setting`. `every=1 momentum=0 outer_lr=1` is not
plain DDP, because AdamW runs on each rank's own gradients; `exact=1` (an exact mean of the gradients in every step) is.
Finished runs are appended to --results and not repeated; the whole table takes hours, and can be interrupted.

  loss      validation loss at the end, nats per byte: mean over the seeds
  to exact  difference to an all-reduce in every step, with the same seeds
  bytes     sent per rank and step on average, as a share of what an all-reduce in float32 sends
"""

import dataclasses
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Row, number, parse, parser, report
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

from tests.support.simulation import SimulatedRanks

Job = tuple[str, int, int, int]  # setting, seed, ranks, steps


@dataclass(frozen=True)
class Setting:
    """How a training communicates.

    Attributes:
        exact: an all-reduce of the gradients in every step, and nothing of the rest.
        every: H, steps between two outer steps.
        wire: what carries the differences of the weights: a hook of language_model.py, with error feedback.
        begin, end: shares of the run, at its beginning and end, in which `phase` averages the gradients of every step.
        phase: a hook of language_model.py.
        shrink: H follows the learning rate, from `every` down to 1.
        moments: the ranks average AdamW's moments at each outer step.
        inner: factor of the inner learning rate.
    """

    exact: bool = False
    every: int = 5
    momentum: float = 0.0
    outer_lr: float = 1.0
    wire: str = "allreduce"
    begin: float = 0.0
    end: float = 0.0
    phase: str = "int4"
    shrink: bool = False
    moments: bool = False
    inner: float = 1.0

    @classmethod
    def parse(cls, words: str) -> "Setting":
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        given = dict(word.split("=", 1) for word in words.split())
        if unknown := given.keys() - kinds.keys():
            raise SystemExit(f"--settings: no {sorted(unknown)[0]!r}; there are {', '.join(kinds)}")
        return cls(**{name: kinds[name](int(v) if kinds[name] is bool else v) for name, v in given.items()})


class Ranks:
    """The models, optimizers and schedules of all ranks."""

    def __init__(self, count: int, steps: int, setting: Setting) -> None:
        self.models = [ByteTransformer() for _ in range(count)]
        for model in self.models[1:]:
            model.load_state_dict(self.models[0].state_dict())
        made = [recipe(model, steps, setting.inner) for model in self.models]
        self.optimizers, self.schedules = [each[0] for each in made], [each[1] for each in made]
        self.named = dict(reversed(list(self.models[0].named_parameters())))  # the order of DDP's buckets
        names = list(self.named)
        self.parameters = [[dict(model.named_parameters())[name] for name in names] for model in self.models]

    def gradients(self, batch: torch.Tensor) -> list[torch.Tensor]:
        for model, part in zip(self.models, batch.chunk(len(self.models)), strict=True):
            model.zero_grad()
            loss_of(model, part).backward()
        return [
            torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]) for parameters in self.parameters
        ]

    def set_gradients(self, flats: list[torch.Tensor]) -> None:
        for parameters, flat in zip(self.parameters, flats, strict=True):
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter)

    def step(self) -> None:
        for model, optimizer, schedule in zip(self.models, self.optimizers, self.schedules, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
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
                moments = [optimizer.state[p][name] for optimizer, p in zip(self.optimizers, own, strict=True)]
                mean = torch.stack(moments).mean(0)
                for each in moments:
                    each.copy_(mean)


def train(job: Job) -> Row:
    """One run."""
    words, seed, count, steps = job
    setting = Setting.parse(words)
    torch.set_num_threads(1)
    source, held_out = text()
    torch.manual_seed(seed)
    ranks = Ranks(count, steps, setting)
    phase = SimulatedRanks(lambda: compressor_of("allreduce" if setting.exact else setting.phase), count, ranks.named)
    wire = SimulatedRanks(lambda: compressor_of(setting.wire), count, ranks.named)
    batches = torch.Generator().manual_seed(seed)
    anchor, velocity = ranks.weights()[0], torch.zeros(sum(p.numel() for p in ranks.named.values()))
    every_step = range(int(steps * setting.begin)), range(steps - int(steps * setting.end), steps)
    peak = max(group["max_lr"] for group in ranks.optimizers[0].param_groups)
    local = rounds = 0
    for step in range(steps):
        averaged = setting.exact or step in every_step[0] or step in every_step[1]
        flats = ranks.gradients(windows(source, BATCH, batches))
        if averaged:
            phase.step(flats)
            ranks.set_gradients(flats)
        lr = ranks.optimizers[0].param_groups[0]["lr"]
        ranks.step()
        if averaged and not local:
            anchor = ranks.weights()[0]
            continue
        local += 1
        due = max(1, round(setting.every * lr / peak)) if setting.shrink else setting.every
        if local < due and step + 1 < steps and step + 1 not in every_step[1]:
            continue
        local, rounds = 0, rounds + 1
        deltas = [anchor - weights for weights in ranks.weights()]
        wire.step(deltas)
        velocity = setting.momentum * velocity + deltas[0]
        anchor = anchor - setting.outer_lr * (deltas[0] + setting.momentum * velocity)
        ranks.set_weights(anchor)
        if setting.moments or step + 1 in every_step[1]:  # else the same gradients would lead to different weights
            ranks.average_moments()
    validation = windows(held_out, ALL * BATCH, torch.Generator().manual_seed(1234)).split(BATCH)
    with torch.no_grad():
        loss = statistics.fmean(loss_of(ranks.models[0], batch).item() for batch in validation[: min(ALL, steps)])
    sent = (phase.bytes_sent + wire.bytes_sent) / (steps * 4 * len(anchor))
    found = {"setting": words, "seed": seed, "ranks": count, "steps": steps, "text": text_sum()}
    return {**found, "loss": loss, "share": sent, "rounds": rounds}


# ---- the table -------------------------------------------------------------------------------------------------------

EXACT = "exact=1"
SETTINGS = [EXACT, "begin=1.0"]  # all-reduce, and int4 in every step
SETTINGS += [f"every={h}" for h in (2, 5, 30, 16, 3, 8, 100)]
SETTINGS += [f"every={h} momentum={m} outer_lr={lr}" for h in (5, 30) for m in (0.3, 0.5, 0.9) for lr in (0.7, 1.0)]
SETTINGS += [f"every={h} outer_lr={lr}" for h in (5, 30) for lr in (0.7, 1.2)]
SETTINGS += [f"every={h} wire={wire}" for h in (5, 30) for wire in ("int8", "int4")]
SETTINGS += [f"every={h} wire=int4 end={e}" for h in (5, 30) for e in (0.1, 0.2)]
SETTINGS += [f"every={h} wire=int4 begin={b}" for h in (5, 30) for b in (0.1, 0.3)]
SETTINGS += [f"every={h} wire=int4 begin=0.1 end=0.2" for h in (5, 30)]
SETTINGS += [f"every={h} {more}" for h in (5, 30) for more in ("shrink=1", "moments=1", "inner=0.7")]
# AdamW's steps are shorter on the noisier gradients of a part of the batch: which learning rate is best differs.
LOCAL = ["every=5", "every=5 wire=int4", "every=16 wire=int4", "every=30", "every=30 wire=int4"]
SETTINGS += [f"{words} inner={lr}" for words in (EXACT, "begin=1.0", *LOCAL) for lr in (1.4, 2.0, 2.8)]
SETTINGS += [f"every=5{wire} outer_lr=1.4" for wire in ("", " wire=int4")]


def table(found: list[Row], settings: list[str], counts: list[int]) -> list[Row]:
    rows = []
    for count in counts:
        of_count = [run for run in found if run["ranks"] == count]
        exact = {run["seed"]: run["loss"] for run in of_count if run["setting"] == EXACT}
        for words in settings:
            runs = [run for run in of_count if run["setting"] == words]
            more = [run["loss"] / exact[run["seed"]] - 1 for run in runs]
            rows.append(
                {
                    "setting": "all-reduce" if words == EXACT else words,
                    "ranks": count,
                    "loss": statistics.fmean(run["loss"] for run in runs),
                    "more": 100 * statistics.fmean(more),
                    "error": 100 * statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else None,
                    "share": 100 * statistics.fmean(run["share"] for run in runs),
                }
            )
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--settings", nargs="+", default=SETTINGS, metavar="SETTING", help="see Setting")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument("--results", type=Path, default=Path("local_steps.jsonl"), help="finished runs")
    args = parse(
        arguments, ranks=[2], steps=12, settings=["every=3 momentum=0.5 wire=int4 begin=0.2 end=0.2 moments=1"]
    )
    settings = list(dict.fromkeys([EXACT, *args.settings]))
    for words in settings:
        Setting.parse(words)
    at = machine()
    results = Path(os.devnull) if args.quick else args.results
    jobs = [(words, seed, count, args.steps) for count in args.ranks for seed in args.seeds for words in settings]
    rows = table(run_missing(jobs, results, train, "setting"), settings, args.ranks)
    columns = {
        "setting": number("setting"),
        "ranks": number("ranks"),
        "loss": number("loss", "{:.4f}"),
        "to exact": lambda row: f"{row['more']:+.2f} %" + (f" ({row['error']:.2f})" if row["error"] else ""),
        "bytes": number("share", "{:.2f} %"),
    }
    report("local_steps", f"local steps: {args.steps} steps, {len(args.seeds)} seeds", args, at, rows, columns)


if __name__ == "__main__":
    main()
