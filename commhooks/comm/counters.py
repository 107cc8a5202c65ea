"""Count and time a hook's work for `CommHook.stats()`.

On the CPU the host measures times. On CUDA, events measure them without synchronising: an event is
read once it has completed, or by `collect(wait=True)`.
"""

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from commhooks.gradients import precision

Mark = Any
"""A point in time: `time.perf_counter()` on the CPU, an event on CUDA, None on other devices."""


@dataclass
class Times:
    codec_s: float = 0.0
    """Time inside the hook without waiting."""
    waiting_s: float = 0.0
    """Time spent waiting for collectives, including the delay of other ranks."""
    left_to_ddp_s: float = 0.0
    """The part of `waiting_s` that DDP waits for the futures of hooks that return at once.

    It lasts from the last hook call to the completion of the last future.
    """


class Clocks:
    """Measures the times of one session: `total` since its start, and `last_pass`."""

    def __init__(self) -> None:
        self.total = Times()
        self.last_pass = Times()
        self._called: Mark = None
        self._open: deque[tuple[Mark, Mark, Callable[[float], None]]] = deque()
        self._collecting = threading.RLock()

    def begin_pass(self) -> None:
        if self._open:
            self.collect(wait=False)
        self.last_pass = Times()

    @contextlib.contextmanager
    def measure(self, device: torch.device, *, waiting: bool = False) -> Iterator[None]:
        """Count the time of the body as codec time.

        With `waiting`, in a nested body, count it as waiting time instead.
        """
        begin = mark(device)
        try:
            yield
        finally:
            count = functools.partial(self._count, self.last_pass, waiting=waiting)
            self._between(begin, mark(device), count)

    def left_to_ddp(self, device: torch.device) -> Callable[[], None]:
        """Record that a hook has returned a future for which DDP waits.

        Call the result when the future completes.
        """
        this_pass = self.last_pass

        def count(seconds: float) -> None:  # replaces the value of the previous future
            longer = seconds - this_pass.left_to_ddp_s
            this_pass.left_to_ddp_s = seconds
            for times in (self.total, this_pass):
                times.waiting_s += longer

        self._called = mark(device)
        return lambda: self._between(self._called, mark(device), count)

    def collect(self, *, wait: bool) -> None:
        """Count the intervals whose events have completed.

        With `wait`, synchronise and count all.
        """
        # Without `wait` this must not block: another thread may hold the lock while it waits for
        # the device.
        if not self._collecting.acquire(blocking=wait):
            return
        try:
            while self._open:
                head = begin, end, count = self._open[0]
                if wait:
                    begin.synchronize()  # the two events may be on different streams
                    end.synchronize()
                elif not (begin.query() and end.query()):
                    return
                if not self._open or self._open[0] is not head:
                    continue  # a signal handler called `collect` while this thread waited
                self._open.popleft()
                count(max(0.0, begin.elapsed_time(end) / 1000))
        finally:
            self._collecting.release()

    def _count(self, this_pass: Times, seconds: float, *, waiting: bool) -> None:
        for times in (self.total, this_pass):
            times.codec_s += -seconds if waiting else seconds
            times.waiting_s += seconds if waiting else 0.0

    def _between(self, begin: Mark, end: Mark, count: Callable[[float], None]) -> None:
        if isinstance(end, float):
            count(end - begin)
        elif end is not None:
            self._open.append((begin, end, count))


def has_clock(device: torch.device) -> bool:
    return precision.is_host_readable(device) or precision.has_streams(device)


def mark(device: torch.device) -> Mark:
    if precision.is_host_readable(device):
        return time.perf_counter()
    return event_on(device) if has_clock(device) else None


def seconds_between(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks; NaN on a device without a clock.

    On CUDA the host waits for both.
    """
    if begin is None or end is None:
        return float("nan")
    if isinstance(end, float):
        return end - float(begin)
    begin.synchronize()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def has_passed(point: Mark) -> bool:
    return point is None or isinstance(point, float) or bool(point.query())


def event_on(device: torch.device) -> Any:
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


CONTINUED = (
    "backward_passes",
    "compressed_steps",
    "nonfinite_steps",
    "bytes_sent",
    "bytes_uncompressed",
)
"""The counters in a checkpoint."""


@dataclass
class PassCounters:
    collectives: int = 0
    bytes_sent: int = 0


@dataclass
class Counters:
    """Counts the work of one session on this rank.

    `bytes_sent` counts the bytes of the tensors passed to all-reduce. Any other collective counts
    as the all-reduce that puts as many bytes on the network: half of the tensor with the parts of
    all ranks. So with W ranks each rank sends 2 (W - 1) / W times the counted bytes, whatever the
    collective.

    `backward_passes` counts synchronised backward passes that began, `nonfinite_steps` the passes
    that were not committed because a number was inf or NaN on some rank, and `compressed_steps` the
    passes that were committed and in which at least one parameter was compressed, or the outer
    steps that were committed.
    """

    backward_passes: int = 0
    compressed_steps: int = 0
    nonfinite_steps: int = 0
    collectives: int = 0
    bytes_sent: int = 0
    bytes_inside_nodes: int = 0
    """Bytes of collectives inside this rank's node, if a hook compresses between nodes.

    Not in `bytes_sent`.
    """
    bytes_uncompressed: int = 0
    """Bytes that DDP without a hook would have passed to all-reduce in the same passes."""
    handshakes: int = 0
    """Number of small collectives in which the ranks compare their states.

    Their bytes are not counted.
    """
    passes_acted: int = 0
    """Passes in which the hook compressed at least one parameter, committed or not.

    After `auto` has chosen plain all-reduce or bf16, all passes.
    """
    numel_before: int = 0
    """Gradient elements before compression, in passes after the start only."""
    numel_after: int = 0
    """Gradient elements after compression, in the same passes."""
    last_issued: str = ""
    """Description, bucket and step of the latest collective, for finding out where a run hangs."""
    last_pass: PassCounters = field(default_factory=PassCounters)
    before: dict[str, int] = field(default_factory=dict)
    """The `CONTINUED` counters of earlier runs, from which this run was resumed."""
    clocks: Clocks = field(default_factory=Clocks)

    def cumulative(self) -> dict[str, int]:
        return {name: self.before.get(name, 0) + getattr(self, name) for name in CONTINUED}

    def resume_from(self, saved: Mapping[str, int]) -> None:
        self.before = {name: saved[name] - getattr(self, name) for name in CONTINUED}

    def compression_stats(self) -> tuple[float, int, int]:
        rate = self.numel_before / self.numel_after if self.numel_after else 0
        return rate, self.numel_before, self.numel_after

    def sent(self, size: int) -> None:
        self.collectives += 1
        self.bytes_sent += size
        self.last_pass.collectives += 1
        self.last_pass.bytes_sent += size

    def begin_pass(self) -> None:
        self.backward_passes += 1
        self.clocks.begin_pass()
        self.last_pass = PassCounters()
