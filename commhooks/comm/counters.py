"""Counters of a hook's work, read by `CommHook.stats()`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from commhooks.comm.clocks import Clocks

CONTINUED = ("backward_passes", "compressed_steps", "nonfinite_steps", "bytes_sent", "bytes_uncompressed")
"""The counters that a checkpoint holds."""


@dataclass
class PassCounters:
    """Counters of the latest backward pass."""

    collectives: int = 0
    bytes_sent: int = 0


@dataclass
class Counters:
    """Counters of one session on this rank.

    Bytes are those of the tensors passed to all-reduce. Other collectives are counted as an all-reduce that puts as
    many bytes on the network: an all-gather or an all-to-all as half of the tensor that holds the parts of all ranks.
    A rank then sends 2 (W - 1) / W times the counted bytes, for W ranks, whatever the collective.

    `backward_passes` counts every synchronised backward pass; `nonfinite_steps` those that were not committed because a
    number was inf or NaN on some rank; `compressed_steps` those that were compressed and committed.
    """

    backward_passes: int = 0
    compressed_steps: int = 0
    nonfinite_steps: int = 0
    collectives: int = 0
    bytes_sent: int = 0
    bytes_inside_nodes: int = 0
    """Bytes of collectives inside this rank's node, where a hook compresses between nodes only; not in `bytes_sent`."""
    bytes_uncompressed: int = 0
    """Bytes that DDP without a hook would have passed to all-reduce in the same passes."""
    handshakes: int = 0
    """Number of small collectives in which the ranks compare their state after a start or a load; not counted in the
    bytes."""
    numel_before: int = 0
    numel_after: int = 0
    """Gradient elements before and after compression, in compressed passes only."""
    last_issued: str = ""
    """Description, bucket and step of the latest collective, to find out where a run hangs."""
    last_pass: PassCounters = field(default_factory=PassCounters)
    before: dict[str, int] = field(default_factory=dict)
    """What the runs before this one have counted; see `cumulative`."""
    clocks: Clocks = field(default_factory=Clocks)

    def cumulative(self) -> dict[str, int]:
        """The counters that go on in a run that resumes, with the counts of the runs before it."""
        return {name: self.before.get(name, 0) + getattr(self, name) for name in CONTINUED}

    def resume_from(self, saved: Mapping[str, int]) -> None:
        """Let `cumulative()` be `saved` now."""
        self.before = {name: saved[name] - getattr(self, name) for name in CONTINUED}

    def compression_stats(self) -> tuple[float, int, int]:
        """(compression rate, elements before, elements after) over all compressed backward passes so far, as in
        torch's `PowerSGDState.compression_stats`."""
        before, after = self.numel_before, self.numel_after
        return before / after if after else 0, before, after

    def sent(self, size: int) -> None:
        """Count one collective of `size` bytes."""
        self.collectives += 1
        self.bytes_sent += size
        self.last_pass.collectives += 1
        self.last_pass.bytes_sent += size

    def gradients(self, size: int) -> None:
        """Count gradients of `size` bytes, of one bucket."""
        self.bytes_uncompressed += size

    def begin_pass(self) -> None:
        self.backward_passes += 1
        self.clocks.begin_pass()
        self.last_pass = PassCounters()
