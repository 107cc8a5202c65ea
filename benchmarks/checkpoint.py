"""Seconds and bytes to save and to load the hook's state, beside the model's own.

    python benchmarks/checkpoint.py [--model blocks] [--rank 4] [--rounds 5]

Two ranks train with PowerSGD. In each round, after one training step each, they save and load the
state in each of its forms. For comparison, rank 0 does the same with the model's state_dict:

  mean        all ranks join in a mean over the ranks, rank 0 writes it
  per_rank    every rank writes its own file, without communication; the bytes are those of one of
  the files drop        step and Q only, written by rank 0

Saving is `hook.state_dict(form)` and torch.save, loading is torch.load(weights_only=True) and
`hook.load_state_dict`. The time is the slower rank's. Files go to a temporary folder and are not
synced to the disk; for a slow disk, add the time for writing the bytes.
"""

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Row, number, parse, parser, report, run_ranks, spread, summary, take_turns
from hooks import wrap
from machine import machine
from models import TASKS, forward_loss, make, numel

FORMS = ("mean", "per_rank", "drop")
START = 2


def measure(model_name: str, rank: int, rounds: int, size: int) -> list[Row]:
    """Measure, on all ranks. Returns the same rows on all."""
    model, task = make(model_name)
    ddp_model, hook = wrap(model, f"powersgd-{rank}", start=START)
    assert hook is not None
    torch.manual_seed(dist.get_rank())

    def train() -> None:
        ddp_model.zero_grad(set_to_none=True)
        forward_loss(ddp_model, task, task.batch(size)).backward()

    save: dict[str, Callable[[], Any]] = {"model": model.state_dict}
    save |= {form: functools.partial(hook.state_dict, form) for form in FORMS}
    with tempfile.TemporaryDirectory() as folder_of_rank:
        folders = [folder_of_rank]
        dist.broadcast_object_list(folders)
        files = {what: Path(folders[0], f"{what}.pt") for what in save}
        files["per_rank"] = Path(folders[0], f"per_rank_{dist.get_rank()}.pt")

        def time_of_save(what: str) -> float:
            train()
            return timed(lambda: write(save[what](), what, files[what]))

        def time_of_load(what: str) -> float:
            load = model.load_state_dict if what == "model" else hook.load_state_dict
            return timed(lambda: load(torch.load(files[what], weights_only=True)))

        for _ in range(START + 2):
            train()
        saved = take_turns(
            {what: functools.partial(time_of_save, what) for what in save}, rounds, warm_up=1
        )
        sizes = {what: file.stat().st_size for what, file in files.items()}
        loaded = take_turns(
            {what: functools.partial(time_of_load, what) for what in save}, rounds, warm_up=1
        )
    rows = []
    for what in save:
        row = {"state": what, "model": model_name, "rank": rank, "gradient_bytes": 4 * numel(model)}
        row |= {
            "bytes": sizes[what],
            **summary(saved[what], "save_s"),
            **summary(loaded[what], "load_s"),
        }
        rows.append(row)
    return rows


def write(content: Any, what: str, file: Path) -> None:
    if dist.get_rank() == 0 or what == "per_rank":
        torch.save(content, file)


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds of `function` on the slower rank."""
    dist.barrier()
    started = time.perf_counter()
    function()
    passed = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(passed, dist.ReduceOp.MAX)
    return passed.item()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", choices=list(TASKS), default="blocks")
    arguments.add_argument("--rank", type=int, default=4, help="of the factors")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--batch", type=int, default=16, help="vectors, tokens or images")
    args = parse(arguments, model="tiny", rounds=2)
    at = machine()
    rows = run_ranks(measure, args.model, args.rank, args.rounds, args.batch)
    columns = {
        "state": number("state"),
        "MB": number("megabytes", "{:.2f}"),
        "save, s: median (quartiles)": spread("save_s", 3),
        "load, s: median (quartiles)": spread("load_s", 3),
        "save / model's": number("times_model_save", "{:.2f}"),
        "load / model's": number("times_model_load", "{:.2f}"),
    }
    for row in rows:
        row["megabytes"] = row["bytes"] / 1e6
        for what in ("save", "load"):
            row[f"times_model_{what}"] = row[f"median_{what}_s"] / rows[0][f"median_{what}_s"]
    title = f"checkpoint: PowerSGD, rank {args.rank}, {args.model}, 2 ranks"
    report("checkpoint", title, args, at, rows, columns)


if __name__ == "__main__":
    main()
