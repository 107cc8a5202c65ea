"""Any number of ranks in one process: the package's own exchange of one bucket, all-reduces as plain sums."""

from unittest import mock

import torch

from commhooks.comm.counters import Stats
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.host_exchange import LowRankExchange
from commhooks.compressors.powersgd.matrix import Matrix
from commhooks.compressors.powersgd.workspace import LowRankOptions, LowRankScratch
from commhooks.engine.state import Memory
from commhooks.gradients.layout import BucketLayout, Slot


class _Group:
    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def size(self) -> int:
        return self._world_size


class _Sum:
    """An all-reduce that waits until every rank has brought its tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


class SimulatedRanks:
    """`world_size` ranks that compress one n x m matrix, each with a memory of its own.

    Attributes:
        memories: per rank, what the package remembers.
    """

    def __init__(self, world_size: int, n: int, m: int, rank: int, dtype: torch.dtype = torch.float32) -> None:
        self._group = _Group(world_size)
        self.memories = [Memory() for _ in range(world_size)]
        slot = Slot(torch.empty(n, m, dtype=dtype), 0, n * m)
        layout = BucketLayout((slot,), n * m, dtype, torch.device("cpu"), False)
        self._matrix = Matrix("w", (("w", slot),), n, m, rank)
        self._scratches = [LowRankScratch(layout, [self._matrix], dtype) for _ in range(world_size)]
        self._options = LowRankOptions(
            use_error_feedback=True,
            draw_q=lambda x, step, dtype: codec.draw(0, x.name, "Q", x.rank, x.m, dtype),
            draw_refill=lambda x, side, dtype: codec.draw(0, x.name, side, x.rank, x.n if side == "P" else x.m, dtype),
            warm_start=True,
        )

    @property
    def start_q(self) -> torch.Tensor:
        """The first Q, m x r."""
        return self._options.draw_q(self._matrix, 0, self._scratches[0].dtype).T

    def step(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """One n x m gradient per rank in, the gradient that each rank continues with out."""
        buffers = [gradient.flatten().clone() for gradient in gradients]
        sums: list[_Sum] = []

        def start_all_reduce(tensor: torch.Tensor, group: _Group, stats: Stats, what: str) -> _Sum:
            sums.append(_Sum(tensor))
            return sums[-1]

        def complete() -> None:
            total = torch.stack([each.tensor for each in sums]).sum(0)
            for each in sums:
                each.tensor.copy_(total)
            sums.clear()

        with mock.patch("commhooks.compressors.powersgd.host_exchange.start_all_reduce", start_all_reduce):
            exchanges = [
                LowRankExchange(buffer, scratch, memory, self._options, self._group, Stats(), 1.0)  # type: ignore[arg-type]
                for buffer, scratch, memory in zip(buffers, self._scratches, self.memories, strict=True)
            ]
            for exchange in exchanges:
                exchange.start()
            complete()
            for exchange in exchanges:
                exchange.advance()
            complete()
            for exchange in exchanges:
                exchange.commit(bool(exchange.finish()))
        return [buffer.view_as(gradient) for buffer, gradient in zip(buffers, gradients, strict=True)]
