"""The hook's own time per step: backward with the hook minus backward with `noop`, one rank, one
bucket.

    python benchmarks/codec.py [--models blocks resnet50] [--ranks 1 2 4 8 16] [--rounds 15]

There is one rank and one bucket, because torch's own hook does not run on gloo with more. So
nothing is sent, and only arithmetic and memory traffic remain. In every round each hook makes one
backward pass on the same batch, in one process with one thread. The result is the difference to
`noop` in the same round.

  noop                    nothing: the baseline
  commhooks               our PowerSGD, computed by torch
  native                  the same with the native kernel
  int8, int4              our quantised hooks, computed by torch; they have no rank
  native int8, native int4  the same with the native kernel
  torch, torch same       torch's powerSGD_hook without and with batch_tensors_with_same_shape
  add                     of the gradients, as one flat tensor, to another one: add_(a)

The *traffic limit* of PowerSGD is the time of six passes over the gradients: add into the residual
(read, read, write), Q and residual (read, write), gradient (write). For the quantised hooks it is
the time of six such passes and two over the codes, which are a quarter (int8) or an eighth (int4)
of a pass each: delta (read, read, write) and codes (write), then residual (read, write), codes
(read) and gradient (write). The scales are less than 2 % of a pass. A pass is a third of a.add_(b)
over as many numbers, in the same rounds, which is the fastest way through memory that is measured
here.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import (
    Row,
    machine,
    number,
    one_rank,
    parse,
    parser,
    report,
    spread,
    steady,
    summary,
    take_turns,
)
from hooks import ONE_BUCKET_MB, wrap
from models import TASKS, Task, forward_loss, make, numel

from commhooks import CommHook

WARM_UP, START, BATCHES = 4, 2, 4
QUANTISED = {
    "int8": "int8",
    "int4": "int4",
    "native int8": "native-int8",
    "native int4": "native-int4",
}
PASSES = {"int8": 6.5, "native int8": 6.5, "int4": 6.25, "native int4": 6.25}
BATCH_SIZE = {"resnet50": 2}  # images; 16 vectors or tokens for other models


def measure(name: str, rank: int | None, rounds: int) -> list[Row]:
    """Return the milliseconds of each candidate at this rank of the factors (None: the quantised
    hooks).
    """
    task = make(name)[1]
    batches = [task.batch(BATCH_SIZE.get(name, 16)) for _ in range(BATCHES)]
    labels = {"noop": "noop"}
    if rank is None:
        labels |= QUANTISED
    else:
        labels |= {"commhooks": f"powersgd-{rank}", "native": f"native-{rank}"}
        labels |= {"torch": f"torch-{rank}", "torch same": f"torch-same-{rank}"}
    hooks: dict[str, CommHook | None] = {}
    candidates: dict[str, Callable[[], float]] = {}
    for candidate, label in labels.items():
        model, hooks[candidate] = wrap(
            make(name)[0], label, start=START, bucket_cap_mb=ONE_BUCKET_MB
        )
        candidates[candidate] = functools.partial(backward, model, task, itertools.cycle(batches))
    flat = torch.randn(numel(make(name)[0]))
    other = torch.zeros_like(flat)
    candidates["add"] = lambda: _milliseconds(lambda: other.add_(flat))
    samples = take_turns(candidates, rounds, WARM_UP)
    for candidate, hook in hooks.items():
        done = {} if hook is None or candidate == "noop" else hook.stats()
        if done and not (
            done["compressed_steps"] == WARM_UP + rounds - START
            and done["bytes_sent_last_pass"] < 4 * flat.numel()
        ):
            raise SystemExit(f"{candidate} did not compress: {done}")
    common = {
        "section": f"{name} {rank}",
        "model": name,
        "rank": rank,
        "gradient_mb": 4 * flat.numel() / 1e6,
    }
    return [{**common, **row} for row in _rows(samples)]


def backward(model: Any, task: Task, batches: Iterator[Any]) -> float:
    loss = forward_loss(model, task, next(batches))
    passed_ms = _milliseconds(loss.backward)
    model.zero_grad(set_to_none=True)
    return passed_ms


def _rows(samples: dict[str, list[float]]) -> list[Row]:
    """Make the rows of the candidates that took turns."""
    one_pass = summary(samples["add"], "ms")["median_ms"] / 3
    rows: list[Row] = []
    for hook in [hook for hook in samples if hook != "noop"]:
        less = [0.0] * len(samples[hook]) if hook == "add" else samples["noop"]
        over = [with_hook - without for with_hook, without in zip(samples[hook], less, strict=True)]
        row = {"hook": hook, "limit_ms": PASSES.get(hook, 6) * one_pass, **summary(over, "ms")}
        rows.append(row | {"times_limit": row["median_ms"] / row["limit_ms"]})
    torch_ms = next((row["median_ms"] for row in rows if row["hook"] == "torch"), None)
    for row in rows:
        row["times_torch"] = row["median_ms"] / torch_ms if torch_ms else None
    return [
        *rows,
        {"hook": "noop backward", **summary(samples["noop"], "ms"), "limit_ms": 6 * one_pass},
    ]


def _milliseconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--models", nargs="+", choices=list(TASKS), default=["blocks", "resnet50"]
    )
    arguments.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of the factors"
    )
    arguments.add_argument("--rounds", type=int, default=15)
    args = parse(arguments, models=["tiny"], ranks=[1, 4], rounds=3)
    at = machine()
    rows: list[Row] = []
    with steady(), one_rank():
        for name in args.models:
            for rank in [None, *args.ranks]:
                rows += measure(name, rank, args.rounds)
    columns = {
        "model": number("model"),
        "MB": number("gradient_mb", "{:.1f}"),
        "rank": number("rank"),
        "hook": number("hook"),
        "ms: median (quartiles)": spread("ms"),
        "x limit": number("times_limit", "{:.2f}"),
        "x torch": number("times_torch", "{:.2f}"),
        "limit, ms": number("limit_ms", "{:.1f}"),
    }
    title = "codec: time of the hook per step, on top of noop"
    report("codec", title, args, at, rows, columns)


if __name__ == "__main__":
    main()
