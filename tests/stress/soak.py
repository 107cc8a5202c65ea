"""In a long run on 2 ranks memory and residuals must not grow, nor replicas or repetitions differ.

    # exit code 1 if something is wrong
    python -m tests.stress.soak [--hooks powerSGD int8 diloco] [--steps 50000]

A tenth of the steps is run a second time, for the bits. Run by `make soak`; `test_soak.py` runs a
short one.
"""

import argparse
import collections
import dataclasses
import functools
import gc
import hashlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.models import mlp

WIDTH, LAYERS = 24, 3
SEVERAL_BUCKETS_MB = 0.002
START, RANK, ROUND = 10, 2, 5
NOISE = 0.2  # of the labels, so that there are gradients as long as the run lasts
COMPARISONS = 20  # of the replicas, spread over the run
BAD_EVERY, FIRST_BAD = 251, 101
SMALL_GROWTH_TENSORS = 3  # gloo's threads let go of the latest collectives a little later
SMALL_GROWTH_MB = 4.0  # of a process; the allocator takes and gives back pieces of that size
MOST_DRIFT = 1.25  # the norm of the mean residual, last quarter of the run over the second quarter

Size = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A hook, and how large the mean over the ranks of its residuals can get.

    Attributes:
        bound: `size` of the mean residual of a matrix, as a part of the largest that a rank has
            given to the hook: a gradient, or with `rounds` how far its weights have moved.
    """

    config: commhooks.HookConfig
    size: Size
    bound: float
    rounds: bool = False


def _of_quantising(levels: int) -> float:
    """Rounding loses at most half a step, of a `levels`-th of the largest number of delta = given +
    residual: once on each rank, and once more for the mean, whose owner keeps that for both ranks.
    So a rank's residual is at most 1.5 / levels of its delta, delta at most 1 / (1 - 1.5 / levels)
    of what is given, and the mean residual at most 1 / levels of delta.
    """
    return 1 / levels / (1 - 1.5 / levels)


def _of_projecting(rank: int, width: int) -> float:
    """The mean residual is what a projection leaves of delta = mean gradient + mean residual, never
    longer than delta. If it takes a share of rank / width off the squared length, as `rank` of
    `width` directions hold on average, and PowerSGD's hold more, then a length x = kept (x + 1)
    stays.
    """
    kept = (1 - rank / width) ** 0.5
    return kept / (1 - kept)


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().max()


SUBJECTS = {
    "powerSGD": Subject(
        commhooks.PowerSGD(matrix_approximation_rank=RANK, start_powerSGD_iter=START),
        torch.linalg.norm,
        _of_projecting(RANK, WIDTH),
    ),
    "int8": Subject(commhooks.Int8Compress(start_iter=START), _largest, _of_quantising(127)),
    "diloco": Subject(
        commhooks.DiLoCo(sync_every=ROUND, start_iter=START),
        _largest,
        _of_quantising(7),
        rounds=True,
    ),
}


def train(name: str, steps: int, every: int, wrapper: str | None = None) -> dict[str, Any]:
    """One run on this rank, with a look at replicas and residuals at every `every`-th step, which
    ends a round. Memory is looked at after a tenth of the steps and at the end.
    """
    torch.manual_seed(0)
    subject = SUBJECTS[name]
    scale = 1.0
    ddp = DistributedDataParallel(mlp(WIDTH, LAYERS), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    of_loss = None if subject.rounds else lambda: scale
    hook = commhooks.attach(ddp, subject.config, wrapper=wrapper, loss_scale=of_loss)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    matrices = {
        name: parameter for name, parameter in ddp.module.named_parameters() if parameter.dim() == 2
    }
    largest_gradients = dict.fromkeys(matrices, 0.0)  # the largest so far
    anchor = {name: matrix.detach().clone() for name, matrix in matrices.items()}

    def note(name: str, tensor: torch.Tensor) -> None:
        size = float(subject.size(tensor)) / scale
        largest_gradients[name] = (
            max(largest_gradients[name], size) if size < float("inf") else largest_gradients[name]
        )

    def note_moves(*_: Any) -> None:
        if step % ROUND == 0:  # this is called before the outer step
            for name, matrix in matrices.items():
                note(name, matrix.detach() - anchor[name])

    if subject.rounds:
        optimizer.register_step_post_hook(note_moves)
    else:
        for name, matrix in matrices.items():
            matrix.register_hook(functools.partial(note, name))
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)) / WIDTH**0.5
    generator = torch.Generator().manual_seed(dist.get_rank())
    warm = max(steps // 10, 50)
    memory, tensors, looks = [], [], []
    first: list[float] = []
    last = collections.deque[float](maxlen=min(200, steps // 5))
    for step in range(1, steps + 1):
        # such a step is part of a long run too
        bad = step % BAD_EVERY == FIRST_BAD and dist.get_rank() == step % 2
        if bad and subject.rounds:
            with torch.no_grad():
                next(ddp.parameters())[0, 0] = float("inf")
        scale = 1.0 if subject.rounds else 2.0 ** (step // 100 % 8)
        inputs = torch.randn(8, WIDTH, generator=generator)
        labels = torch.tanh(inputs @ teacher) + NOISE * torch.randn(8, WIDTH, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(inputs) - labels).square().mean()
        if bad and not subject.rounds:
            loss = loss * float("inf")
        (loss * scale).backward()
        gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        for gradient in gradients:
            gradient.div_(scale) if finite else gradient.zero_()
        optimizer.step()
        if finite:
            (first if len(first) < 20 else last).append(loss.item())
        if subject.rounds and step % ROUND == 0:
            for name, matrix in matrices.items():
                anchor[name].copy_(matrix.detach())
        if step % every == 0:
            looks.append(
                {"step": step, "hash": _hash(ddp)}
                | _mean_residual(hook, subject, largest_gradients)
            )
        if step in (warm, steps):
            del loss, gradients, inputs, labels
            gc.collect()
            memory.append(_resident_mb())
            tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    return {
        "looks": looks,
        "memory_mb": memory,
        "tensors": tensors,
        "first loss": sum(first) / len(first),
        "last loss": sum(last) / len(last),
        "stats": hook.stats(),
    }


def _mean_residual(
    hook: commhooks.CommHook, subject: Subject, largest_gradients: dict[str, float]
) -> dict[str, float]:
    """Return the norm of the mean residual, and its largest part of a gradient."""
    payload = hook.state_dict("per_rank")
    squares = 0.0
    part = 0.0
    for name, gradient in largest_gradients.items():
        (residual,) = payload["parameters"][name]["residual"]
        mean = residual / payload["loss_scale"] / dist.get_world_size()
        dist.all_reduce(mean)
        largest = torch.tensor(gradient, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        squares += float(mean.double().square().sum())
        part = max(part, float(subject.size(mean)) / float(largest))
    return {"norm": squares**0.5, "part": part}


def drift(looks: list[dict[str, Any]]) -> float:
    """The norm of the mean residual in the last quarter of the run, over that in the second one."""
    quarter = len(looks) // 4
    early, late = looks[quarter : 2 * quarter], looks[-quarter:]
    return sum(look["norm"] for look in late) / sum(look["norm"] for look in early)


def problems(
    name: str, ranks: list[dict[str, Any]], again: list[dict[str, Any]], steps: int
) -> list[str]:
    """Return what is wrong with a run and its shorter repetition, in sentences."""
    wrong = []
    subject = SUBJECTS[name]
    for rank, result in enumerate(ranks):
        who = f"{name}, rank {rank}"
        stats = result["stats"]
        looks = result["looks"]
        if [look["hash"] for look in looks] != [look["hash"] for look in ranks[0]["looks"]]:
            wrong.append(f"{who}: the weights are not those of rank 0")
        bad = (steps + BAD_EVERY - FIRST_BAD) // BAD_EVERY
        whole = (steps - START) // ROUND if subject.rounds else steps
        if (stats["step"], stats["nonfinite_steps"]) != (whole - bad, bad):
            wrong.append(
                f"{who}: {stats['step']} steps of the hook and {stats['nonfinite_steps']} skipped,"
                f" not {whole - bad} and {bad}"
            )
        if not subject.rounds and stats["collectives_last_pass"] < 6:
            wrong.append(f"{who}: not several buckets")
        if result["memory_mb"][1] - result["memory_mb"][0] > SMALL_GROWTH_MB:
            wrong.append(
                f"{who}: memory went from {result['memory_mb'][0]:.1f} to"
                f" {result['memory_mb'][1]:.1f} MB"
            )
        if result["tensors"][1] > result["tensors"][0] + SMALL_GROWTH_TENSORS:
            wrong.append(
                f"{who}: live tensors went from {result['tensors'][0]} to {result['tensors'][1]}"
            )
        if not result["last loss"] < 0.5 * result["first loss"]:
            wrong.append(
                f"{who}: loss went from {result['first loss']:.3f} to"
                f" {result['last loss']:.3f} only"
            )
        if not 0 < max(look["part"] for look in looks) < subject.bound:
            wrong.append(
                f"{who}: the mean residual reached {max(look['part'] for look in looks):.3g} of"
                " what was given"
            )
        if not drift(looks) < MOST_DRIFT:
            wrong.append(f"{who}: the mean residual grew by {drift(looks):.2f}")
    if again[0]["looks"] != ranks[0]["looks"][: len(again[0]["looks"])]:
        wrong.append(f"{name}: run again, it has other weights or residuals")
    return wrong


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


def run(
    run_ranks: Callable[..., list[Any]],
    name: str,
    steps: int,
    comparisons: int = COMPARISONS,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """A run of `train` and the first tenth of it again."""
    every = max(steps // comparisons // ROUND, 1) * ROUND
    timeout_s = 600 + steps
    return tuple(
        run_ranks(train, name, n, every, timeout_s=timeout_s, **options) for n in (steps, 2 * every)
    )


def main() -> int:
    from tests.stress.soak import run  # the workers find nothing that is defined in `__main__`
    from tests.support.workers import WorkerPool

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hooks", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--wrapper", choices=["fp16", "bf16"])
    options = parser.parse_args()
    pool = WorkerPool()
    wrong = []
    for name in options.hooks:
        started = time.monotonic()
        ranks, again = run(pool.run, name, options.steps, wrapper=options.wrapper)
        print(
            f"{name}: {options.steps} steps, and a tenth of them again, in"
            f" {time.monotonic() - started:.0f} s"
        )
        for rank, result in enumerate(ranks):
            (mb, mb_after), (tensors, tensors_after) = result["memory_mb"], result["tensors"]
            print(
                f"  rank {rank}: memory {mb:.1f} -> {mb_after:.1f} MB, live tensors {tensors} ->"
                f" {tensors_after}, loss {result['first loss']:.3f} -> {result['last loss']:.4f},"
                f" weights {result['looks'][-1]['hash'][:16]},"
                f" {result['stats']['step']} steps of the hook"
                f" and {result['stats']['nonfinite_steps']} skipped"
            )
        looks = ranks[0]["looks"]
        print("  norm of the mean residual:", *(f"{look['norm']:.3g}" for look in looks))
        print(
            f"  at most {max(look['part'] for look in looks):.3g} of what was given (bound "
            f"{SUBJECTS[name].bound:.3g}); last quarter over second quarter {drift(looks):.2f}",
            flush=True,
        )
        wrong += problems(name, ranks, again, options.steps)
    pool.close()
    print("\n".join(wrong) if wrong else "All as it should be.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
