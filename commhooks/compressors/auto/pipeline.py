"""How long a step takes, from the times of its parts: the engine's pipeline (`engine/backward_pass.py`) on paper.

The host computes gradients and runs the codec, the network carries one message after another. A bucket's first message
is sent when it is ready; each earlier bucket with a round left then waits for its answer and sends its next one. After
the last bucket the rest is sent and awaited. Pure arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketTimes:
    """Seconds.

    Attributes:
        computing_s: outside of the hook, before the bucket is ready.
        codec_s: in the hook, before each message and after the last answer.
        wire_s: of each message, alone on the network.
    """

    computing_s: float
    codec_s: tuple[float, ...]
    wire_s: tuple[float, ...]

    @classmethod
    def even(cls, computing_s: float, codec_s: float, wire_s: Sequence[float]) -> "BucketTimes":
        """The codec's time divided equally."""
        parts = len(wire_s) + 1
        return cls(computing_s, (codec_s / parts,) * parts, tuple(wire_s))


class _Running:
    def __init__(self, times: BucketTimes) -> None:
        self.times = times
        self.sent = 0
        self.arrives_s = 0.0

    @property
    def has_round_left(self) -> bool:
        return self.sent < len(self.times.wire_s)


class _Clock:
    """When the host and the network are free, in seconds since the begin."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self._network_s = 0.0

    def send_next(self, bucket: _Running) -> None:
        """Wait for the bucket's answer, compute, and send its next message."""
        self.host_s = max(self.host_s, bucket.arrives_s) + bucket.times.codec_s[bucket.sent]
        self._network_s = max(self._network_s, self.host_s) + bucket.times.wire_s[bucket.sent]
        bucket.arrives_s = self._network_s
        bucket.sent += 1

    def finish(self, bucket: _Running) -> None:
        """Wait for the last answer and compute."""
        self.host_s = max(self.host_s, bucket.arrives_s) + bucket.times.codec_s[-1]


def step_s(buckets: Sequence[BucketTimes]) -> float:
    """Seconds of one step with these buckets, in their order."""
    clock = _Clock()
    running: list[_Running] = []
    for times in buckets:
        clock.host_s += times.computing_s
        bucket = _Running(times)
        clock.send_next(bucket)
        for earlier in running:
            if earlier.has_round_left:
                clock.send_next(earlier)
        running.append(bucket)
    while any(each.has_round_left for each in running):
        for each in running:
            if each.has_round_left:
                clock.send_next(each)
    for each in running:
        clock.finish(each)
    return clock.host_s
