"""One bucket, uncompressed: the warm-up before `start_powerSGD_iter`, and buckets in which nothing is worth it."""

import torch
import torch.distributed as dist

from commhooks.comm.collective import Pending, new_future, start_all_reduce
from commhooks.comm.counters import Stats
from commhooks.comm.wire import all_finite, put_plain


class PlainExchange:
    """The mean of `buffer` over the ranks, in place; on a 16-bit wire through a buffer of that dtype."""

    def __init__(
        self,
        buffer: torch.Tensor,
        group: dist.ProcessGroup,
        wire_dtype: torch.dtype,
        stats: Stats,
        label: str = "a bucket",
    ) -> None:
        self.buffer = buffer
        self.future = new_future(buffer.device)
        self._group = group
        # Gradients of sparse embeddings keep their dtype: few rows travel, and gloo sums them as values by index.
        self._wire_dtype = buffer.dtype if buffer.is_sparse else wire_dtype
        self._stats = stats
        self._label = label
        self._pending: Pending | None = None

    def start(self) -> None:
        if self._wire_dtype == self.buffer.dtype:
            wire = self.buffer.div_(self._group.size())
        else:
            wire = torch.empty_like(self.buffer, dtype=self._wire_dtype)
            put_plain(self.buffer, wire, self._group.size())
        self._pending = start_all_reduce(wire, self._group, self._stats, self._label)

    def advance(self) -> None:
        """Nothing to do: there is one all-reduce only."""

    def finish(self) -> torch.Tensor:
        """Wait; returns whether what arrived is finite (0-dim bool)."""
        assert self._pending is not None
        reduced = self._pending.wait()
        if reduced is not self.buffer:
            self.buffer.copy_(reduced)
        return all_finite(reduced._values() if reduced.is_sparse else reduced)

    def commit(self, good: torch.Tensor | bool) -> None:
        """Nothing is remembered."""
