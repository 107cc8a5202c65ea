"""Weights as flat tensors in float32 (float64 for weights in float64), in which outer steps compute and send."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from commhooks.gradients.layout import BucketLayout, read_layout, to_logical, to_memory
from commhooks.gradients.precision import compute_dtype

BUFFER_BYTES = 64 * 2**20


def layouts(parameters: Mapping[str, torch.Tensor]) -> list[BucketLayout]:
    """Where each parameter lies in the buffers that hold all of them, last one first. A buffer is on one device and has
    at most `BUFFER_BYTES`, or one parameter."""
    found = []
    for names in _groups({name: parameters[name] for name in reversed(list(parameters))}):
        group = [parameters[name] for name in names]
        size, dtype = sum(each.numel() for each in group), compute_dtype(group[0].dtype)
        found.append(read_layout(torch.empty(size, dtype=dtype, device=group[0].device), group, names))
    return found


def packed(layout: BucketLayout) -> torch.Tensor:
    """A buffer with a copy of the weights."""
    flat = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
    for slot in layout.slots:
        slot.of(flat).copy_(to_memory(slot.parameter.detach(), slot.parameter))
    return flat


def write_back(layout: BucketLayout, flat: torch.Tensor) -> None:
    """Let the weights be what is in the buffer, rounded to their dtypes."""
    for slot in layout.slots:
        slot.parameter.detach().copy_(to_logical(slot.of(flat), slot.parameter))


def divided(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """The names in so many parts of about the same size, in order. A part beside a large tensor may be empty.

    Args:
        sizes: of the whole parameters, so that ranks with other shards divide them alike.
    """
    total, before = sum(sizes.values()), 0
    found: list[list[str]] = [[] for _ in range(parts)]
    for name, size in sizes.items():
        middle = before + size / 2
        found[min(parts - 1, int(middle * parts / max(1, total)))].append(name)
        before += size
    return found


def copied(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the weights by name, flat in memory order."""
    return {n: to_memory(p.detach(), p).to(compute_dtype(p.dtype), copy=True) for n, p in parameters.items()}


def set_weights(parameters: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Let the weights be `values`, by name and flat in memory order, rounded to their dtypes."""
    for name, parameter in parameters.items():
        if name in values:
            parameter.detach().copy_(to_logical(values[name].to(parameter.device), parameter))


def _groups(parameters: Mapping[str, torch.Tensor]) -> Iterator[Sequence[str]]:
    """The names of parameters of one device and one dtype of computation, up to `BUFFER_BYTES` in a group but at least
    one."""
    groups: dict[tuple[torch.device, torch.dtype], list[list[str]]] = {}
    for name, each in parameters.items():
        dtype = compute_dtype(each.dtype)
        mine = groups.setdefault((each.device, dtype), [[]])
        if mine[-1] and sum(parameters[n].numel() for n in [*mine[-1], name]) * dtype.itemsize > BUFFER_BYTES:
            mine.append([])
        mine[-1].append(name)
    return (group for each in groups.values() for group in each)
