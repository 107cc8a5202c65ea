"""What several buckets have to send as one message.

A message takes at least a round trip, and a bucket needs its second one only after the answer to its first. Over a link
with a long round trip this, and not the bandwidth, is what a step costs. A compressor that `coalesces` is therefore
sent in rounds: what the buckets send first as one message after the backward pass, then what follows from the answers.
On every rank a message holds the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from commhooks.comm.collective import Op, Pending, Reach, Send

LARGEST_BYTES = 2**20
"""Of what waits for others. More is sent at once: it gains little, and the network would be idle during the backward
pass."""


@dataclass(frozen=True)
class Sender:
    """
    Attributes:
        start: starts a collective of the buckets with these numbers.
        ranks: over how many ranks.
    """

    start: Callable[[Send, list[int]], Pending]
    ranks: Callable[[Reach], int]


class Coalescing:
    """What is held back in one backward pass."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._open: dict[object, Message] = {}

    def issue(self, send: Send, bucket: int) -> "Pending | Held":
        """Hold `send` back for a message with others of its kind, or start it if it is not to wait."""
        size = send.numel_here * send.tensor.element_size()
        if send.tensor.is_sparse or send.splits is not None or send.over == "node" or size > LARGEST_BYTES:
            return self._sender.start(send, [bucket])
        kind = (send.op, send.tensor.dtype, send.over)
        message = self._open.get(kind)
        if message is None or message.sent:
            message = self._open[kind] = Message(self._sender)
        return message.add(send, bucket)


class Message:
    """What is sent together, when the first part of it is waited for."""

    def __init__(self, sender: Sender) -> None:
        self.sent = False
        self._sender = sender
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
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in their order. As many bytes as an all-reduce, in one round trip between two ranks
        and in two between any other number of them: an all-reduce in a ring takes 2 (W - 1)."""
        world_size = self._sender.ranks(self._sends[0].over)
        if world_size == 2:
            one, other = self._collective(own, "gather")
            return one.add_(other)
        shares = pad(own, (0, -len(own) % world_size)).view(world_size, -1)
        total, *others = self._collective(shares, "all_to_all")
        for each in others:
            total.add_(each)
        return self._collective(total, "gather").flatten()[: len(own)]

    def _collective(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        what = ", ".join(dict.fromkeys(each.what for each in self._sends))
        send = Send(tensor, what=what, op=op, over=self._sends[0].over)
        return self._sender.start(send, self._buckets).wait()


class Held:
    """A part of a message, for the engine as a `Pending`. No collective writes into what it was made of."""

    def __init__(self, message: Message, place: int) -> None:
        self._message, self._place = message, place

    def wait(self) -> torch.Tensor:
        """See `Pending.wait`."""
        return self._message.answer(self._place)
