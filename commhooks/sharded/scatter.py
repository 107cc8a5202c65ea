"""FSDP2's reduce-scatter of a unit's gradients, compressed.

    rows           row i of a rank is its gradient of the shard of rank i
    messages       the codes of all rows but its own
    own row        + the rows that the other ranks have sent to it, in rank order, in float32

The own row is never rounded. Nothing is fed back: an error of 8 bits is far below the noise of the
gradient, and without a residual a run resumes bit by bit without saving anything.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import REDUCE_SCATTER
from commhooks.comm.packing import all_finite
from commhooks.errors import HookRunError, logger_of
from commhooks.gradients import precision
from commhooks.gradients.profiling import span
from commhooks.sharded.codec import Codec
from commhooks.sharded.memory import Memory
from commhooks.sharded.parts import Weigh
from commhooks.sharded.passes import Passes
from commhooks.sharded.routes import Route
from commhooks.sharded.traffic import Traffic

logger = logger_of(__name__)


class ScatterGradients:
    """Takes the place of `ReduceScatter` in torch.distributed.fsdp: `set_custom_reduce_scatter`.

    Args:
        unit: name of the unit, for messages.
        codec: None: reduce the gradients as FSDP2 does.
        memory: for the messages to all ranks, and from all ranks.
        logs: whether this rank logs.
    """

    def __init__(
        self,
        unit: str,
        codec: Codec | None,
        route: Route,
        memory: Memory,
        passes: Passes,
        traffic: Traffic,
        *,
        logs: bool,
    ) -> None:
        self._unit = unit
        self._codec = codec
        self._route = route
        self._memory = memory
        self._passes = passes
        self._traffic = traffic
        self._warns = logs
        if codec is not None:
            starts = [piece.start for piece in codec.layout.pieces if piece.numel]
            self._starts = torch.tensor(starts, device=memory.device)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self._passes.reduces()  # here, because a single rank calls nothing else (torch 2.13)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Write the reduced row of this rank into `output_tensor`. The current stream waits, also
        with `async_op`, which FSDP2 does not use. `input_tensor` is overwritten.
        """
        self._traffic.begin_scatter(input_tensor)
        if self._codec is None or not self._fits(self._codec, output_tensor):
            self._traffic.sent_whole(input_tensor)
            return getattr(dist, REDUCE_SCATTER)(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        rows = input_tensor.view(group.size(), -1)
        clocks = self._traffic.counters.clocks
        with span("scatter", self._unit), clocks.measure(rows.device):
            self._spread_nonfinite(rows)
            self._reduce(self._codec, rows, output_tensor, group, weighing(op, group.size()))
        return None

    def _reduce(
        self,
        codec: Codec,
        rows: torch.Tensor,
        output: torch.Tensor,
        group: dist.ProcessGroup,
        weigh: Weigh,
    ) -> None:
        route = self._route
        size = codec.message_bytes
        rows = route.reduce_inside(rows, group)
        buffer = self._memory.take()
        used = buffer[: 2 * route.peers * size].view(2, route.peers, size)
        sent, arriving = used.unbind(0)
        for others in (slice(0, route.here), slice(route.here + 1, None)):
            codec.encode(rows[others], sent[others])
        route.exchange(sent, arriving, group, f"gradients of {self._unit}").wait()
        output.copy_(rows[route.here])
        codec.add(output, arriving, route.here, weigh)
        self._memory.give_back(buffer)

    def _spread_nonfinite(self, rows: torch.Tensor) -> None:
        """If a number is not finite, make one of every parameter in every row NaN: then no rank
        takes the step, whatever it looks at.
        """
        finite = all_finite(rows)
        if precision.is_host_readable(rows.device) and bool(finite):
            return
        first = rows.index_select(1, self._starts)
        rows.index_copy_(1, self._starts, torch.where(finite, first, float("nan")))

    def _fits(self, codec: Codec, output: torch.Tensor) -> bool:
        layout = codec.layout
        if output.numel() == layout.numel and output.dtype == layout.dtype:
            return True
        if self._warns:
            self._warns = False
            logger.warning(
                "unit %s: fully_shard reduces %d elements of %s per rank where %d of %s were"
                " expected, so they are sent uncompressed, now and whenever this happens. If some"
                " parameters get no gradient, call model.set_reduce_scatter_unused_params(True);"
                " if some were frozen when the hook was attached, attach it again.",
                self._unit,
                output.numel(),
                output.dtype,
                layout.numel,
                layout.dtype,
            )
        return False


def weighing(op: Any, ranks: int) -> Weigh:
    """Return what a reduction does to every summand: AVG divides by the number of ranks,
    PREMUL_SUM multiplies. Raises HookRunError for an `op` that is no sum.
    """
    if op == dist.ReduceOp.SUM:
        return Weigh()
    if op == dist.ReduceOp.AVG:
        return Weigh(divisor=ranks)
    if op == dist.ReduceOp.PREMUL_SUM:
        # set_gradient_divide_factor. Pickling is the public way to the factor (torch 2.13).
        return Weigh(factor=op.__getstate__()[1])
    raise HookRunError(f"fully_shard reduces by {op}; expected SUM, AVG or PREMUL_SUM")
