"""Helpers for tests of hooks on several ranks: a model, batches, a backward pass, comparisons over
ranks.

Everything here runs inside the workers. All ranks of the group must call the functions that compare
over ranks.
"""

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commhooks import CommHook

SMALL_BUCKETS_MB = (
    0.003  # about 3 kB: every layer of `mlp` has a bucket of its own after the rebuild
)


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Make three linear layers that are worth compressing at ranks 1 and 2, equal on all ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 24)
    )
    return model.to(dtype)


def wrap(module: nn.Module, **ddp_options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **({"bucket_cap_mb": SMALL_BUCKETS_MB} | ddp_options))


def batch(
    step: int, rank: int | None = None, width: int = 24, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Make eight rows for this step, different on each rank. `rank`: None: this process's."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, width, generator=generator, dtype=dtype)


def backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    """Run one forward and backward pass of `mlp` on this rank's batch, into gradients that start as
    None. `scale`: factor of the loss.
    """
    model.zero_grad(set_to_none=True)
    dtype = next(model.parameters()).dtype
    (model(batch(step, dtype=dtype)).square().mean() * scale).backward()


def descend(model: nn.Module, lr: float = 0.1) -> None:
    """A step of plain gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=lr)


def train(model: nn.Module, steps: int, first_step: int = 0) -> None:
    for step in range(first_step, first_step + steps):
        backward(model, step)
        descend(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the gradients, dense, under the names of the module inside DDP."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        name: parameter.grad.to_dense().clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def local_gradients(
    model: nn.Module, run: Callable[[nn.Module], object]
) -> dict[str, torch.Tensor]:
    """Return this rank's own gradients, from `run` on a copy of the module."""
    alone = copy.deepcopy(model.module if isinstance(model, DistributedDataParallel) else model)
    alone.zero_grad(set_to_none=True)
    run(alone)
    return gradients(alone)


@contextlib.contextmanager
def process_group_of_one() -> Iterator[None]:
    """Context manager: a default process group with this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # as in worker_side.py: the model is destroyed soon, and the group with it
        time.sleep(0.001)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def mean_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    total = tensor.detach().clone().contiguous()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def replicas_equal(model: nn.Module, group: dist.ProcessGroup | None = None) -> bool:
    """Whether weights and gradients are finite and bit-equal on every rank."""
    parts = [
        p.detach().double().flatten()
        if not p.is_complex()
        else torch.view_as_real(p.detach()).double().flatten()
        for p in model.parameters()
    ]
    parts += [g.double().flatten() for g in gradients(model).values() if not g.is_complex()]
    mine = torch.cat(parts)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return bool(mine.isfinite().all()) and all(torch.equal(mine, flat) for flat in everyone)


def residuals(hook: CommHook) -> dict[str, torch.Tensor]:
    """Return this rank's residuals by parameter, in the shape of the parameter."""
    saved = hook.state_dict("per_rank")["parameters"]
    return {
        name: entry["residual"][0] for name, entry in saved.items() if entry["residual"] is not None
    }


def relative(difference: torch.Tensor, reference: torch.Tensor) -> float:
    return float(difference.double().norm() / reference.double().norm())


def errors_of_means(model: nn.Module, steps: int, factor: float = 1.0) -> list[float]:
    """Train, and return the relative error of each gradient. It should be `factor` times the mean
    of the ranks' own gradients.
    """
    errors = []
    for step in range(steps):
        alone = local_gradients(model, functools.partial(backward, step=step))
        backward(model, step)
        for name, gradient in gradients(model).items():
            expected = factor * mean_over_ranks(alone[name])
            assert gradient.dtype == expected.dtype
            errors.append(relative(gradient - expected, expected))
        descend(model)
        assert replicas_equal(model)
    return errors


def conservation_error(
    local: torch.Tensor,
    before: torch.Tensor | None,
    after: torch.Tensor,
    gradient: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return |mean new residual + gradient - mean delta| / |mean delta| for one parameter, with
    delta = gradient + old residual.

    What compression omits from the gradient must be in the residuals, however good the
    approximation is.
    """
    delta = local.double() if before is None else local.double() + before.double()
    mean_delta = mean_over_ranks(delta, group)
    return relative(
        mean_over_ranks(after.double(), group) + gradient.double() - mean_delta, mean_delta
    )


@contextlib.contextmanager
def log_lines(
    names: str | tuple[str, ...] = "commhooks", level: int = logging.INFO
) -> Iterator[list[str]]:
    """Context manager: collect the messages logged under one or several names."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = map(logging.getLogger, (names,) if isinstance(names, str) else names)
    before = {logger: logger.level for logger in loggers}
    for logger in before:
        logger.addHandler(handler)
        logger.setLevel(min(level, logger.getEffectiveLevel()))
    try:
        yield lines
    finally:
        for logger, its_level in before.items():
            logger.removeHandler(handler)
            logger.setLevel(its_level)


def limit_from_now_on(group: dist.ProcessGroup | None, seconds: float) -> None:
    """Set the time-out of a group, when its ranks have done what may take longer on a busy host."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
