"""What the metrics cost: steps with and without the clocks of `stats()` in turn, and a reading of all values.

    python benchmarks/metrics.py [--models tiny blocks] [--hooks powersgd-4 fp16 allreduce] [--rounds 41]

One rank on one thread, DDP's own bucket size, one hook: in every round it makes a forward and backward pass of each
kind on the same batch. The first two kinds take turns with each other, then the others.

  without     the clocks are removed
  clocks      the default of every step: the additional time over `without`
  reading     all values are read after the step (`commhooks.hook.meter.Meter`), as loggers do once in several steps

The result is the median over the rounds of the difference within a round. `% of a step` is the share of the clocks,
which run in every step, or of a reading, which runs once in EVERY steps.
"""

import contextlib
import time
from collections.abc import Callable
from unittest import mock

from common import Row, number, one_rank, parse, parser, report, spread, steady, summary, take_turns
from hooks import wrap
from machine import machine
from models import TASKS, forward_loss, make, numel

from commhooks.hook.meter import Meter

WARM_UP, START, EVERY = 6, 2, 50
BATCH_SIZE = {"resnet18": 2, "resnet50": 2}  # images; 16 vectors or tokens for other models


def measure(name: str, label: str, rounds: int) -> list[Row]:
    """Return the microseconds that a step of each kind takes longer than a step without clocks."""
    model, task = make(name)
    wrapped, hook = wrap(model, label, start=START)
    assert hook is not None
    batch = task.batch(BATCH_SIZE.get(name, 16))
    meter, clocks = Meter(), hook._hook.counters.clocks

    def step(after: Callable[[], object] = lambda: None) -> float:
        wrapped.zero_grad(set_to_none=True)
        started = time.perf_counter()
        forward_loss(wrapped, task, batch).backward()
        after()
        return 1e6 * (time.perf_counter() - started)

    def without() -> float:
        nothing = {"measure": lambda device, **_: contextlib.nullcontext()}
        with (
            mock.patch.multiple(clocks, **nothing),
            mock.patch.object(clocks, "left_to_ddp", lambda device: lambda: None),
        ):
            return step()

    pair = take_turns({"without": without, "clocks": step}, rounds, WARM_UP)
    others = take_turns({"base": step, "reading": lambda: step(lambda: meter.read(hook))}, rounds)
    done = hook.stats()
    if not done["codec_s"] or (label.startswith("powersgd") and not done["compressed_steps"]):
        raise SystemExit(f"nothing was measured: {done}")
    usual = summary(pair["without"], "us")["median_us"]
    common = {"section": f"{name} {label}", "model": name, "gradient_mb": 4 * numel(model) / 1e6, "hook": label}
    rows: list[Row] = [{**common, "kind": "without", **summary(pair["without"], "us")}]
    compared = [("clocks", pair["clocks"], pair["without"]), ("reading", others["reading"], others["base"])]
    for kind, times, base in compared:
        row = {**common, "kind": kind, **summary([each - other for each, other in zip(times, base, strict=True)], "us")}
        row["percent"] = 100 * row["median_us"] / usual / (1 if kind == "clocks" else EVERY)
        rows.append(row)
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(TASKS), default=["tiny", "blocks"])
    arguments.add_argument("--hooks", nargs="+", default=["powersgd-4", "fp16", "allreduce"], metavar="HOOK")
    arguments.add_argument("--rounds", type=int, default=41)
    args = parse(arguments, models=["tiny"], hooks=["powersgd-1", "fp16"], rounds=5)
    at = machine()
    rows: list[Row] = []
    with steady(), one_rank():
        for name in args.models:
            for label in args.hooks:
                rows += measure(name, label, args.rounds)
    columns = {
        "model": number("model"),
        "MB": number("gradient_mb", "{:.1f}"),
        "hook": number("hook"),
        "step": number("kind"),
        "us, longer by: median (quartiles)": spread("us", 0),
        "% of a step": number("percent", "{:.3f}"),
    }
    title = f"metrics: what they add to a step; readings every {EVERY} steps"
    report("metrics", title, args, at, rows, columns, ["The line `without` is the step itself."])


if __name__ == "__main__":
    main()
