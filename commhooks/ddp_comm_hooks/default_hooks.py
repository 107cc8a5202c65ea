"""Replace `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`.

Annotations must be real objects here (no `from __future__ import annotations`):
`register_comm_hook` checks them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import resolve_group
from commhooks.compressors import cast
from commhooks.ddp_comm_hooks.powerSGD_hook import with_wire_dtype
from commhooks.engine.immediate import reduce_immediately
from commhooks.gradients.ddp import BucketReader, checked_bucket
from commhooks.gradients.user_future import checked_future, checked_value
from commhooks.options import DROP_INS, DropIn

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
_ALLREDUCE = cast.AllReduceCompressor(cast.AllReduce())
_FP16 = cast.FP16Compressor(cast.FP16Compress())
_BF16 = cast.BF16Compressor(cast.BF16Compress())


def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over `process_group` in place, as DDP does without a hook.

    None is the default group. Replaces torch's `allreduce_hook`.
    """
    return reduce_immediately(_ALLREDUCE, BucketReader().read(bucket), resolve_group(process_group))


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over `process_group` in float16; the bucket keeps its dtype.

    None is the default group. Values beyond 65504 become inf. Replaces torch's
    `fp16_compress_hook`.
    """
    return reduce_immediately(_FP16, BucketReader().read(bucket), resolve_group(process_group))


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over `process_group` in bfloat16; the bucket keeps its dtype.

    None is the default group. Works on gloo and NCCL. Replaces torch's `bf16_compress_hook`.
    """
    return reduce_immediately(_BF16, BucketReader().read(bucket), resolve_group(process_group))


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Make `hook` communicate in float16; the result has the bucket's dtype.

    With `powerSGD_hook` and `batched_powerSGD_hook` only the messages are float16: arithmetic and
    residuals stay in float32, and error feedback compensates for the rounding. Any other hook gets
    a float16 bucket. Replaces torch's `fp16_compress_wrapper`.
    """
    return _wrap(hook, torch.float16, "fp16_compress_wrapper")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Make `hook` communicate in bfloat16; otherwise as `fp16_compress_wrapper`.

    Works on gloo and NCCL. Replaces torch's `bf16_compress_wrapper`.
    """
    return _wrap(hook, torch.bfloat16, "bf16_compress_wrapper")


def _wrap(hook: Hook, wire_dtype: torch.dtype, name: str) -> Hook:
    narrowed = with_wire_dtype(hook, wire_dtype)
    if narrowed is not None:
        return narrowed
    hook_name = str(getattr(hook, "__name__", type(hook).__name__))

    def wrapped(hook_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = checked_bucket(bucket).buffer()
        if buffer.is_sparse or buffer.dtype == wire_dtype:
            return checked_future(hook(hook_state, bucket), hook_name)
        bucket.set_buffer(buffer.to(wire_dtype))

        def decompress(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            return buffer.copy_(checked_value(future.value(), hook_name, buffer.numel()))

        return checked_future(hook(hook_state, bucket), hook_name).then(decompress)

    # torch 2.13 rejects functions *named* "bf16_compress_wrapper_hook" or "bf16_compress_hook" on
    # backends other than NCCL (`_check_comm_hook` compares __name__).
    wrapped.__name__ = f"{name}_around_{getattr(hook, '__name__', 'hook')}"
    wrapped.__qualname__ = wrapped.__name__
    return wrapped


bf16_compress_hook.__name__ = "bf16_compress"  # see the end of `_wrap`; pickle uses __qualname__

DROP_INS[allreduce_hook] = DropIn(cast.AllReduce.hook_name)
DROP_INS[fp16_compress_hook] = DropIn(cast.FP16Compress.hook_name)
DROP_INS[bf16_compress_hook] = DropIn(cast.BF16Compress.hook_name)
