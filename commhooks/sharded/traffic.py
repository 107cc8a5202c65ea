"""Count what FSDP2's collectives send, from one synchronised backward pass to the next."""

import torch

from commhooks.comm.collectives import PointToPoint
from commhooks.comm.counters import Counters, PassCounters


class Traffic:
    """Counts the collectives of a sharded model. A step ends with a synchronised backward pass;
    gathers of evaluations in between belong to the next step.

    Attributes:
        counters: bytes as everywhere in commhooks: a collective counts as the all-reduce that puts
            as many bytes on the network, which is half of its whole tensor.
        messages: for collectives on gloo.
        gathers, scatters: collectives of whole units, compressed or not.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self.messages = PointToPoint()
        self.gathers = self.scatters = 0
        self._ended = False

    def begin_gather(self, whole: torch.Tensor) -> None:
        self.gathers += 1
        self._begin(whole)

    def begin_scatter(self, whole: torch.Tensor) -> None:
        self.scatters += 1
        self._begin(whole)

    def _begin(self, whole: torch.Tensor) -> None:
        """`whole`: the tensor with the rows of all ranks, as FSDP2 would send it."""
        if self._ended:
            self._ended = False
            self.counters.last_pass = PassCounters()
            self.counters.clocks.begin_pass()
        self.counters.bytes_uncompressed += -(-whole.nbytes // 2)

    def sent_whole(self, whole: torch.Tensor, *, inside: bool = False) -> None:
        """Count a collective of FSDP2's own. `inside`: among the ranks of a node only."""
        if inside:
            self.counters.bytes_inside_nodes += -(-whole.nbytes // 2)
        else:
            self.counters.sent(-(-whole.nbytes // 2))

    def end_step(self) -> None:
        self.counters.backward_passes += 1
        self._ended = True
        # of gathers ahead in a pass that ended in an exception
        self.messages.forget_abandoned()
