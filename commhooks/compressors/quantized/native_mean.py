"""The mean of gradients over the ranks, quantised on the way, with the native kernel: the bits are those of `mean`."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm.collective import Send
from commhooks.compressors.native.tables import address
from commhooks.compressors.quantized import native_blocks
from commhooks.compressors.quantized.mean_buffers import Arrived, MeanBuffers, MeanContents
from commhooks.compressors.quantized.native_blocks import PieceTable


@dataclass(eq=False)
class NativeDelta:
    """Gradient plus residual of several parameters, which the kernel forms when it needs it.

    Attributes:
        bucket: 1-D, contiguous, of the compute dtype: the gradients, then what rounding lost of delta, then the
            averages.
        spans: per parameter, the offset in `bucket` and the number of elements.
        residuals: per parameter, the address of its residual, or 0; int64.
        factor: of the residuals.
    """

    bucket: torch.Tensor
    spans: Sequence[tuple[int, int]]
    residuals: torch.Tensor
    factor: float = 1.0


class NativeMean(MeanBuffers):
    """As `QuantisedMean`, on the CPU, for a `NativeDelta`.

    Args:
        spans: see `NativeDelta`.
    """

    def __init__(self, contents: MeanContents, world_size: int, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(contents, world_size, torch.device("cpu"))
        self.kernel = native_blocks.load(self.dtype)
        self._cuts = self._cut(contents.units, spans)
        self._all = _Pieces(self._cuts, self)
        self._of_rank: dict[int, tuple[_Pieces, _Pieces]] = {}

    def _cut(self, units: Sequence[tuple[str, int]], spans: Sequence[tuple[int, int]]) -> list["_Piece"]:
        """The blocks of a parameter that have one owner follow each other, in the parameter and in the share."""
        size, found, first = self.code.block_size, [], 0
        places = self.shares.places
        for unit, ((_, blocks), (start, numel)) in enumerate(zip(units, spans, strict=True)):
            owners = places[first : first + blocks] // self.shares.size
            begin = 0
            for owner, count in zip(*(x.tolist() for x in owners.unique_consecutive(return_counts=True)), strict=True):
                length = min(count * size, numel - begin * size)
                place = int(places[first + begin]) % self.shares.size
                found.append(_Piece(unit, start + begin * size, begin * size, length, owner, place))
                begin += count
            first += blocks
        return found

    def _divided(self, rank: int) -> tuple["_Pieces", "_Pieces"]:
        """The pieces that this rank averages, and those that others do; every call returns the same objects."""
        if rank not in self._of_rank:
            own = [each for each in self._cuts if each.owner == rank]
            others = [each for each in self._cuts if each.owner != rank]
            self._of_rank[rank] = _Pieces(own, self), _Pieces(others, self)
        return self._of_rank[rank]

    def over_ranks(self, delta: NativeDelta, rank: int, largest: float) -> Generator[Send, Any, "NativeAveraged"]:
        """Average over the ranks: `averaged = yield from mean.over_ranks(...)`. Leaves in `delta.bucket` what rounding
        lost on this rank. For the arguments see `QuantisedMean.over_ranks`."""
        most = self.code.largest_scale(largest, self.dtype)
        own, others = self._divided(rank)
        others.point_to_delta(delta)
        others.point_to_messages(self.sent)
        self.kernel.quantise(others.table, self.code, most, delta.factor)
        self.put_beside()
        messages = yield Send(self.sent, what="shares", op="all_to_all")
        arrived = self.format.parts(messages)
        own.point_to_delta(delta)
        own.point_to_share(self.mean, messages)
        self.kernel.average(own.table, self.code, most, delta.factor, self.world_size, rank, self.format.size)
        self.average_beside(arrived)
        messages = yield Send(self.mean, what="means", op="gather", last=True)
        return NativeAveraged(self, messages, self._all)


class NativeAveraged(Arrived):
    """What has arrived, as messages."""

    def __init__(self, mean: NativeMean, messages: torch.Tensor, pieces: "_Pieces") -> None:
        super().__init__(mean, messages)
        self._mean = mean
        self._messages = messages
        self._pieces = pieces

    def decode(self, delta: NativeDelta) -> None:
        """Move what is in the bucket to the residuals, where there are any, and write the averages into the bucket."""
        self._pieces.point_to_delta(delta)
        self._pieces.point_to_messages(self._messages)
        self._mean.kernel.dequantise(self._pieces.table, self._mean.code)


@dataclass(frozen=True)
class _Piece:
    """Consecutive blocks of one parameter, all averaged by one rank."""

    unit: int
    offset: int
    """In the bucket, in elements."""
    begin: int
    """In the parameter, in elements."""
    numel: int
    owner: int
    place: int
    """Of the first block, in its owner's share."""


class _Pieces:
    """Some pieces, and their table for the kernel."""

    def __init__(self, pieces: Sequence[_Piece], mean: MeanBuffers) -> None:
        size, code, layout = mean.dtype.itemsize, mean.code, mean.format
        self.table = PieceTable([[each.numel, code.block_size] for each in pieces], mean.dtype)
        self._end = max((each.offset + each.numel for each in pieces), default=0)
        self._message_bytes, self._all_bytes = layout.size, mean.world_size * layout.size
        self._unit = _column([each.unit for each in pieces])
        self._in_bucket = _column([size * each.offset for each in pieces])
        self._in_parameter = _column([size * each.begin for each in pieces])
        self._codes = _column([layout.codes_at + each.place * code.block_bytes for each in pieces])
        self._scales = _column([layout.scales_at + each.place * size for each in pieces])
        self._message = _column([each.owner * layout.size for each in pieces])

    def point_to_delta(self, delta: NativeDelta) -> None:
        residuals = delta.residuals.index_select(0, self._unit)
        self.table.column("residual").copy_(torch.where(residuals == 0, 0, residuals + self._in_parameter))
        self.table.point_from("bucket", address(delta.bucket, self.table.dtype, self._end), self._in_bucket)

    def point_to_messages(self, messages: torch.Tensor) -> None:
        """The codes and scales are those in the messages to or from the owners, one per rank."""
        start = address(messages, torch.uint8, self._all_bytes)
        self.table.point_from("codes", start, self._codes + self._message)
        self.table.point_from("scales", start, self._scales + self._message)

    def point_to_share(self, mean: torch.Tensor, arrived: torch.Tensor) -> None:
        """The codes and scales are those in the message `mean`; those that have arrived begin with the message of rank
        0."""
        start = address(mean, torch.uint8, self._message_bytes)
        start_arrived = address(arrived, torch.uint8, self._all_bytes)
        self.table.point_from("codes", start, self._codes)
        self.table.point_from("scales", start, self._scales)
        self.table.point_from("arrived_codes", start_arrived, self._codes)
        self.table.point_from("arrived_scales", start_arrived, self._scales)


def _column(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
