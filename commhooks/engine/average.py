"""Average one bucket uncompressed: before compression begins, and if no unit of the bucket is compressed."""

from typing import Any

import torch

from commhooks.comm.wire import all_finite
from commhooks.compressors.base import Compressor, Exchange, Send, State, StepInfo, Verdict
from commhooks.engine.task import ExchangeTask
from commhooks.gradients.torch_private import sparse_values


def average(flat: torch.Tensor, wire_dtype: torch.dtype, world_size: int, *, judged: bool = True) -> Exchange:
    """Replace `flat` by its mean over the ranks; for a narrower `wire_dtype` through a buffer of that dtype.

    Args:
        judged: False: do not read the result; the verdict is that it is finite.
    """
    # Gradients of sparse embeddings keep their dtype: they send few rows, and gloo sums their values by index.
    wire = flat.div_(world_size)  # before it is narrowed, so that fewer numbers overflow
    if not flat.is_sparse:
        wire = wire.to(wire_dtype)
    reduced: torch.Tensor = yield Send(wire, last=True)
    if reduced is not flat:
        flat.copy_(reduced)
    if judged:
        yield Verdict(all_finite(sparse_values(reduced) if reduced.is_sparse else reduced))
    else:
        yield Verdict(torch.ones((), dtype=torch.bool, device=flat.device))
    return None


def new_task(
    compressor: Compressor[Any], compresses: bool, flat: torch.Tensor, work: Any, state: State, step: StepInfo
) -> ExchangeTask:
    """The exchange of one bucket, or its average if nothing in it is compressed: the compressor has no workspace then.
    For the arguments see `Compressor.exchange`."""
    if compresses:
        exchange = compressor.exchange(flat, work, state, step)
    else:
        exchange = average(flat, compressor.wire_dtype_for(flat.dtype), step.world_size)
    return ExchangeTask(exchange, flat, compressor.name, judged=compressor.transactional)
