"""A small language model: what does compression cost in loss, and what does it save in bytes?

    python benchmarks/language_model.py [--hooks ...] [--seeds 0 1 2 3 4] [--ranks 2 4] [--plot PNG]

A byte-level transformer with 2.8 M parameters trains on the source of Python's standard library
(every tenth file is held out) by AdamW with a one-cycle schedule. All hooks have the same settings,
and nothing is tuned. The batch of a step is divided among the ranks, so runs with 2 and 4 ranks see
the same data. PowerSGD begins after 10 % of the steps, as by default; the other hooks begin at
once. A seed determines weights and batches, so hooks are compared seed by seed.

The ranks are simulated in one process per run (tests.support.simulation, bit-equal to real ranks in
the tests), with one torch thread each and as many runs at once as there are cores. Finished runs
are appended to --results and not repeated: the whole table takes hours, and can be interrupted.

  loss         validation loss at the end, nats per byte: mean over the seeds and standard deviation
  difference   to all-reduce with the same seed: mean, and standard error of the mean
  MB           sent per rank in the run, counted as for an all-reduce
"""

import functools
import hashlib
import itertools
import multiprocessing
import os
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import Row, machine, number, parse, parser, report, run_missing
from torch import nn
from torch.nn import functional

from commhooks.compressors.base import Compressor
from commhooks.request import HookRequest
from tests.support.simulation import SimulatedRanks

CONTEXT, BATCH = 64, 8
TEXT_BYTES = 12_000_000
VARIANTS = ["", "no-feedback"]  # after a slash
POINTS, FEW, ALL = 10, 16, 128  # validations in a run; their batches on the way and at the end
NAMES = {
    "powersgd": "powerSGD",
    "batched": "batched_powerSGD",
    "int8": "int8_compress",
    "int4": "int4_compress",
    "bf16": "bf16_compress",
}
HOOKS = ["allreduce", "bf16", "int8", "int8/no-feedback", "int4", "int4/no-feedback"]
HOOKS += ["powersgd-1", "powersgd-4", "powersgd-4/no-feedback", "powersgd-16"]
Job = tuple[str, int, int, int, str]
"""Hook (of local_steps.py: setting), seed, ranks, steps, and `text_sum()`."""


class ByteTransformer(nn.Module):
    def __init__(self, width: int = 192, layers: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.output = nn.Linear(width, 256)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False
        )

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places.weight
        return self.output(self.blocks(x, mask=self.mask, is_causal=True))


@functools.cache
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return training and validation bytes: the modules of the standard library in alphabetical
    order, without its tests.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    outside = {"test", "tests", "site-packages"}
    # there may be much in site-packages
    tops = (top for top in root.iterdir() if top.name not in outside)
    files = sorted(
        f
        for top in tops
        for f in (top.rglob("*.py") if top.is_dir() else [top])
        if f.suffix == ".py"
    )
    files = [f for f in files if not outside & set(f.parts)]
    for i, file in enumerate(files):
        parts[i % 10 == 9].append(file.read_bytes())
    train, held_out = (
        torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).long() for part in parts
    )
    return train[:TEXT_BYTES], held_out[: TEXT_BYTES // 10]


@functools.cache
def text_sum() -> str:
    """Hash the text for the results, because every version of Python has a different library."""
    return hashlib.sha256(
        b"".join(part.to(torch.uint8).numpy().tobytes() for part in text())
    ).hexdigest()[:12]


def windows(source: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return `count x (CONTEXT + 1)` bytes from random places."""
    starts = torch.randint(len(source) - CONTEXT - 1, (count, 1), generator=generator)
    return source[starts + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output = model(batch[:, :-1])
    return functional.cross_entropy(output.flatten(0, 1), batch[:, 1:].flatten())


def recipe(
    model: nn.Module, steps: int, faster: float = 1.0
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return optimizer and schedule of a training with that many steps. `faster`: factor of the
    learning rate.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3 * faster, weight_decay=0.01, fused=True
    )
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-3 * faster, steps, pct_start=0.1
    )


def rank_of(label: str) -> int | None:
    rank = label.partition("/")[0].partition("-")[2]
    return int(rank) if rank else None


def compressor_of(label: str) -> Compressor[Any]:
    """Make the compressor of a label such as `powersgd-4`, `int8`, `int4/no-feedback`."""
    label, _, variant = label.partition("/")
    kind = label.partition("-")[0]
    rank = rank_of(label)
    if variant not in VARIANTS:
        raise SystemExit(f"--hooks: {variant!r} is none of {', '.join(VARIANTS[1:])}")
    options: dict[str, Any] = {} if rank is None else {"matrix_approximation_rank": rank}
    if variant == "no-feedback":
        options["use_error_feedback"] = False
    made = HookRequest.parse(NAMES.get(kind, kind), hook_options=options).new_compressor(1)
    assert made is not None
    return made


def validation_loss(model: nn.Module, batches: int) -> float:
    """Compute the mean loss of at most `ALL` batches of held-out text; the same batches at each
    call.
    """
    held_out = windows(text()[1], ALL * BATCH, torch.Generator().manual_seed(1234)).split(BATCH)
    with torch.no_grad():
        return statistics.fmean(loss_of(model, batch).item() for batch in held_out[:batches])


def train(job: Job) -> Row:
    label, seed, world_size, steps, text_of_job = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = ByteTransformer()
    parameters = dict(reversed(list(model.named_parameters())))  # the order of DDP's buckets
    sizes = [p.numel() for p in parameters.values()]
    used = [SimulatedRanks(lambda: compressor_of("allreduce"), world_size, parameters)]
    start = steps // 10 if label.startswith("powersgd") else 0
    optimizer, schedule = recipe(model, steps)
    batches = torch.Generator().manual_seed(seed)
    curve = []
    for step in range(1, steps + 1):
        flats = []
        for part in windows(text()[0], BATCH, batches).chunk(world_size):
            model.zero_grad()
            loss_of(model, part).backward()
            flats.append(
                torch.cat([p.grad.flatten() for p in parameters.values() if p.grad is not None])
            )
        if step == start + 1:
            used.append(
                SimulatedRanks(functools.partial(compressor_of, label), world_size, parameters)
            )
        if not used[-1].step(flats):
            raise RuntimeError(f"{label}: the gradients of step {step} are not finite")
        for parameter, mean in zip(parameters.values(), flats[0].split(sizes), strict=True):
            parameter.grad = mean.view_as(parameter)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // POINTS) == 0:
            sent = sum(ranks.bytes_sent for ranks in used) / 1e6
            curve.append([step, sent, validation_loss(model, max(1, min(FEW, steps // 5)))])
    return {
        "hook": label,
        "seed": seed,
        "ranks": world_size,
        "steps": steps,
        "text": text_of_job,
        "loss": validation_loss(model, min(ALL, steps)),
        "megabytes": sum(ranks.bytes_sent for ranks in used) / 1e6,
        "bytes_per_step": used[-1].bytes_sent / (steps - start),
        "curve": curve,
    }


def on_all_cores(train: Callable[[Job], Row], jobs: list[Job]) -> Iterator[Row]:
    """Yield the rows of `jobs`, a process per core; without processes if there are few."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if len(jobs) <= cores:
        yield from map(train, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        yield from pool.imap_unordered(train, jobs)


# ---- the table -----------------------------------------------------------------------------------


def job_of(row: Row) -> Job:
    return row["hook"], row["seed"], row["ranks"], row["steps"], row["text"]


def row_of(hook: str, ranks: int, runs: list[Row]) -> Row:
    """Make a row from the runs of a hook, one for each seed, compared with all-reduce."""
    by_seed = {run["seed"]: run for run in runs if (run["hook"], run["ranks"]) == (hook, ranks)}
    exact = {
        run["seed"]: run for run in runs if (run["hook"], run["ranks"]) == ("allreduce", ranks)
    }
    losses = [run["loss"] for run in by_seed.values()]
    differences = [run["loss"] - exact[seed]["loss"] for seed, run in by_seed.items()]
    difference = statistics.fmean(differences)
    several = len(losses) > 1
    return {
        "section": ranks,
        "hook": hook,
        "ranks": ranks,
        "seeds": len(losses),
        "loss": statistics.fmean(losses),
        "deviation": statistics.stdev(losses) if several else 0.0,
        "difference": difference,
        "error": statistics.stdev(differences) / len(differences) ** 0.5 if several else 0.0,
        "per_cent": 100 * difference / statistics.fmean(run["loss"] for run in exact.values()),
        "megabytes": statistics.fmean(run["megabytes"] for run in by_seed.values()),
        "fewer": exact[0]["bytes_per_step"] / by_seed[0]["bytes_per_step"],
    }


def draw(rows: list[Row], file: Path) -> None:
    """Draw loss against bytes."""
    from matplotlib.figure import Figure

    counts = sorted({row["ranks"] for row in rows})
    hooks = list(dict.fromkeys(row["hook"] for row in rows))
    figure = Figure(figsize=(5.5 * len(counts), 4.5), layout="constrained")
    axes = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axis, count in zip(axes, counts, strict=True):
        for row in [row for row in rows if row["ranks"] == count]:
            style = {
                "fmt": "x" if "/" in row["hook"] else "o",
                "color": f"C{hooks.index(row['hook'])}",
                "capsize": 3,
            }
            axis.errorbar(
                row["megabytes"], row["loss"], yerr=row["deviation"], label=row["hook"], **style
            )
        axis.set(xscale="log", xlabel="MB sent per rank in the whole run", title=f"{count} ranks")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss, nats per byte")
    axes[-1].legend(fontsize=7)
    figure.savefig(file, dpi=220)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--hooks", nargs="+", default=HOOKS, metavar="HOOK", help="; ".join(HOOKS)
    )
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument(
        "--results", type=Path, default=Path("language_model.jsonl"), help="finished runs"
    )
    arguments.add_argument("--plot", type=Path, metavar="PNG", help="draw loss against bytes")
    quick = {
        "seeds": [0],
        "ranks": [2],
        "steps": 2,
        "hooks": ["powersgd-4"],
        "results": Path(os.devnull),
    }
    args = parse(arguments, **quick)
    if "allreduce" not in args.hooks:
        args.hooks.insert(0, "allreduce")
    at = machine()
    choices = itertools.product(args.seeds, args.ranks, args.hooks)
    jobs = [(hook, seed, ranks, args.steps, text_sum()) for seed, ranks, hook in choices]
    done = run_missing(jobs, args.results, job_of, functools.partial(on_all_cores, train))
    runs = [done[job] for job in jobs]
    rows = [row_of(hook, ranks, runs) for ranks in args.ranks for hook in args.hooks]
    columns = {
        "hook": number("hook"),
        "ranks": number("ranks"),
        "MB sent per rank": number("megabytes", "{:.0f}"),
        "x fewer bytes": number("fewer", "{:.1f}"),
        "loss (deviation)": lambda row: f"{row['loss']:.4f} ({row['deviation']:.4f})",
        "to all-reduce (error)": lambda row: f"{row['difference']:+.4f} ({row['error']:.4f})",
        "to all-reduce": number("per_cent", "{:+.2f} %"),
    }
    title = f"language model: 2.8 M parameters, {args.steps} steps, {len(args.seeds)} seeds"
    report("language_model", title, args, at, rows, columns)
    if args.plot is not None:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
