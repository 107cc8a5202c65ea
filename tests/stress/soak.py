"""A long run on 2 ranks: does memory grow, do the replicas drift, are the bits the same when it is run again?

    python -m tests.stress.soak [--steps 10000]        # two runs; exit code 1 if one of them is not as it should be

Run by `make soak`; `test_soak.py` runs a short one.
"""

import argparse
import gc
import hashlib
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.models import mlp

WIDTH, LAYERS = 24, 3
SEVERAL_BUCKETS_MB = 0.002
COMPARISONS = 20  # of the replicas, spread over the run
SMALL_GROWTH_MB = 4.0  # of a process; the allocator takes and gives back pieces of that size


def train(steps: int, wrapper: str | None = None) -> dict[str, Any]:
    """One run on this rank. Memory is looked at after a tenth of the steps and at the end."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp(WIDTH, LAYERS), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    scale = 1.0
    config = commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=10)
    hook = commhooks.attach(ddp, config, wrapper=wrapper, loss_scale=lambda: scale)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)) / WIDTH**0.5
    generator = torch.Generator().manual_seed(dist.get_rank())
    warm, every = max(steps // 10, 50), max(steps // COMPARISONS, 1)
    memory, tensors, hashes, losses = [], [], [], []
    for step in range(1, steps + 1):
        scale = 2.0 ** (step // 100 % 8)
        inputs = torch.randn(8, WIDTH, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(inputs) - torch.tanh(inputs @ teacher)).square().mean()
        if step % 251 == 0 and dist.get_rank() == step % 2:
            loss = loss * float("inf")  # such a step is part of a long run too
        (loss * scale).backward()
        gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            for gradient in gradients:
                gradient.div_(scale)
            optimizer.step()
            losses.append(loss.item())
        if step % every == 0:
            hashes.append(_hash(ddp))
            hook.state_dict()
        if step in (warm, steps):
            del loss, gradients
            gc.collect()
            memory.append(_resident_mb())
            tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    return {
        "hashes": hashes,
        "memory_mb": memory,
        "tensors": tensors,
        "first loss": sum(losses[:20]) / 20,
        "last loss": sum(losses[-20:]) / 20,
        "stats": hook.stats(),
    }


def problems(ranks: list[dict[str, Any]], again: list[dict[str, Any]], steps: int) -> list[str]:
    """What is wrong with two runs of `train`, in sentences; none if all is well."""
    found = []
    for name, run in (("first", ranks), ("second", again)):
        for rank, each in enumerate(run):
            who, stats = f"{name} run, rank {rank}", each["stats"]
            if each["hashes"] != run[0]["hashes"]:
                found.append(f"{who}: the weights are not those of rank 0")
            if stats["compressed_steps"] + stats["nonfinite_steps"] + 10 != steps:
                found.append(f"{who}: {stats['compressed_steps']} compressed, {stats['nonfinite_steps']} skipped steps")
            if stats["nonfinite_steps"] != steps // 251:
                found.append(f"{who}: {stats['nonfinite_steps']} steps skipped, {steps // 251} were bad")
            if stats["collectives_last_pass"] < 6:
                found.append(f"{who}: not several buckets")
            if each["memory_mb"][1] - each["memory_mb"][0] > SMALL_GROWTH_MB:
                found.append(f"{who}: memory went from {each['memory_mb'][0]:.1f} to {each['memory_mb'][1]:.1f} MB")
            if each["tensors"][1] > each["tensors"][0]:
                found.append(f"{who}: live tensors went from {each['tensors'][0]} to {each['tensors'][1]}")
            if not each["last loss"] < 0.5 * each["first loss"]:
                found.append(f"{who}: loss went from {each['first loss']:.3f} to {each['last loss']:.3f} only")
    if ranks[0]["hashes"] != again[0]["hashes"]:
        found.append("the second run has other weights than the first")
    return found


def _hash(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _resident_mb() -> float:
    """Resident memory of this process, in MB of 2**20 bytes (Linux)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    from tests.support.workers import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--wrapper", choices=["fp16", "bf16"])
    options = parser.parse_args()
    pool, runs = WorkerPool(), []
    for number in (1, 2):
        started = time.monotonic()
        runs.append(pool.run(train, options.steps, options.wrapper, timeout_s=600 + options.steps))
        print(f"run {number}: {options.steps} steps in {time.monotonic() - started:.1f} s")
        for rank, each in enumerate(runs[-1]):
            (mb, mb_after), (tensors, tensors_after) = each["memory_mb"], each["tensors"]
            print(
                f"  rank {rank}: memory {mb:.1f} -> {mb_after:.1f} MB, live tensors {tensors} -> {tensors_after}, "
                f"loss {each['first loss']:.3f} -> {each['last loss']:.4f}, weights {each['hashes'][-1][:16]}, "
                f"{each['stats']['compressed_steps']} compressed and {each['stats']['nonfinite_steps']} skipped steps"
            )
    pool.close()
    found = problems(*runs, options.steps)
    print("\n".join(found) if found else "All as it should be.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
