"""What a hook has done so far: counted as it happens, read by `CommHook.stats()`."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters of one registration, this rank only. Bytes are those handed to all-reduce.

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
    """Small exchanges with which ranks compare their state after a start or a load; not counted in the bytes."""
    numel_before: int = 0
    numel_after: int = 0
    """Gradient elements before and after compression in compressed passes only (torch's `compression_stats`)."""
    last_issued: str = ""
    """The all-reduce that was issued last: what, of which bucket, at which step. Where a run hangs, look here."""
    codec_s: float = 0.0
    """Seconds of the host inside the hook, waiting left out. Means nothing on an accelerator, which works later."""
    waiting_s_before: float = 0.0
    """As `waiting_s`, without the latest pass."""
    last_pass: "PassStats" = field(default_factory=lambda: PassStats())

    def sent(self, numel: int, itemsize: int) -> None:
        """One all-reduce of `numel` elements was issued."""
        self.collectives += 1
        self.bytes_sent += numel * itemsize
        self.last_pass.collectives += 1
        self.last_pass.bytes_sent += numel * itemsize

    def begin_pass(self) -> None:
        self.backward_passes += 1
        self.waiting_s_before += self.last_pass.waiting_s
        self.last_pass = PassStats()

    @property
    def waiting_s(self) -> float:
        """Seconds that the host waited for the network."""
        return self.waiting_s_before + self.last_pass.waiting_s

    @contextlib.contextmanager
    def codec_clock(self) -> Iterator[None]:
        """The time of the body counts as the codec's, less what it spends in `waiting_clock`."""
        began, waited = time.perf_counter(), self.last_pass.blocked_s
        yield
        spent = time.perf_counter() - began - (self.last_pass.blocked_s - waited)
        self.codec_s += spent
        self.last_pass.codec_s += spent

    @contextlib.contextmanager
    def waiting_clock(self) -> Iterator[None]:
        """The time of the body is spent waiting for the network."""
        began = time.perf_counter()
        yield
        self.last_pass.blocked_s += time.perf_counter() - began


@dataclass
class PassStats:
    """The latest backward pass."""

    collectives: int = 0
    bytes_sent: int = 0
    codec_s: float = 0.0
    blocked_s: float = 0.0
    """Spent in waits of the hook's own."""
    called_at: float = 0.0
    answered_at: float = 0.0
    """Of a hook that leaves the waiting to DDP: when its last call returned, and when the last answer was there
    (`time.perf_counter`)."""

    @property
    def waiting_s(self) -> float:
        return self.blocked_s + max(0.0, self.answered_at - self.called_at)
