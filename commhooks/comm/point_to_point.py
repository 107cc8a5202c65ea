"""All-to-all and all-gather on gloo: one message from each rank to each other one, with the receives posted first.

gloo sends a message when the receiver has announced that it waits for it. In its own all-to-all and all-gather each
rank posts its send first, so that on a busy link its announcement queues behind its own message, and the other rank's
message waits as long as that takes to send. With the receives first both directions are busy all the time.
"""

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks.comm.groups import backend_of

TAG = 2**30
"""Of all messages: beyond the tags of users who send in the same group. Those of one pair arrive in order."""


class MessageWork:
    """The messages of one collective, in flight.

    Args:
        in_flight: holds this until `wait` has returned.
    """

    def __init__(self, in_flight: set["MessageWork"]) -> None:
        self.works: list[dist.Work] = []
        self._in_flight = in_flight
        in_flight.add(self)

    def post(self, work: dist.Work | None) -> None:
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait until all messages of this rank have arrived, and those to others have been handed to the network."""
        for work in self.works:
            work.wait()
        self._in_flight.discard(self)


class PointToPoint:
    """Collectives of one session as messages.

    torch's work holds the memory of a message. Without it gloo neither reads nor writes that memory, but the connection
    stays in the middle of the message, and all that follows on it waits for ever. So the messages of a group are held
    until somebody has waited for them, also if the pass, the session or the exchange of which they are a part has
    failed; `forget_abandoned` and the end of the group let them go.
    """

    _IN_FLIGHT: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[MessageWork]]" = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

    @classmethod
    def in_flight(cls, group: dist.ProcessGroup) -> set[MessageWork]:
        """What nobody has waited for yet in `group`, of all sessions."""
        return cls._IN_FLIGHT.setdefault(group, set())

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
        self._groups.add(group)
        before = [(here - distance) % size for distance in range(1, size)]
        messages = MessageWork(self.in_flight(group))
        for other in before:
            if arriving[other].numel():
                messages.post(dist.irecv(arriving[other], group=group, group_src=other, tag=TAG))
        for other in reversed(before):
            if sent[other].numel():
                messages.post(dist.isend(sent[other], group=group, group_dst=other, tag=TAG))
        arriving[here].copy_(sent[here])
        return messages

    def forget_abandoned(self) -> None:
        """Let go of messages for which nobody waits any more, in the groups of this session. Only when later ones have
        arrived on all ranks: those of one pair arrive in order."""
        for group in self._groups:
            self.in_flight(group).clear()
