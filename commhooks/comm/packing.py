"""Pack numbers into messages, from the compute dtype to the wire dtype, and back.

Packing divides by the world size, so that the sum over the ranks is the mean. A narrower wire dtype
must not turn a large number into inf, nor an inf into a large number: finite numbers are clamped if
error feedback compensates for the loss, and non-finite numbers become NaN, which survives every
reduction.
"""

import functools
import math
from collections.abc import Sequence

import torch

WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype of each value of the option `wrapper`."""
CLAMPED_STEPS = 64
"""A gradient beyond this many times the largest number of the wire dtype counts as an overflow.

Error feedback would need more than this many steps to send it.
"""


def wire_dtype_of(bucket_dtype: torch.dtype, wrapper_dtype: torch.dtype | None) -> torch.dtype:
    """Return the wrapper's dtype if it is narrower than the bucket's, else the bucket's dtype.

    A 16-bit bucket is never converted to the other 16-bit dtype.
    """
    if wrapper_dtype is None or bucket_dtype.itemsize <= wrapper_dtype.itemsize:
        return bucket_dtype
    return wrapper_dtype


@functools.cache
def largest_share(dtype: torch.dtype, world_size: int) -> float:
    """Return the largest number that all ranks can send without an overflow of the sum."""
    info = torch.finfo(dtype)
    return info.max / world_size * (1 - min(0.5, world_size * info.eps))


def largest_gradient(wire_dtype: torch.dtype) -> float:
    return CLAMPED_STEPS * torch.finfo(wire_dtype).max


def pack_factor(factor: torch.Tensor, out: torch.Tensor, world_size: int) -> None:
    """Write `factor / world_size` to `out`.

    Clamp finite numbers so that the sum cannot overflow; write other numbers as NaN. Clamping P
    only changes the basis slightly.
    """
    limit = largest_share(out.dtype, world_size)
    # x * 0 is 0 for every finite x and NaN for inf and NaN.
    share = _share(factor, out, world_size).clamp_(-limit, limit).add_(factor * 0)
    if share is not out:
        out.copy_(share)


def put_overflow(gradient: torch.Tensor, out: torch.Tensor) -> None:
    """Set `out`, a number that is sent with P, to NaN if the gradient is too large for clamping.

    All ranks then receive NaN and skip the step; see `CLAMPED_STEPS`.
    """
    limit = largest_gradient(out.dtype)
    if limit < torch.finfo(gradient.dtype).max and gradient.numel() > 0:
        low, high = torch.aminmax(gradient)
        out.add_(torch.where(torch.maximum(-low, high) > limit, float("nan"), 0.0).to(out.dtype))


def put_projection(factor: torch.Tensor, out: torch.Tensor, world_size: int, *, rank: int) -> None:
    """Write Q, of rank `rank`, divided by the world size to `out`.

    Replace `factor` by the sent values times the world size, so that the residual includes rounding
    and clamping.

    An inf here is an overflow of the product that computed Q, because an inf in the gradient shows
    in P; it is clamped, too. The limit is the largest share divided by sqrt(rank), so that an
    element of P Q^T, a sum of `rank` products, fits into a bucket of the wire dtype.
    """
    limit = largest_share(out.dtype, world_size) / math.sqrt(rank)
    share = _share(factor, out, world_size).clamp_(-limit, limit)
    if share is not out:
        out.copy_(share)
    factor.copy_(out)
    factor.mul_(world_size)


def put_plain(gradients: Sequence[torch.Tensor], out: torch.Tensor, world_size: int) -> None:
    """Write uncompressed gradients (1-D, at least one), divided by the world size, to `out`.

    They are not clamped, because no error feedback would compensate: an overflow becomes inf, and
    the step is skipped.
    """
    if len(gradients) == 1:
        whole = gradients[0]
    elif out.dtype == gradients[0].dtype:
        concat_into(gradients, out)
        whole = out
    else:
        whole = torch.cat(list(gradients))
    share = _share(whole, out, world_size)  # divide before the cast, so that fewer numbers overflow
    if share is not out:
        out.copy_(share)


def put_flags(gradients: Sequence[torch.Tensor], flags: torch.Tensor) -> None:
    """Write a flag per parameter: 1 if its gradient (1-D) is not zero, else 0. For the CPU.

    DDP may discard the result for a parameter that no rank used, and a residual sent in it would be
    lost.
    """
    for gradient, flag in zip(gradients, flags, strict=True):
        # Nearly always one of the first 64 elements is nonzero, so test these first.
        flag.fill_(bool(gradient[:64].any()) or bool(gradient.any()))


def _share(numbers: torch.Tensor, out: torch.Tensor, world_size: int) -> torch.Tensor:
    return torch.div(numbers, world_size, out=out if out.dtype == numbers.dtype else None)


def all_finite(reduced: torch.Tensor) -> torch.Tensor:
    """Return whether all numbers are finite, as a 0-dim bool tensor on the same device.

    On the CPU aminmax is nine times faster than isfinite().all(). With a NaN in the input both of
    its results are NaN.
    """
    if reduced.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=reduced.device)
    low, high = torch.aminmax(reduced)
    return torch.maximum(-low, high) < float("inf")


# ---- copies of many pieces in one or two operators -----------------------------------------------


def concat_into(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copy `pieces` (1-D, of one dtype), one after another, into `out` (1-D, of any dtype). All of
    them may have rows instead, which are treated alike.
    """
    if len(pieces) == 1:
        out.copy_(pieces[0])
    elif pieces[0].dtype == out.dtype:
        torch.cat(list(pieces), dim=-1, out=out)
    else:  # concatenate first: converting each piece would take an operator per piece
        out.copy_(torch.cat(list(pieces), dim=-1))


def scatter_into(whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy `whole` (1-D, of any dtype) into `pieces` (1-D, of one dtype), one after another. All of
    them may have rows instead, which are treated alike.
    """
    if len(pieces) == 1:
        pieces[0].copy_(whole)
    else:
        sizes = [piece.shape[-1] for piece in pieces]
        numbers = whole.to(pieces[0].dtype)
        torch.split_with_sizes_copy(numbers, sizes, dim=-1, out=list(pieces))
