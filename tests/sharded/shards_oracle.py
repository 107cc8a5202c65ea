"""A slow oracle of compressed shards, in plain torch: what every rank must compute, to the bit.

It knows the whole weights and the gradients of all ranks, and neither messages nor blocks in place.
"""

from collections.abc import Callable, Sequence

import torch

Weigh = Callable[[torch.Tensor], torch.Tensor]


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def padded_shard(whole: torch.Tensor, rank: int, ranks: int, dim: int = 0) -> torch.Tensor:
    """Return a rank's part of `whole`, flat, with zeros up to the size of the largest part."""
    size = whole.size(dim) if whole.dim() else 1
    each = -(-size // ranks)
    begin = min(rank * each, size)
    part = whole.narrow(dim, begin, min(each, size - begin))
    missing = each - part.size(dim)
    padding = part.new_zeros([missing if i == dim else n for i, n in enumerate(part.shape)])
    return torch.cat([part, padding], dim).flatten()


def whole_of(shards: Sequence[torch.Tensor], shape: Sequence[int], dim: int = 0) -> torch.Tensor:
    """Undo `padded_shard`."""
    each = -(-shape[dim] // len(shards))
    of_shard = [each if i == dim else n for i, n in enumerate(shape)]
    return torch.cat([shard.view(of_shard) for shard in shards], dim).narrow(dim, 0, shape[dim])


def coded(numbers: torch.Tensor, form: str, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales, one of each per number (1-D). Their product is what arrives."""
    real = numbers.to(real_dtype(numbers.dtype))
    if form == "bf16":
        return real.bfloat16().to(real.dtype), torch.ones_like(real)
    if form == "exact":
        return real, torch.ones_like(real)
    most = torch.finfo(numbers.dtype).max / 127 * (1 - 4 * torch.finfo(real.dtype).eps)
    codes, scales = [], []
    for part in real.split(block):
        top = part.abs().max()
        scale = torch.where(top.isfinite(), top / 127, torch.nan).clamp(max=most)
        scale = torch.where(scale < torch.finfo(real.dtype).tiny, 0.0, scale)
        divisor = torch.where(scale == 0, 1.0, scale)
        codes.append((part / divisor).round().clamp(-127, 127).nan_to_num(127))
        scales.append(scale.expand_as(part))
    return torch.cat(codes), torch.cat(scales)


def decoded(numbers: torch.Tensor, form: str, block: int) -> torch.Tensor:
    codes, scales = coded(numbers, form, block)
    return (codes * scales).to(numbers.dtype)


def reduced(
    pieces: Sequence[torch.Tensor], me: int, form: str, block: int, weigh: Weigh
) -> torch.Tensor:
    """Return what rank `me` gets for its shard: its own piece, then the others in rank order."""
    own = pieces[me]
    total = weigh(own.to(real_dtype(own.dtype)))
    for rank, piece in enumerate(pieces):
        if rank != me:
            codes, scales = coded(piece, form, block)
            plain = form in ("exact", "bf16")
            total = total + (weigh(codes) if plain else codes * weigh(scales))
    return total.to(own.dtype)


def form_of(
    shape: Sequence[int], numel: int, dtype: torch.dtype, form: str | None, block: int
) -> str:
    """Return how a parameter is sent. `numel`: elements of the padded shard."""
    if form is None or len(shape) < 2:
        return "exact"
    sent = 2 * numel
    if form == "int8":
        sent = -(-numel // block) * (block + real_dtype(dtype).itemsize)
    return "exact" if sent >= numel * dtype.itemsize else form
