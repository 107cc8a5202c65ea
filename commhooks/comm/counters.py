"""What a hook has done so far: counted as it happens, read by `CommHook.stats()`."""

from dataclasses import dataclass, field

from commhooks.comm.clocks import Clocks


@dataclass
class PassCounters:
    """Of the latest backward pass."""

    collectives: int = 0
    bytes_sent: int = 0


@dataclass
class Counters:
    """Counters of one session, this rank only. Bytes are those handed to collectives.

    `backward_passes` counts every synchronised backward pass; `nonfinite_steps` those of them that were not committed
    because a number was inf or NaN on some rank; `compressed_steps` those that were compressed and committed.
    """

    backward_passes: int = 0
    compressed_steps: int = 0
    nonfinite_steps: int = 0
    collectives: int = 0
    bytes_sent: int = 0
    bytes_uncompressed: int = 0
    """What plain DDP would have handed to all-reduce in the same passes."""
    handshakes: int = 0
    """Small exchanges in which ranks compare their state after a start or a load; not counted in the bytes."""
    numel_before: int = 0
    numel_after: int = 0
    """Gradient elements before and after compression in compressed passes only (torch's `compression_stats`)."""
    last_issued: str = ""
    """The latest collective: what, of which bucket, at which step. Where a run hangs, look here."""
    last_pass: PassCounters = field(default_factory=PassCounters)
    clocks: Clocks = field(default_factory=Clocks)

    def sent(self, numel: int, itemsize: int) -> None:
        """One collective of `numel` elements was issued."""
        self.collectives += 1
        self.bytes_sent += numel * itemsize
        self.last_pass.collectives += 1
        self.last_pass.bytes_sent += numel * itemsize

    def begin_pass(self) -> None:
        self.backward_passes += 1
        self.clocks.begin_pass()
        self.last_pass = PassCounters()
