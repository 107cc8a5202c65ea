"""What do FSDP2's collectives in 8 or 4 bits cost in loss (`shards=`)?

    python benchmarks/shards_loss.py [--settings "weights=int8 gradients=int8 block=128" ...]
                                     [--seeds 0 1 2 3 4] [--ranks 4]

The language model of language_model.py, narrower (0.5 M parameters), is sharded over ranks that are
simulated in one process, with the codec of commhooks.sharded: all ranks compute with the decoded
weights, every rank's gradient of another rank's shard is encoded, and the optimizer changes exact
shards. Vectors stay exact. A setting is a list of `name=value`; `Setting` has the defaults. What is
no option of `commhooks.Shards` was tried here and is not offered.

The batch of a step is divided among the ranks, so all settings see the same data. Finished runs are
appended to --results and not repeated: the whole table takes hours, and can be interrupted.

  loss         validation loss at the end with the decoded weights, nats per byte: mean of the seeds
  to float32   difference to uncompressed shards with the same seed: mean, and its standard error
  bytes        a rank sends per step, as a share of those without compression, with one all-gather
"""

import functools
import itertools
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from common import Row, machine, number, parse, parser, report, run_missing, setting_from
from language_model import (
    ALL,
    BATCH,
    ByteTransformer,
    Job,
    loss_of,
    on_all_cores,
    recipe,
    text,
    text_sum,
    validation_loss,
    windows,
)
from torch import nn

from commhooks.compressors.quantized.mean import BlockCode
from commhooks.sharded.codec import Codec
from commhooks.sharded.layout import RowLayout, UnitParameter, row_layout
from commhooks.sharded.memory import Memory

WIDTH, LAYERS = 96, 4
CPU = torch.device("cpu")
BITS = {"int8": 8, "int4": 4}
FORMS = ("float32", "bf16", *BITS)
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Setting:
    """How the rows travel.

    Attributes:
        weights: "float32", "bf16", "int8" or "int4".
        gradients: the same.
        block: numbers with a common scale.
        rounding: of the gradients: "nearest", or "stochastic" from a generator that starts with
            seed and step.
        residual: each rank adds the rounding error of its last gradients, which it keeps in int8
            with the same blocks (LoCo, arXiv 2407.04480).
    """

    weights: str = "float32"
    gradients: str = "float32"
    block: int = 128
    rounding: str = "nearest"
    residual: bool = False

    def __post_init__(self) -> None:
        choices = {"weights": FORMS, "gradients": FORMS, "rounding": ROUNDINGS}
        for name, expected in choices.items():
            if getattr(self, name) not in expected:
                raise SystemExit(f"--settings: {name}={getattr(self, name)}; expected {expected}")
        if self.rounding == "stochastic" and self.gradients not in BITS:
            raise SystemExit("--settings: rounding=stochastic; expected gradients in int8 or int4")


FLOAT32 = "weights=float32"
BLOCKS = [f"weights=int8 gradients=int8 block={block}" for block in (64, 128, 256)]
GRADIENTS = "weights=int8 gradients=int4"
SETTINGS = [FLOAT32, "weights=bf16 gradients=bf16", *BLOCKS, GRADIENTS]
SETTINGS += [f"{GRADIENTS} rounding=stochastic", f"{GRADIENTS} residual=1"]
SETTINGS += ["weights=int4 gradients=int8"]


class Wire:
    """Encodes and decodes rows of one form. `layout` is None if they travel as they are."""

    def __init__(self, parameters: list[UnitParameter], form: str, block: int) -> None:
        code = BlockCode(BITS.get(form, 8), block)
        blocks = "int8" if form in BITS else form
        dtypes = [torch.float32] * len(parameters)
        wanted = None if form == "float32" else blocks
        self.layout: RowLayout | None = row_layout(parameters, dtypes, wanted, code, [])
        if self.layout is not None:
            self.codec = Codec(self.layout, Memory(CPU), rows=1, native=True)
            self.message = torch.empty(1, self.codec.message_bytes, dtype=torch.uint8)

    def decoded(self, row: torch.Tensor) -> torch.Tensor:
        """Return what arrives of a row; a copy."""
        arrived = row.clone().unsqueeze(0)
        if self.layout is not None:
            self.codec.encode(arrived, self.message)
            self.codec.decode(self.message, arrived)
        return arrived[0]

    def decoded_at_random(self, row: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return what arrives if every number is rounded up or down so that its mean is exact."""
        assert self.layout is not None
        code = self.layout.code
        arrived = row.clone()
        for piece in self.layout.compressed:
            numbers = piece.of(arrived)
            padding = -len(numbers) % code.block_size
            blocks = nn.functional.pad(numbers, (0, padding)).view(-1, code.block_size)
            scales = blocks.abs().amax(1, keepdim=True) / code.levels
            places = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
            codes = torch.floor(places + torch.rand(places.shape, generator=generator))
            codes = codes.clamp(-code.levels, code.levels)
            numbers.copy_((codes * scales).flatten()[: len(numbers)])
        return arrived

    def share(self) -> float:
        """Return the bytes of a row, as a share of those in float32."""
        if self.layout is None:
            return 1.0
        sent = sum(self.layout.sent_bytes(piece) for piece in self.layout.pieces)
        return sent / (4 * self.layout.numel)


class Shards:
    """A model whose parameters lie in `count` rows, one for each rank.

    Attributes:
        exact: the parameters that the optimizer changes.
        model: computes, with decoded parameters.
    """

    def __init__(self, count: int, setting: Setting) -> None:
        self.exact = ByteTransformer(WIDTH, LAYERS)
        self.model = ByteTransformer(WIDTH, LAYERS)
        self.count = count
        parameters = [
            UnitParameter((name,), tuple(p.shape), p.dtype, p.dtype, p.dtype, p.numel() // count)
            for name, p in self.exact.named_parameters()
        ]
        self.sizes = [parameter.numel for parameter in parameters]
        self.setting = setting
        self.weights = Wire(parameters, setting.weights, setting.block)
        self.gradients = Wire(parameters, setting.gradients, setting.block)
        self.errors_wire = Wire(parameters, "int8", setting.block)
        self.errors = torch.zeros(count, count, sum(self.sizes))

    def rows(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return `count x numel`, row i with rank i's rows of each tensor."""
        return torch.cat([tensor.reshape(self.count, -1) for tensor in tensors], 1)

    def fill(self, tensors: list[torch.Tensor], rows: torch.Tensor) -> None:
        for tensor, part in zip(tensors, rows.split(self.sizes, 1), strict=True):
            tensor.copy_(part.reshape(tensor.shape))

    @torch.no_grad()
    def gather(self) -> None:
        """Compute the weights with which all ranks compute."""
        rows = self.rows([p.detach() for p in self.exact.parameters()])
        arrived = torch.stack([self.weights.decoded(row) for row in rows])
        self.fill(list(self.model.parameters()), arrived)

    @torch.no_grad()
    def reduce(self, total: torch.Tensor, rank: int, generator: torch.Generator) -> None:
        """Add to `total` what the ranks receive of the gradients of `rank`."""
        gradients = [cast(torch.Tensor, p.grad) for p in self.model.parameters()]
        for owner, row in enumerate(self.rows(gradients)):
            arrived = row if owner == rank else self._sent(row, rank, owner, generator)
            total[owner] += arrived / self.count

    def _sent(
        self, row: torch.Tensor, rank: int, owner: int, generator: torch.Generator
    ) -> torch.Tensor:
        if self.setting.rounding == "stochastic":
            return self.gradients.decoded_at_random(row, generator)
        if not self.setting.residual:
            return self.gradients.decoded(row)
        wanted = row + self.errors[rank, owner]
        arrived = self.gradients.decoded(wanted)
        self.errors[rank, owner] = self.errors_wire.decoded(wanted - arrived)
        return arrived


def train(job: Job) -> Row:
    words, seed, count, steps, text_of_job = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    shards = Shards(count, setting_from(words, Setting))
    optimizer, schedule = recipe(shards.exact, steps)
    batches = torch.Generator().manual_seed(seed)
    generator = torch.Generator()
    trained = list(shards.exact.parameters())
    for step in range(steps):
        generator.manual_seed(1_000_003 * seed + step)
        shards.gather()
        total = torch.zeros(count, sum(shards.sizes))
        for rank, part in enumerate(windows(text()[0], BATCH, batches).chunk(count)):
            shards.model.zero_grad()
            loss_of(shards.model, part).backward()
            shards.reduce(total, rank, generator)
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        shards.fill([cast(torch.Tensor, parameter.grad) for parameter in trained], total)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
    shards.gather()
    return {
        "setting": words,
        "seed": seed,
        "ranks": count,
        "steps": steps,
        "text": text_of_job,
        "loss": validation_loss(shards.model, min(ALL, steps)),
        "exact_loss": validation_loss(shards.exact, min(ALL, steps)),
        "share": (shards.weights.share() + shards.gradients.share()) / 2,
    }


# ---- the table -----------------------------------------------------------------------------------


def job_of(row: Row) -> Job:
    return row["setting"], row["seed"], row["ranks"], row["steps"], row["text"]


def row_of(words: str, runs: list[Row]) -> Row:
    """Make a row from the runs of a setting, one for each seed, compared with float32."""
    exact = {run["seed"]: run["loss"] for run in runs if run["setting"] == FLOAT32}
    of_setting = [run for run in runs if run["setting"] == words]
    differences = [run["loss"] - exact[run["seed"]] for run in of_setting]
    return {
        "setting": words,
        "seeds": len(of_setting),
        "loss": statistics.fmean(run["loss"] for run in of_setting),
        "difference": statistics.fmean(differences),
        "error": statistics.stdev(differences) / len(differences) ** 0.5
        if len(differences) > 1
        else 0.0,
        "per_cent": 100 * statistics.fmean(differences) / statistics.fmean(exact.values()),
        "share": 100 * of_setting[0]["share"],
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--settings", nargs="+", default=SETTINGS, metavar="SETTING", help="see Setting"
    )
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments.add_argument("--ranks", type=int, default=4, help="2, 4 or 8")
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument(
        "--results", type=Path, default=Path("shards_loss.jsonl"), help="finished runs"
    )
    quick = ["weights=int8 gradients=int4 residual=1"]
    args = parse(arguments, seeds=[0], ranks=2, steps=2, settings=quick, results=Path(os.devnull))
    settings = list(dict.fromkeys([FLOAT32, *args.settings]))
    for words in settings:
        setting_from(words, Setting)
    at = machine()
    choices = itertools.product(args.seeds, settings)
    jobs = [(words, seed, args.ranks, args.steps, text_sum()) for seed, words in choices]
    done = run_missing(jobs, args.results, job_of, functools.partial(on_all_cores, train))
    rows = [row_of(words, [done[job] for job in jobs]) for words in settings]
    columns: dict[str, Callable[[Row], str]] = {
        "setting": number("setting"),
        "bytes": number("share", "{:.1f} %"),
        "loss": number("loss", "{:.4f}"),
        "to float32 (error)": lambda row: f"{row['difference']:+.4f} ({row['error']:.4f})",
        "to float32": number("per_cent", "{:+.2f} %"),
    }
    title = f"shards: {args.ranks} ranks, {args.steps} steps, {len(args.seeds)} seeds"
    report("shards_loss", title, args, at, rows, columns)


if __name__ == "__main__":
    main()
