"""Define `quantized_all_reduce`, the quantised mean of one tensor over the ranks, without a hook."""

import functools
from collections.abc import Generator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from commhooks.comm.collectives import Send, resolve_group, start
from commhooks.compressors.base import StepInfo
from commhooks.compressors.native import library
from commhooks.compressors.quantized.compressor import QuantizedWorkspace, native_build
from commhooks.compressors.quantized.mean import Averaged, BlockCode, mean_over_ranks
from commhooks.compressors.quantized.options import Int4Compress, Int8Compress
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.errors import HookConfigError, logger_of
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, Slot
from commhooks.gradients.precision import compute_dtype, dtype_name

logger = logger_of(__name__)

_NAME = "quantized_all_reduce"
_CODES = {hook.bits: BlockCode(hook.bits, hook.block_size) for hook in (Int8Compress, Int4Compress)}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def quantized_all_reduce(
    tensor: torch.Tensor,
    bits: int = 8,
    group: dist.ProcessGroup | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """Replace `tensor` by its mean over the ranks, sent as 8-bit or 4-bit integers with a scale per block.

    All ranks of the group must call this with tensors of equal shape and dtype, with equal `bits`, and either all with
    `residual` or all without. All ranks get the same bits. Messages and arithmetic are the same as in the hooks
    `int8_compress` and `int4_compress`.

    The elements, in logical order, form blocks of 256 (8 bits) or 128 (4 bits). Apart from rounding in the tensor's
    dtype, an element of the result differs from the exact mean by at most A / 127 (8 bits) or A / 7 (4 bits), where A
    is the mean over the ranks of the largest absolute value in its block, residual included. With `residual`, errors do
    not accumulate: over many calls, the sum of the results plus the mean residual equals the sum of the exact means.

    If a number is inf or NaN on any rank, its block becomes NaN on all ranks, and no residual changes.

    Args:
        tensor: float16, bfloat16, float32 or float64, of any shape and strides, on a device of the group's backend.
            Changed in place, without autograd.
        bits: 8 or 4.
        group: the process group; None: the default group.
        residual: the rounding errors of this rank's earlier calls, zeros at first. Has the shape of `tensor`, in
            float32 (float64 for float64). Added to `tensor`, and changed in place. None: no error feedback.

    Raises:
        HookConfigError: an argument has the wrong type or is out of range.
        HookRunError: another rank failed, or did not call this within the process group's timeout.
    """
    code = _CODES.get(bits) if isinstance(bits, int) else None
    if code is None:
        raise HookConfigError(f"{_NAME}(bits={bits!r}): expected 8 or 4")
    _check("tensor", tensor, _DTYPES)
    if residual is not None:
        _check("residual", residual, (compute_dtype(tensor.dtype),))
        if residual.shape != tensor.shape or residual.device != tensor.device:
            raise HookConfigError(
                f"{_NAME}: residual has shape {tuple(residual.shape)} on {residual.device}; expected that of tensor, "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    if not isinstance(group, dist.ProcessGroup | None):
        raise HookConfigError(f"{_NAME}(group={group!r}): expected a process group of which this rank is a member")
    ranks = resolve_group(group)
    if tensor.numel() == 0:
        return
    with precision.full_precision():
        flat = tensor.contiguous().view(-1)
        residuals = {} if residual is None else {_NAME: residual.contiguous().view(-1)}
        step = StepInfo(0, ranks.size(), rank=ranks.rank())
        kernel = _workspace(flat, code, error_feedback=residual is not None).kernel(step)
        kernel.load(flat, residuals, 1.0)
        kernel.messages.flags.fill_(1)  # a tensor of zeros is not a missing gradient
        averaged = _driven(mean_over_ranks(kernel), ranks)
        good = bool(averaged.finite) if precision.is_host_readable(flat.device) else averaged.finite
        kernel.store(averaged, flat, residuals, 1.0, good)
        _write_back(flat, tensor)
        if residual is not None:
            _write_back(residuals[_NAME], residual)


def _check(name: str, given: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(given, torch.Tensor):
        raise HookConfigError(f"{_NAME}: {name} is a {type(given).__name__}; expected a tensor")
    if isinstance(given, DTensor):
        raise HookConfigError(
            f"{_NAME}: {name} is a DTensor; pass {name}.to_local(), and as group the ranks that hold the same part"
        )
    if given.layout != torch.strided or given.dtype not in dtypes:
        expected = ", ".join(map(dtype_name, dtypes))
        found = f"{given.dtype}, {given.layout}".replace("torch.", "")
        raise HookConfigError(f"{_NAME}: {name} is {found}; expected a dense tensor in {expected}")
    if any(stride == 0 and size > 1 for stride, size in zip(given.stride(), given.shape, strict=True)):
        raise HookConfigError(f"{_NAME}: {name} is expanded, and cannot be changed in place; pass a clone")


def _workspace(flat: torch.Tensor, code: BlockCode, *, error_feedback: bool) -> QuantizedWorkspace:
    layout = BucketLayout((Slot(_NAME, flat, 0, len(flat)),), len(flat), flat.dtype, flat.device)
    plan = UnitPlan(_NAME, tuple(flat.shape), len(flat), flat.dtype, compressed=True)
    natively = not library.is_switched_off() and _has_kernel(flat.device, flat.dtype, code)
    return QuantizedWorkspace(layout, [plan], code, flat.dtype, error_feedback=error_feedback, natively=natively)


@functools.cache
def _has_kernel(device: torch.device, dtype: torch.dtype, code: BlockCode) -> bool:
    try:
        return bool(native_build(device, dtype, code))
    except HookConfigError as error:
        if device.type != "cpu":
            logger.warning("%s computes with the kernel 'torch'. %s", _NAME, error)
        return False


def _driven(exchange: Generator[Send, Any, Averaged], group: dist.ProcessGroup) -> Averaged:
    answer = None
    while True:
        try:
            send = exchange.send(answer)
        except StopIteration as end:
            return cast("Averaged", end.value)
        answer = start(send, group, None, _NAME).wait()


def _write_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
