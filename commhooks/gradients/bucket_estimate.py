"""Estimate how DDP will divide a model into buckets, without DDP.

After the first step DDP orders the buckets by the time at which gradients were ready, which is roughly the reverse of
the order in which the parameters were registered (torch, reducer.cpp, `compute_bucket_assignment_by_size` and
`rebuild_buckets`). The estimate is wrong for a model that runs its layers in another order.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

DEFAULT_CAP_MB = 25
FIRST_CAP_BYTES = 2**20
"""Size of the first bucket unless `bucket_cap_mb` is given: DDP keeps it small to send it early."""
ESTIMATE = "estimated: how DDP cuts them after the first step if gradients are ready in reverse order of registration"


@dataclass(frozen=True)
class Reduced:
    """The properties of a parameter that determine its bucket."""

    name: str
    size_bytes: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False


def estimate_buckets(parameters: Iterable[Reduced], bucket_cap_mb: float | None = None) -> tuple[tuple[str, ...], ...]:
    """The names in each bucket, both in the order in which they are sent.

    Args:
        parameters: in the order of registration.
        bucket_cap_mb: as DDP's argument, MiB; None is DDP's default of 25, with a first bucket of 1.
    """
    caps = [int((bucket_cap_mb or DEFAULT_CAP_MB) * 2**20)]
    if bucket_cap_mb is None:
        caps.insert(0, FIRST_CAP_BYTES)
    done: list[tuple[str, ...]] = []
    # A bucket holds parameters of one dtype and device, and the first cap applies to each such combination.
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    closed: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed(list(parameters)):
        if parameter.sparse:
            done.append((parameter.name,))
            continue
        kind = (parameter.dtype, parameter.device)
        names, size = open_buckets.pop(kind, ([], 0))
        names.append(parameter.name)
        size += parameter.size_bytes
        if size >= caps[min(closed.get(kind, 0), len(caps) - 1)]:
            done.append(tuple(names))
            closed[kind] = closed.get(kind, 0) + 1
        else:
            open_buckets[kind] = (names, size)
    return (*done, *(tuple(names) for names, _ in open_buckets.values()))
