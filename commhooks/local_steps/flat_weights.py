"""Copy weights to and from flat tensors in memory order, in float32 (float64 for weights in
float64).
"""

from collections.abc import Mapping

import torch

from commhooks.gradients.layout import BucketLayout, read_layout, to_logical, to_memory
from commhooks.gradients.precision import compute_dtype

BUFFER_BYTES = 64 * 2**20


def divided(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Divide the parameters, in order, into `parts` lists of about equal size. A list may be empty.
    `sizes` counts whole parameters, so that ranks with different shards divide alike.
    """
    total, before = sum(sizes.values()), 0
    fragments: list[list[str]] = [[] for _ in range(parts)]
    for name, size in sizes.items():
        middle = before + size / 2
        fragments[min(parts - 1, int(middle * parts / max(1, total)))].append(name)
        before += size
    return fragments


def layouts(parameters: Mapping[str, torch.Tensor]) -> list[BucketLayout]:
    """Lay the parameters out in buffers, the last parameter first. A buffer has one device and one
    dtype, and at most `BUFFER_BYTES` unless a single parameter is larger.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[list[str]]] = {}
    for name, parameter in reversed(list(parameters.items())):
        dtype = compute_dtype(parameter.dtype)
        mine = groups.setdefault((parameter.device, dtype), [[]])
        if (
            mine[-1]
            and sum(parameters[n].numel() for n in [*mine[-1], name]) * dtype.itemsize
            > BUFFER_BYTES
        ):
            mine.append([])
        mine[-1].append(name)
    buffers = []
    for (device, dtype), several in groups.items():
        for names in several:
            members = [parameters[name] for name in names]
            size = sum(parameter.numel() for parameter in members)
            flat = torch.empty(size, dtype=dtype, device=device)
            buffers.append(read_layout(flat, members, names))
    return buffers


def packed(layout: BucketLayout, good: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the weights into a new buffer. Write a NaN into it if `good` (0-dim bool tensor; None:
    true) is false.
    """
    flat = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
    for slot in layout.slots:
        slot.of(flat).copy_(to_memory(slot.parameter.detach(), slot.parameter))
    if good is not None:
        flat[:1].masked_fill_(~good, torch.nan)
    return flat


def write_back(layout: BucketLayout, flat: torch.Tensor) -> None:
    """Set the weights from a buffer, rounded to their dtypes."""
    for slot in layout.slots:
        slot.parameter.detach().copy_(to_logical(slot.of(flat), slot.parameter))


def copied(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        n: to_memory(p.detach(), p).to(compute_dtype(p.dtype), copy=True)
        for n, p in parameters.items()
    }


def set_weights(parameters: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Set the weights for which there are `values` (flat tensors by name), rounded to their
    dtypes.
    """
    for name, parameter in parameters.items():
        if name in values:
            parameter.detach().copy_(to_logical(values[name].to(parameter.device), parameter))
