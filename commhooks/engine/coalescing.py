"""What several buckets have to send as one message.

A message takes at least a round trip, and a bucket needs its second one only after the answer to its first. Over a link
with a long round trip this, and not the bandwidth, is what a step costs. There, small messages are sent in rounds: what
the buckets send first as one message after the backward pass, then what follows from the answers. On every rank a
message holds the same.

Where nobody has asked for it, this must not change a bit of any result, since it depends on a measured time. Sums over
more than two ranks would, because they are added up in another order; everything else arrives as it would alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from commhooks.comm.collective import Op, Pending, Reach, Send
from commhooks.comm.link import LONG_ROUND_TRIP_S, round_trip_s
from commhooks.compressors.base import Compressor
from commhooks.errors import logger_of

logger = logger_of(__name__)

LARGEST_BYTES = 2**20
"""Of a message that waits for others, at most. More is sent at once: it gains little, and the network would be idle
during the backward pass."""
BYTES_PER_S = 100e6 / 8
"""A message that takes longer than a round trip at 100 Mbit/s does not wait, unless the user has asked for it."""


@dataclass(frozen=True)
class Waiting:
    """Which messages wait for others.

    Attributes:
        largest_bytes: of one; the rest is sent at once.
        reordered: whether sums over more than two ranks may wait.
    """

    largest_bytes: int
    reordered: bool = False

    @classmethod
    def of(cls, compressor: Compressor[Any], ranks: int, round_trip_s: float) -> "Waiting | None":
        """Those of `compressor` among so many ranks; None if none waits."""
        if ranks == 1 or compressor.coalesces is False:
            return None
        if compressor.coalesces:
            return cls(LARGEST_BYTES, reordered=True)
        only_sums = not {"gather", "all_to_all"}.intersection(compressor.collectives)
        if round_trip_s < LONG_ROUND_TRIP_S or (only_sums and ranks > 2):
            return None
        return cls(int(min(LARGEST_BYTES, round_trip_s * BYTES_PER_S)))


class Patience:
    """Decides which messages of a session wait for others."""

    def __init__(self) -> None:
        self._round_trip_s: float | None = None

    def of(self, compressor: Compressor[Any], group: dist.ProcessGroup, device: torch.device) -> Waiting | None:
        """None: no message waits. All ranks of `group`, among which it compresses, must call this. It measures a round
        trip, once, if that matters."""
        if compressor.coalesces is None and self._round_trip_s is None:
            if Waiting.of(compressor, group.size(), math.inf) is None:
                return None
            self._round_trip_s = round_trip_s(group, device)
            if (which := Waiting.of(compressor, group.size(), self._round_trip_s)) is not None:
                logger.info(
                    "%s: a round trip takes %.0f ms; messages of up to %.0f kB go out together with those of other "
                    "buckets.",
                    compressor.display_name,
                    1e3 * self._round_trip_s,
                    which.largest_bytes / 1e3,
                )
        return Waiting.of(compressor, group.size(), self._round_trip_s or 0.0)


class Coalescing:
    """What is held back in one backward pass.

    Args:
        start: starts a collective of the buckets with these numbers.
        ranks: over how many ranks.
    """

    def __init__(
        self, which: Waiting, start: Callable[[Sequence[int], Send], Pending], ranks: Callable[[Reach], int]
    ) -> None:
        self.start = start
        self.ranks = ranks
        self._which = which
        self._open: dict[object, Message] = {}

    def issue(self, bucket: int, send: Send) -> "Pending | Held":
        """Hold `send` back for a message with others of its kind, or start it if it is not to wait."""
        if not self._waits(send):
            return self.start([bucket], send)
        kind = (send.op, send.tensor.dtype, send.over)
        message = self._open.get(kind)
        if message is None or message.sent:
            message = self._open[kind] = Message(self)
        return message.add(send, bucket)

    def _waits(self, send: Send) -> bool:
        if send.tensor.is_sparse or send.splits is not None or send.over == "node":
            return False
        if send.op == "sum" and not self._which.reordered and self.ranks(send.over) > 2:
            return False
        return send.numel_here * send.tensor.element_size() <= self._which.largest_bytes


class Message:
    """What is sent together, when the first part of it is waited for."""

    def __init__(self, coalescing: Coalescing) -> None:
        self.sent = False
        self._coalescing = coalescing
        self._sends: list[Send] = []
        self._buckets: list[int] = []
        self._answers: list[torch.Tensor] = []

    def add(self, send: Send, bucket: int) -> "Held":
        self._sends.append(send)
        self._buckets.append(bucket)
        return Held(self, len(self._sends) - 1)

    def answer(self, place: int) -> torch.Tensor:
        """Send all of it, once, and wait. Returns the result for one part; see `Send`."""
        if not self.sent:
            self.sent = True
            self._answers = self._exchanged()
        return self._answers[place]

    def _exchanged(self) -> list[torch.Tensor]:
        op, tensors = self._sends[0].op, [each.tensor for each in self._sends]
        to_each = op == "all_to_all"  # row i goes to rank i
        rows = torch.cat([each.reshape(len(each) if to_each else 1, -1) for each in tensors], 1)
        if op == "sum":
            answer = self._sum(rows[0])
        else:
            answer = self._collective(rows if to_each else rows[0], op)
        parts = answer.view(-1, rows.shape[1]).split([each.numel() // len(rows) for each in tensors], 1)
        if op in ("sum", "max"):
            return [each.copy_(part.view_as(each)) for each, part in zip(tensors, parts, strict=True)]
        shapes = [each.shape if to_each else (-1, *each.shape) for each in tensors]
        return [part.contiguous().view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in their order. As many bytes as an all-reduce, in one round trip between two ranks
        and in two between any other number of them: an all-reduce in a ring takes 2 (W - 1)."""
        world_size = self._coalescing.ranks(self._sends[0].over)
        if world_size == 2:
            one, other = self._collective(own, "gather")
            return one.add_(other)
        shares = pad(own, (0, -len(own) % world_size)).view(world_size, -1)
        total, *others = self._collective(shares, "all_to_all")
        for each in others:
            total.add_(each)
        return self._collective(total, "gather").flatten()[: len(own)]

    def _collective(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        what = ", ".join(dict.fromkeys(each.what for each in self._sends if each.what))
        send = Send(tensor, what=what, op=op, over=self._sends[0].over)
        return self._coalescing.start(self._buckets, send).wait()


class Held:
    """A part of a message, for the engine as a `Pending`. Nothing is under way for it until someone waits, and no
    collective writes into what it was made of."""

    def __init__(self, message: Message, place: int) -> None:
        self._message, self._place = message, place

    def wait(self) -> torch.Tensor:
        """See `Pending.wait`."""
        return self._message.answer(self._place)
