"""What the hooks cost on a CUDA device, ours and torch's: time, kernels, waits of the host.

    # make bench-gpu
    python benchmarks/gpu.py [--models blocks resnet50 gpt2] [--ranks 1 4] [--rounds 30]

One rank (NCCL if torch has it, else gloo) runs `noop`, our and torch's powerSGD_hook, both with and
without batch_tensors_with_same_shape ("same"), and int8 and int4 with Triton and with torch's
operators, in turns on the same batches. Buckets have DDP's default size of 25 MB, as in training,
or there is one bucket for all gradients. The batch is small, so that nothing hides the hook, or
realistic. All figures are relative to `noop` in the same round or of the same kind:

  ms              backward with the hook minus backward with `noop`, from CUDA events around it
  x torch         that time / the time of torch's hook without "same"
  host ms         the same on the host's clock, until backward returns; it does not wait for the
                  device
  kernels         kernels that the device ran in a backward pass, from torch.profiler, without
                  copies and fills
  waits           operations that made the host wait, as torch.cuda.set_sync_debug_mode("warn")
                  reports them
  synchronize     calls of cuda{Device,Stream,Event}Synchronize in the same profile: an explicit
                  torch.cuda.synchronize() shows here and not in the column before
  of the limit    the time of six passes over the gradients (see codec.py), divided by the hook's
                  time: 100 % is as fast as this memory allows. A pass is a third of a.add_(b) over
                  as many numbers.
"""

import gc
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

# otherwise the profiler of torch 2.13 writes lines to stderr
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.distributed as dist
from common import (
    Row,
    machine,
    no_device,
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
from models import TASKS, forward_loss, make, numel
from torch.profiler import ProfilerActivity, profile

START, WARM_UP, BATCHES = 2, 6, 4
BATCH: dict[str, dict[str, tuple[str, int]]] = {
    "small": {
        "blocks": ("blocks", 16),
        "resnet50": ("resnet50", 2),
        "gpt2": ("gpt2", 1024),
        "tiny": ("tiny", 16),
        "tiny_gpt2": ("tiny_gpt2", 64),
    },
    "realistic": {
        "blocks": ("blocks", 16_384),
        "resnet50": ("resnet50_224", 64),
        "gpt2": ("gpt2", 8192),
        "tiny": ("tiny", 64),
        "tiny_gpt2": ("tiny_gpt2", 256),
    },
}
"""Model -> the task that makes the batch, and its size: images, vectors or tokens."""
BUCKETS = {"25 MB": None, "one": ONE_BUCKET_MB}


# ---- the cost of some work on a device -----------------------------------------------------------

Work = Callable[[], object]
WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


class Cuda:
    device = torch.device("cuda")

    def times(self, work: Work) -> tuple[float, float]:
        """Return milliseconds on the current stream, and on the host until `work` returns."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        begin.record()
        work()
        host_ms = 1000 * (time.perf_counter() - started)
        end.record()  # DDP has made this stream wait for the hook's futures
        torch.cuda.synchronize()
        return begin.elapsed_time(end), host_ms

    def waits(self, work: Work) -> int:
        """Count the operations in `work` that made the host wait."""
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return count_waits(str(warning.message) for warning in seen)

    def profiled(self, work: Work) -> tuple[int, int]:
        """Return the kernels of `work`, and the calls that wait for the device."""
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            work()
        events = profiler.events() or []
        on_device = [
            event for event in events if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return sum(map(is_kernel, on_device)), sum(event.name in WAITING for event in events)


class Cpu:
    """A rehearsal without a GPU: the host's time, and operators instead of kernels."""

    device = torch.device("cpu")

    def times(self, work: Work) -> tuple[float, float]:
        started = time.perf_counter()
        work()
        passed_ms = 1000 * (time.perf_counter() - started)
        return passed_ms, passed_ms

    def waits(self, work: Work) -> int:
        work()
        return 0

    def profiled(self, work: Work) -> tuple[int, int]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            work()
        return sum(event.name.startswith("aten::") for event in profiler.events() or []), 0


def count_waits(texts: Iterable[str]) -> int:
    """Count the warnings about waits. `set_sync_debug_mode` itself also warns, that it does not see
    all "synchronizing operations".
    """
    return sum("called a synchronizing" in text for text in texts)


def is_kernel(event: Any) -> bool:
    """Whether an event of the device is a kernel. It is not if it is a copy, a fill, or the range
    that an annotation on the host covers on the device, such as "nccl:all_reduce" or DDP's own.
    """
    if event.name.startswith(
        ("Memcpy", "Memset", "nccl:", "DistributedDataParallel.", "torch.distributed.")
    ):
        return False
    return not getattr(event, "is_user_annotation", False)


# ---- the candidates ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """One measurement. `buckets` and `batch` are keys of `BUCKETS` and `BATCH`."""

    model: str
    rank: int
    buckets: str
    batch: str


class Candidate:
    """A model on the device with its hook; measures the cost of a backward pass."""

    def __init__(self, setup: Setup, label: str, on: Cuda | Cpu) -> None:
        model, self._task = make(setup.model)
        self._on = on
        self._model, self.hook = wrap(
            model.to(on.device), label, start=START, bucket_cap_mb=BUCKETS[setup.buckets]
        )
        task, size = BATCH[setup.batch][setup.model]
        batches = (TASKS[task].batch(size) for _ in range(BATCHES))
        self._batches = [
            (inputs.to(on.device), targets.to(on.device)) for inputs, targets in batches
        ]
        self._turn = 0
        self.host_ms: list[float] = []

    def _loss(self) -> torch.Tensor:
        self._model.zero_grad(set_to_none=True)
        self._turn += 1
        return forward_loss(self._model, self._task, self._batches[self._turn % BATCHES])

    def milliseconds(self) -> float:
        """Return the device time of a backward pass in ms, and append the host time to
        `host_ms`.
        """
        device_ms, host_ms = self._on.times(self._loss().backward)
        self.host_ms.append(host_ms)
        return device_ms

    def waits(self) -> int:
        return self._on.waits(self._loss().backward)

    def profiled(self) -> tuple[int, int]:
        """Return (kernels, synchronising calls) of a backward pass. The profiler adds the same
        number for each candidate.
        """
        return self._on.profiled(self._loss().backward)


def measure(setup: Setup, rounds: int, on: Cuda | Cpu) -> list[Row]:
    rank = setup.rank
    labels = {"noop": "noop", "commhooks": f"powersgd-{rank}", "commhooks same": f"same-{rank}"}
    labels |= {
        "int8": "native-int8",
        "int8, no Triton": "int8",
        "int4": "native-int4",
        "int4, no Triton": "int4",
    }
    labels |= {"torch": f"torch-{rank}", "torch same": f"torch-same-{rank}"}
    candidates = {name: Candidate(setup, label, on) for name, label in labels.items()}
    count = numel(make(setup.model)[0])
    flat = torch.randn(count, device=on.device)
    other = torch.zeros(count, device=on.device)
    turns: dict[str, Callable[[], float]] = {
        name: candidate.milliseconds for name, candidate in candidates.items()
    }
    turns["add"] = lambda: on.times(lambda: other.add_(flat))[0]
    samples = take_turns(turns, rounds, WARM_UP)
    for name in [
        name for name, label in labels.items() if name != "noop" and not label.startswith("torch")
    ]:
        ours = candidates[name].hook
        assert ours is not None
        done = ours.stats()
        if done["compressed_steps"] != WARM_UP + rounds - START:
            raise SystemExit(f"{name} did not compress: {done}")
    waits = {name: candidate.waits() for name, candidate in candidates.items()}
    profiles = {name: candidate.profiled() for name, candidate in candidates.items()}
    limit = 6 * summary(samples["add"], "ms")["median_ms"] / 3
    rows: list[Row] = []
    for name in list(labels)[1:]:
        over = [a - b for a, b in zip(samples[name], samples["noop"], strict=True)]
        host = [
            a - b for a, b in zip(candidates[name].host_ms, candidates["noop"].host_ms, strict=True)
        ][WARM_UP:]
        row: Row = {"section": str(setup), **vars(setup), "hook": name, "limit_ms": limit}
        row |= {"gradient_mb": 4 * count / 1e6, **summary(over, "ms"), **summary(host, "host_ms")}
        row["kernels"] = profiles[name][0] - profiles["noop"][0]
        row["synchronize_calls"] = profiles[name][1] - profiles["noop"][1]
        row["waits"] = waits[name] - waits["noop"]
        row["share_of_limit"] = limit / row["median_ms"] if row["median_ms"] > 0 else None
        rows.append(row)
    for row in rows:
        theirs = next(row["median_ms"] for row in rows if row["hook"] == "torch")
        row["times_torch"] = row["median_ms"] / theirs if theirs > 0 else None
    return rows


COLUMNS = {
    "model": number("model"),
    "rank": number("rank"),
    "buckets": number("buckets"),
    "batch": number("batch"),
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


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--models", nargs="+", choices=list(BATCH["small"]), default=["blocks", "resnet50", "gpt2"]
    )
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="of the factors")
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--buckets", nargs="+", choices=list(BUCKETS), default=list(BUCKETS))
    arguments.add_argument("--batches", nargs="+", choices=list(BATCH), default=list(BATCH))
    arguments.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: only shows that it works"
    )
    args = parse(arguments, models=["tiny", "tiny_gpt2"], ranks=[1, 4], rounds=3)
    on = Cuda() if args.device == "cuda" else Cpu()
    problem = no_device() if args.device == "cuda" else ""
    if problem:
        print(f"{problem} Nothing was measured.", file=sys.stderr)
        return 1
    at = machine()
    rows: list[Row] = []
    with (
        steady(pinned=False),
        one_rank("nccl" if args.device == "cuda" and dist.is_nccl_available() else "gloo"),
    ):
        for setup in itertools.starmap(
            Setup, itertools.product(args.models, args.ranks, args.buckets, args.batches)
        ):
            print(setup, file=sys.stderr)
            rows += measure(setup, args.rounds, on)
            gc.collect()  # hooks are part of reference cycles that hold the models
    notes = [] if args.device == "cuda" else ["Measured on the CPU: only shows that it works."]
    if dist.is_nccl_available() and args.device == "cuda":
        notes.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    else:
        notes.append("On gloo torch's hook always has one bucket.")
    report("gpu", "gpu: cost of the hook per step, on top of noop", args, at, rows, COLUMNS, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
