"""All-to-all and all-gather on gloo: one message from each rank to each other one, with the receives posted first.

gloo sends a message when the receiver has announced that it waits for it. In its own all-to-all and all-gather each
rank posts its send first, so that on a busy link its announcement queues behind its own message, and the other rank's
message waits as long as that takes to send. With the receives first both directions are busy all the time.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks.comm.groups import backend_of

TAG = 2**30
"""Of all messages: beyond the tags of users who send in the same group. Those of one pair arrive in order."""


class MessageWork:
    """The messages of one collective, in flight."""

    def __init__(self, works: list[dist.Work], in_flight: set["MessageWork"]) -> None:
        self._works = works
        self._in_flight = in_flight
        in_flight.add(self)

    def wait(self) -> None:
        """Wait until all messages of this rank have arrived, and those to others have been handed to the network."""
        for work in self._works:
            work.wait()
        self._in_flight.discard(self)


class PointToPoint:
    """Collectives of one session as messages.

    Attributes:
        in_flight: those that nobody has waited for yet.
    """

    def __init__(self) -> None:
        self.in_flight: set[MessageWork] = set()

    @staticmethod
    def serve(group: dist.ProcessGroup, device: torch.device) -> bool:
        """Whether tensors on `device` travel as messages in `group`."""
        return device.type == "cpu" and group.size() > 1 and backend_of(group, device) == "gloo"

    def exchange(
        self, sent: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> MessageWork:
        """Start to send `sent[i]` to rank i of `group`, and to receive `arriving[i]` from it: contiguous tensors, of
        which the empty ones do not travel. All ranks of `group` must call this, in the same order."""
        here, size = group.rank(), group.size()
        before = [(here - distance) % size for distance in range(1, size)]
        works = [
            dist.irecv(arriving[other], group=group, group_src=other, tag=TAG)
            for other in before
            if arriving[other].numel()
        ]
        works += [
            dist.isend(sent[other], group=group, group_dst=other, tag=TAG)
            for other in reversed(before)
            if sent[other].numel()
        ]
        arriving[here].copy_(sent[here])
        return MessageWork([work for work in works if work is not None], self.in_flight)

    def forget_abandoned(self) -> None:
        """Let go of messages for which nobody waits any more. Only when later ones have arrived on all ranks: until
        then gloo may read or write them."""
        self.in_flight.clear()
