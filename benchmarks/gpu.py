"""The codec on a CUDA device: time, kernels, host synchronisations and share of the memory bandwidth, ours and torch's.

    python benchmarks/gpu.py [--models blocks] [--ranks 1 2 4 8 16] [--rounds 30]

One rank (NCCL if torch has it, else gloo), one bucket, `noop`, ours and torch's powerSGD_hook, both with and without
batch_tensors_with_same_shape ("same"), in turns on the same batches. Everything is over the `noop` of the same round or
kind:

  ms              backward with the hook minus backward with `noop`, from CUDA events around it
  host ms         the same on the host's clock, until backward returns without waiting for the device
  kernels         that the device ran in a backward pass, from torch.profiler; copies and fills are not in it
  waits           operations that made the host wait, as torch.cuda.set_sync_debug_mode("warn") reports them
  synchronize     calls of cuda{Device,Stream,Event}Synchronize in the same profile: an explicit
                  torch.cuda.synchronize() shows here and not in the column before
  of the limit    the time of six passes over the gradients (see codec.py), divided by the hook's time: 100 % is as fast
                  as this memory allows. A pass is a third of a.add_(b) over as many numbers.
"""

import os
import time
import warnings
from collections.abc import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler of torch 2.13 writes lines to stderr

import torch
import torch.distributed as dist
from common import Row, machine, number, one_rank, parse, parser, report, spread, steady, summary, take_turns
from hooks import ONE_BUCKET_MB, wrap
from models import TASKS, forward_loss, make, numel
from torch.profiler import ProfilerActivity, profile

START, WARM_UP, BATCHES = 2, 6, 4
BATCH_SIZE = {"resnet18": 2, "resnet50": 2}  # images; 16 vectors or tokens for other models
WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


class Candidate:
    """A model on the device with its hook; measures the cost of a backward pass."""

    def __init__(self, model_name: str, label: str) -> None:
        model, self._task = make(model_name)
        self._model, self.hook = wrap(model.cuda(), label, start=START, bucket_cap_mb=ONE_BUCKET_MB)
        size = BATCH_SIZE.get(model_name, 16)
        self._batches = [tuple(t.cuda() for t in self._task.batch(size)) for _ in range(BATCHES)]
        self._turn = 0
        self.host_ms: list[float] = []

    def _loss(self) -> torch.Tensor:
        self._model.zero_grad(set_to_none=True)
        self._turn += 1
        inputs, targets = self._batches[self._turn % BATCHES]
        return forward_loss(self._model, self._task, (inputs, targets))

    def milliseconds(self) -> float:
        """Device time of a backward pass in ms; the host time is appended to `host_ms`."""
        loss = self._loss()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        begin.record()
        loss.backward()
        self.host_ms.append(1000 * (time.perf_counter() - started))
        end.record()  # DDP has made this stream wait for the hook's futures
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def waits(self) -> int:
        loss = self._loss()
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in seen)

    def profiled(self) -> tuple[int, int]:
        """(kernels, synchronising calls) of a backward pass. The profiler adds the same number for each candidate."""
        loss = self._loss()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            loss.backward()
        events = profiler.events() or []
        device = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [name for name in device if not name.startswith(("Memcpy", "Memset"))]
        return len(kernels), sum(event.name in WAITING for event in events)


def on_device(function: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measure(model_name: str, rank: int, rounds: int) -> list[Row]:
    labels = {"noop": "noop", "commhooks": f"powersgd-{rank}", "commhooks same": f"same-{rank}"}
    labels |= {"torch": f"torch-{rank}", "torch same": f"torch-same-{rank}"}
    candidates = {name: Candidate(model_name, label) for name, label in labels.items()}
    count = numel(make(model_name)[0])
    flat, other = torch.randn(count, device="cuda"), torch.zeros(count, device="cuda")
    turns: dict[str, Callable[[], float]] = {name: each.milliseconds for name, each in candidates.items()}
    turns["add"] = lambda: on_device(lambda: other.add_(flat))
    samples = take_turns(turns, rounds, WARM_UP)
    for name in ("commhooks", "commhooks same"):
        ours = candidates[name].hook
        assert ours is not None
        done = ours.stats()
        if done["compressed_steps"] != WARM_UP + rounds - START:
            raise SystemExit(f"{name} did not compress: {done}")
    waits = {name: each.waits() for name, each in candidates.items()}
    profiles = {name: each.profiled() for name, each in candidates.items()}
    limit = 6 * summary(samples["add"], "ms")["median_ms"] / 3
    rows: list[Row] = []
    for name in ("commhooks", "commhooks same", "torch", "torch same"):
        over = [a - b for a, b in zip(samples[name], samples["noop"], strict=True)]
        host = [a - b for a, b in zip(candidates[name].host_ms, candidates["noop"].host_ms, strict=True)][WARM_UP:]
        row = {"section": f"{model_name} {rank}", "model": model_name, "rank": rank, "hook": name, "limit_ms": limit}
        row |= {"gradient_mb": 4 * count / 1e6, **summary(over, "ms"), **summary(host, "host_ms")}
        row["kernels"] = profiles[name][0] - profiles["noop"][0]
        row["synchronize_calls"] = profiles[name][1] - profiles["noop"][1]
        row["waits"] = waits[name] - waits["noop"]
        row["share_of_limit"] = limit / row["median_ms"] if row["median_ms"] > 0 else None
        rows.append(row)
    for row in rows:
        row["times_torch"] = row["median_ms"] / rows[2]["median_ms"]
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(TASKS), default=["blocks", "resnet50"])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of the factors")
    arguments.add_argument("--rounds", type=int, default=30)
    args = parse(arguments, models=["tiny"], ranks=[1, 4], rounds=3)
    at = machine()
    rows: list[Row] = []
    notes = []
    if torch.cuda.is_available():
        with steady(), one_rank("nccl" if dist.is_nccl_available() else "gloo"):
            for name in args.models:
                for rank in args.ranks:
                    rows += measure(name, rank, args.rounds)
    else:
        notes.append("This machine has no CUDA device that torch can use: nothing was measured.")
    columns = {
        "model": number("model"),
        "rank": number("rank"),
        "hook": number("hook"),
        "ms: median (quartiles)": spread("ms", 2),
        "x torch": number("times_torch", "{:.2f}"),
        "host ms": spread("host_ms", 2),
        "kernels": number("kernels"),
        "waits": number("waits"),
        "synchronize": number("synchronize_calls"),
        "limit, ms": number("limit_ms", "{:.2f}"),
        "of the limit": number("share_of_limit", "{:.0%}"),
    }
    report("gpu", "gpu: cost of the hook per step, on top of noop", args, at, rows, columns, notes)


if __name__ == "__main__":
    main()
