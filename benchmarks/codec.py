"""The hook's own time per step: backward with the hook minus backward with `noop`, one rank, one bucket.

    python benchmarks/codec.py [--models blocks resnet50] [--ranks 1 2 4 8 16] [--threads 1 2] [--rounds 15]

There is one rank and one bucket, because torch's own hook does not run on gloo with more. So nothing is sent, and only
arithmetic and memory traffic remain. In every round each hook makes one backward pass on the same batch, in one
process, with each number of threads. The result is the difference to `noop` with the same round and threads.

  noop                    nothing: the baseline
  commhooks               our PowerSGD, computed by torch
  native                  the same with the native kernel
  int8, int4              our quantised hooks, computed by torch; they have no rank
  native int8, native int4  the same with the native kernel
  torch, torch same       torch's powerSGD_hook without and with batch_tensors_with_same_shape
  epfml                   the authors' code (github.com/epfml/powersgd, where it can be imported): no DDP hook, so its
                          aggregate() runs after the backward pass of a bare model. The residual stays in .grad, and
                          backward adds to it; the baseline is therefore a backward pass of a bare model without .grad
  copy, add               of the gradients, as one flat tensor, to another one: copy_(a), add_(a)

The *traffic limit* of PowerSGD is the time of six passes over the gradients: add into the residual (read, read, write),
Q and residual (read, write), gradient (write). For the quantised hooks it is the time of six such passes and two over
the codes, which are a quarter (int8) or an eighth (int4) of a pass each: delta (read, read, write) and codes (write),
then residual (read, write), codes (read) and gradient (write). The scales are less than 2 % of a pass. A pass is a
third of a.add_(b) over as many numbers, in the same rounds, which is the fastest way through memory that is measured
here. (A copy is two passes, and its writes read first.) With several threads the limit is measured with these threads;
"of one" is the time divided by the time with the first number of threads.
"""

import time
from collections.abc import Callable

import torch
from common import Row, number, one_rank, parse, parser, report, spread, steady, summary, take_turns
from hooks import ONE_BUCKET_MB, wrap
from machine import machine
from models import TASKS, forward_loss, make, numel

from commhooks import CommHook

WARM_UP, START, BATCHES = 4, 2, 4
QUANTISED = {"int8": "int8", "int4": "int4", "native int8": "native-int8", "native int4": "native-int4"}
PASSES = {"int8": 6.5, "native int8": 6.5, "int4": 6.25, "native int4": 6.25}
OURS = {"commhooks": "powersgd", "native": "native"}
BATCH_SIZE = {"resnet18": 2, "resnet50": 2}  # images; 16 vectors or tokens for other models

try:
    import powersgd as epfml  # type: ignore[import-not-found]

    EPFML_MISSING = "" if hasattr(epfml, "PowerSGD") else "the package `powersgd` that is installed holds no code"
except ImportError:
    EPFML_MISSING = "not installed"
# The wheels on PyPI (0.0.1 and 0.0.2) contain no module and require torch 1.10: only the repository can be used.
EPFML_HOW = (
    "epfml: {}; clone https://github.com/epfml/powersgd and put the clone on PYTHONPATH (its wheels on PyPI are empty)"
)


class Epfml:
    """The authors' aggregator on a bare model, used as in their `optimizer_step`."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self.parameters = list(model.parameters())
        config = epfml.Config(rank=rank, min_compression_rate=2, start_compressing_after_num_steps=START)
        self.aggregator = epfml.PowerSGD(self.parameters, config)

    def after_backward(self) -> None:
        gradients = [parameter.grad.data for parameter in self.parameters]
        averages = self.aggregator.aggregate(gradients)
        # Here the optimizer would step with the averages; afterwards the gradients hold the residual.
        for parameter, average, residual in zip(self.parameters, averages, gradients, strict=True):
            parameter.grad = average
            parameter.grad = residual


def measure(name: str, rank: int | None, rounds: int, threads: list[int]) -> list[Row]:
    """Return the milliseconds of each candidate at this rank of the factors (None: the quantised hooks), with each
    number of threads."""
    flat = torch.randn(numel(make(name)[0]))
    candidates, ours = _candidates(name, rank, flat)
    turns = {
        f"{candidate} {count}": lambda run=run, count=count: _with_threads(count, run)
        for count in threads
        for candidate, run in candidates.items()
    }
    samples = take_turns(turns, rounds, WARM_UP)
    for candidate, hook in ours.items():
        done = hook.stats()
        passes = (WARM_UP + rounds) * len(threads)
        if done["compressed_steps"] != passes - START or done["bytes_sent_last_pass"] >= 4 * flat.numel():
            raise SystemExit(f"{candidate} did not compress: {done}")
    rows = []
    for count in threads:
        own = {candidate: samples[f"{candidate} {count}"] for candidate in candidates}
        common = {"section": f"{name} {rank} {count}", "model": name, "rank": rank, "threads": count}
        rows += _rows({**common, "gradient_mb": 4 * flat.numel() / 1e6}, own)
    one = {row["hook"]: row["median_ms"] for row in rows if row["threads"] == threads[0]}
    for row in rows:
        if row["threads"] != threads[0] and row["median_ms"] is not None:
            row["times_one"] = row["median_ms"] / one[row["hook"]]
    return rows


def _candidates(
    name: str, rank: int | None, flat: torch.Tensor
) -> tuple[dict[str, Callable[[], float]], dict[str, CommHook]]:
    """Return the candidates that take turns, and which of them are our hooks."""
    _, task = make(name)
    batches = [task.batch(BATCH_SIZE.get(name, 16)) for _ in range(BATCHES)]
    turn = dict.fromkeys(("noop", *OURS, *QUANTISED, "torch", "torch same", "bare", "epfml"), 0)

    def backward(candidate: str, model: torch.nn.Module, after: Callable[[], None] | None) -> float:
        loss = forward_loss(model, task, batches[turn[candidate] % BATCHES])
        turn[candidate] += 1
        started = time.perf_counter()
        loss.backward()
        if after is not None:
            after()
        passed = time.perf_counter() - started
        if after is None:
            model.zero_grad(set_to_none=True)
        return 1000 * passed

    labels = {"noop": "noop"}
    if rank is None:
        labels |= QUANTISED
    else:
        labels |= {name: f"{label}-{rank}" for name, label in OURS.items()}
        labels |= {"torch": f"torch-{rank}", "torch same": f"torch-same-{rank}"}
    ours: dict[str, CommHook] = {}
    candidates: dict[str, Callable[[], float]] = {}
    for candidate, label in labels.items():
        model, own = wrap(make(name)[0], label, start=START, bucket_cap_mb=ONE_BUCKET_MB)
        if own is not None and candidate != "noop":
            ours[candidate] = own
        candidates[candidate] = lambda candidate=candidate, model=model: backward(candidate, model, None)
    if rank is not None and not EPFML_MISSING:
        bare, aggregated = make(name)[0], make(name)[0]
        after = Epfml(aggregated, rank).after_backward
        candidates["bare"] = lambda: backward("bare", bare, None)
        candidates["epfml"] = lambda: backward("epfml", aggregated, after)
    other = torch.zeros_like(flat)
    candidates["copy"] = lambda: _milliseconds(lambda: other.copy_(flat))
    candidates["add"] = lambda: _milliseconds(lambda: other.add_(flat))
    return candidates, ours


def _rows(common: Row, samples: dict[str, list[float]]) -> list[Row]:
    one_pass = summary(samples["add"], "ms")["median_ms"] / 3
    rows: list[Row] = []
    measured = QUANTISED if common["rank"] is None else (*OURS, "torch", "torch same", "epfml")
    for hook in (*measured, "copy", "add"):
        limit = PASSES.get(hook, 6) * one_pass
        row: Row = {**common, "hook": hook, "limit_ms": limit, "median_ms": None}
        if hook in samples:
            baseline = {"epfml": "bare", "copy": None, "add": None}.get(hook, "noop")
            less = samples[baseline] if baseline else [0.0] * len(samples[hook])
            over = [with_hook - without for with_hook, without in zip(samples[hook], less, strict=True)]
            row |= summary(over, "ms")
            row["times_limit"] = row["median_ms"] / limit
        else:
            row["note"] = EPFML_MISSING
        rows.append(row)
    torch_ms = next((row["median_ms"] for row in rows if row["hook"] == "torch"), None)
    for row in rows:
        if row["median_ms"] is not None and torch_ms is not None:
            row["times_torch"] = row["median_ms"] / torch_ms
    rows.append({**common, "hook": "noop backward", **summary(samples["noop"], "ms"), "limit_ms": 6 * one_pass})
    return rows


def _with_threads(threads: int, run: Callable[[], float]) -> float:
    torch.set_num_threads(threads)
    return run()


def _milliseconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(TASKS), default=["blocks", "resnet50"])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of the factors")
    arguments.add_argument("--threads", type=int, nargs="+", default=[1], help="of torch and of the native kernel")
    arguments.add_argument("--rounds", type=int, default=15)
    args = parse(arguments, models=["tiny"], ranks=[1, 4], rounds=3)
    at = machine()
    rows: list[Row] = []
    with steady(threads=max(args.threads)), one_rank():
        for name in args.models:
            for rank in [None, *args.ranks]:
                rows += measure(name, rank, args.rounds, args.threads)
    columns = {
        "model": number("model"),
        "MB": number("gradient_mb", "{:.1f}"),
        "rank": number("rank"),
        "threads": number("threads"),
        "hook": number("hook"),
        "ms: median (quartiles)": spread("ms"),
        "x limit": number("times_limit", "{:.2f}"),
        "x torch": number("times_torch", "{:.2f}"),
        "limit, ms": number("limit_ms", "{:.1f}"),
    }
    if len(args.threads) > 1:
        columns["of one"] = number("times_one", "{:.2f}")
    title = "codec: time of the hook per step, on top of noop"
    report("codec", title, args, at, rows, columns, [EPFML_HOW.format(EPFML_MISSING)] if EPFML_MISSING else [])


if __name__ == "__main__":
    main()
