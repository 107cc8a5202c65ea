"""From the compute dtype to the dtype that travels, divided by the world size so that the sum is the mean.

A wire of fewer bits must not turn a large number into inf, nor an inf into a large number: what is finite stays finite
where error feedback makes up for the loss, and what is not becomes NaN, which no reduction hides.
"""

import math

import torch

WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CLAMPED_STEPS = 64
"""A gradient beyond this many times what the wire can hold is an overflow: error feedback, which sends so much per step
and no more, would be busy with it for the rest of the run."""


def wire_dtype_of(bucket_dtype: torch.dtype, wrapper_dtype: torch.dtype | None) -> torch.dtype:
    """The bucket's own dtype unless a wrapper lowers it; a 16-bit bucket is not converted to the other 16-bit type."""
    if wrapper_dtype is None or bucket_dtype.itemsize <= wrapper_dtype.itemsize:
        return bucket_dtype
    return wrapper_dtype


def largest_share(dtype: torch.dtype, world_size: int) -> float:
    """The largest number that `world_size` ranks can each send without the sum overflowing `dtype`."""
    info = torch.finfo(dtype)
    return info.max / world_size * (1 - min(0.5, world_size * info.eps))


def largest_gradient(wire_dtype: torch.dtype) -> float:
    """A gradient beyond this is an overflow; see `CLAMPED_STEPS`."""
    return CLAMPED_STEPS * torch.finfo(wire_dtype).max


def put_factor(factor: torch.Tensor, out: torch.Tensor, world_size: int) -> None:
    """Write `factor / world_size` to the wire: finite numbers clamped to what the sum can hold, others as NaN.

    Clamping P only tilts the basis that it spans.
    """
    limit = largest_share(out.dtype, world_size)
    # x * 0 is 0 for every finite x and NaN for inf and NaN.
    _put(_share(factor, out, world_size).clamp_(-limit, limit).add_(factor * 0), out)


def put_overflow(gradient: torch.Tensor, out: torch.Tensor) -> None:
    """Turn `out`, a number that is sent beside P, into NaN where the gradient is too large for clamping (see
    `CLAMPED_STEPS`): every rank learns of it, and the step is skipped."""
    limit = largest_gradient(out.dtype)
    if limit < torch.finfo(gradient.dtype).max:
        low, high = torch.aminmax(gradient)
        out.add_(torch.where(torch.maximum(-low, high) > limit, float("nan"), 0.0).to(out.dtype))


def put_projection(factor: torch.Tensor, out: torch.Tensor, world_size: int) -> None:
    """Write Q to the wire and change `factor` in place to exactly what was sent, times the world size.

    Rounding and clamping are fed back thereby: the residual is made from `factor` as it is then. An inf is an overflow
    of this product (an inf in the gradient shows in P) and is clamped too. The r rows (of `... x r x m`) are clamped to
    what each may be for an element of P Q^T, a sum of r products, to fit into a bucket of the wire's dtype.
    """
    limit = largest_share(out.dtype, world_size) / math.sqrt(factor.shape[-2])
    _put(_share(factor, out, world_size).clamp_(-limit, limit), out)
    factor.copy_(out)
    factor.mul_(world_size)


def put_only_factor(factor: torch.Tensor, out: torch.Tensor, world_size: int) -> None:
    """As `put_projection` where nothing else shows what is not finite: inf and NaN are sent as NaN."""
    bad = (factor * 0).sum()
    put_projection(factor, out, world_size)
    out.add_(bad.to(out.dtype))


def put_plain(gradient: torch.Tensor, out: torch.Tensor, world_size: int) -> None:
    """Write an uncompressed gradient to the wire. Nothing is clamped: no error feedback would make up for it, so an
    overflow arrives as inf, as in plain fp16 compression, and the step is skipped."""
    _put(_share(gradient, out, world_size), out)


def _share(numbers: torch.Tensor, out: torch.Tensor, world_size: int) -> torch.Tensor:
    """`numbers / world_size`, in `out` if that has the same dtype and in memory of its own otherwise."""
    return torch.div(numbers, world_size, out=out if out.dtype == numbers.dtype else None)


def _put(share: torch.Tensor, out: torch.Tensor) -> None:
    if share is not out:
        out.copy_(share)


def all_finite(reduced: torch.Tensor) -> torch.Tensor:
    """0-dim bool tensor on the same device. On CPU aminmax is nine times faster than isfinite().all() and 17 times
    faster than vector_norm(inf); where there is a NaN, both of its answers are NaN."""
    if reduced.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=reduced.device)
    low, high = torch.aminmax(reduced)
    return torch.isfinite(low) & torch.isfinite(high)
