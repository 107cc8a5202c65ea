"""Memory that a hook holds and needs beyond a training with `noop`, and shards beyond FSDP2, and
their allocations per step.

    python benchmarks/memory.py [--model blocks] [--ranks 1 4] [--buckets-mb 25]

Each hook trains for some steps (forward, backward, SGD), on one rank and in a process of its own,
with several buckets. Every step runs under torch.profiler with profile_memory, whose events contain
each allocation and each release of torch's allocator, including DDP's C++ code. So the figures are
sums of bytes and not samples. They do not include gloo's own buffers. Memory that gloo's threads
release is only seen when it is allocated again, so fp16 and bf16 may seem to hold up to a bucket.

  in all      the peak of the whole training after the model was made
  held        bytes that are allocated after the last step and were not before DDP was made
  peak        the maximum over all steps; the second step, in which DDP rebuilds its buckets and a
              hook may hold the plans of both layouts, has a column of its own
  per parameter   both in bytes per parameter of the model
  allocations of the last step, more than `noop` makes there: their number and bytes

Our and torch's PowerSGD compress from the third step on (torch needs two plain steps), and
`powersgd-R from 0` from the first, so that it compresses in both layouts. The *formula* is the
residual (float32 bytes of all compressed gradients), 2 (P + Q) and the packed bytes (uncompressed
gradients, P, Q and a flag per matrix).

Shards are compared with `fsdp2` (`fully_shard` of each layer) on two ranks; the formula is the
memory of `hook.plan()`.
"""

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

# Suppress messages of torch 2.13's profiler, such as warnings about memory that was allocated
# before it started.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from common import Row, machine, number, parse, parser, report, run_ranks
from hooks import wrap
from models import TASKS, forward_loss, make, numel
from torch.profiler import ProfilerActivity, profile

STEPS, BATCH = 6, 16  # vectors, tokens or images
SHARDED = ("fsdp2", "shards-int8", "shards-bf16")
REBUILT = 1
"""Index of the step at whose beginning DDP rebuilds its buckets."""


class Ledger:
    """Tracks the allocated tensor memory by address over all functions that `trace` runs."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self.level = 0
        """Bytes allocated now, relative to the beginning."""
        self.peaks: list[int] = []
        """Largest level during each function, in bytes."""
        self.last: list[int] = []
        """Bytes of each allocation of the latest function."""

    def trace(self, function: Callable[[], object]) -> None:
        self.last = []
        self.peaks.append(self.level)
        for address, size in _changes(function):
            # The profiler does not see releases in gloo's threads; they show when the address is
            # allocated again.
            self.level -= self._live.pop(address, 0)
            if size > 0:
                self.last.append(size)
                self._live[address] = size
                self.level += size
            self.peaks[-1] = max(self.peaks[-1], self.level)


def _changes(function: Callable[[], object]) -> list[tuple[int, int]]:
    """Return (address, bytes) of each allocation and, with negative bytes, of each release while
    `function` runs, in order.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    # The exported trace is the only public form that lists single events.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = [
            event
            for event in json.loads(file.read_text())["traceEvents"]
            if event.get("name") == "[memory]"
        ]
    events.sort(key=lambda event: event["ts"])
    return [(int(event["args"]["Addr"]), int(event["args"]["Bytes"])) for event in events]


def measure(model_name: str, label: str, start: int, bucket_cap_mb: float) -> Row:
    model, task = make(model_name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [task.batch(BATCH) for _ in range(STEPS)]
    ledger = Ledger()
    made = []
    # Includes DDP's buckets. init_sync=True would make gloo's threads release a copy of the whole
    # model.
    ledger.trace(
        lambda: made.append(
            wrap(model, label, start=start, bucket_cap_mb=bucket_cap_mb, init_sync=False)
        )
    )
    ddp_model, hook = made.pop()

    def step(at: int) -> None:
        forward_loss(ddp_model, task, batches[at]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    gc.collect()
    gc.disable()
    for at in range(STEPS):
        ledger.trace(lambda at=at: step(at))
    gc.enable()
    formula = compressed_steps = None
    if hook is not None and label.startswith("shards"):
        formula = hook.plan().memory.total
    if hook is not None and label.startswith("powersgd"):
        plans = hook.plan().compressed
        factors = 4 * sum(plan.rank * (plan.n + plan.m) for plan in plans)
        packed = hook.plan().bytes_after + 4 * len(plans)
        formula = 4 * sum(plan.numel for plan in plans) + 2 * factors + packed
        compressed_steps = hook.stats()["compressed_steps"]
    return {
        "held": ledger.level,
        "peak": max(ledger.peaks),
        "peak_rebuild": ledger.peaks[1 + REBUILT],
        "last": ledger.last,
        "formula": formula,
        "compressed_steps": compressed_steps,
    }


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--model", choices=list(TASKS), default="blocks")
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="of the factors")
    made.add_argument(
        "--buckets-mb", type=float, default=25, help="bucket_cap_mb of DDP; torch's hook gets one"
    )
    return made


def row_of(hook: str, measured: Row, noop: Row, gradient: int) -> Row:
    """Compare what was measured with `noop`, or with FSDP2. `gradient`: bytes of all gradients."""
    formula = measured["formula"]
    sizes = {name: measured[name] - noop[name] for name in ("held", "peak", "peak_rebuild")}
    sizes |= {"allocated": sum(measured["last"]) - sum(noop["last"]), "formula": formula}
    row = {
        "hook": hook,
        "section": "shards" if hook in SHARDED else "hooks",
        "peak_in_all_mb": measured["peak"] / 1e6,
        "gradient_bytes": gradient,
        "compressed_steps": measured["compressed_steps"],
    }
    row["allocations_last_step"] = len(measured["last"]) - len(noop["last"])
    for name, size in sizes.items():
        row[f"{name}_bytes"] = size
        row[f"{name}_mb"] = None if size is None else size / 1e6
        row[f"{name}_per_parameter"] = None if size is None else 4 * size / gradient
    for name in ("held", "peak"):
        row[f"{name}_over_formula"] = sizes[name] / formula if formula else None
    return row


def main() -> None:
    args = parse(arguments(), model="tiny", ranks=[4], buckets_mb=0.1)
    at = machine()
    candidates = [("noop", "noop", 2), ("ddp", "ddp", 2), ("fp16", "fp16", 2), ("bf16", "bf16", 2)]
    for rank in args.ranks:
        candidates += [
            (f"powersgd-{rank}", f"powersgd-{rank}", 2),
            (f"powersgd-{rank} from 0", f"powersgd-{rank}", 0),
            (f"torch-{rank}", f"torch-{rank}", 2),
        ]
    if args.quick:
        candidates = [
            candidate
            for candidate in candidates
            if candidate[1] in ("noop", f"powersgd-{args.ranks[0]}")
        ]
    candidates += [(label, label, 2) for label in SHARDED[: 2 if args.quick else 3]]
    gradient = 4 * numel(make(args.model)[0])
    measured = {
        name: run_ranks(
            measure,
            args.model,
            label,
            start,
            args.buckets_mb,
            world_size=2 if name in SHARDED else 1,
        )
        for name, label, start in candidates
    }
    rows = [
        row_of(name, of_hook, measured["fsdp2" if name in SHARDED else "noop"], gradient)
        for name, of_hook in measured.items()
    ]
    columns = {
        "hook": number("hook"),
        "in all, MB": number("peak_in_all_mb", "{:.1f}"),
        "held, MB": number("held_mb", "{:.2f}"),
        "peak, MB": number("peak_mb", "{:.2f}"),
        "at the rebuild, MB": number("peak_rebuild_mb", "{:.2f}"),
        "formula, MB": number("formula_mb", "{:.2f}"),
        "held, per parameter": number("held_per_parameter", "{:.2f}"),
        "peak, per parameter": number("peak_per_parameter", "{:.2f}"),
        "held / formula": number("held_over_formula", "{:.3f}"),
        "peak / formula": number("peak_over_formula", "{:.3f}"),
        "allocations, last step": number("allocations_last_step"),
        "their MB": number("allocated_mb", "{:.3f}"),
    }
    title = f"memory over noop or FSDP2: {args.model}, {gradient / 1e6:.1f} MB of gradients"
    report("memory", title, args, at, rows, columns)


if __name__ == "__main__":
    main()
