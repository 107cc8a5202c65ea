"""How long the hook computes and how long it waits for the network, without ever making anybody wait.

On the CPU times are the host's. On CUDA they are the device's: events mark the stream, and are read when they have
passed, or when somebody asks.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.gradients import precision

Mark = Any
"""A point in time: `time.perf_counter()`, or a CUDA event; None where nobody can tell."""


@dataclass
class Times:
    """Seconds."""

    codec_s: float = 0.0
    """Inside the hook, waiting left out."""
    waiting_s: float = 0.0
    """For the all-reduces, the other ranks' delay included."""
    left_to_ddp_s: float = 0.0
    """Part of `waiting_s` that DDP spends on futures of hooks that return at once: last call to last answer."""


class Clocks:
    """The times of one registration: `total` since it was made, and those of the `last_pass`."""

    def __init__(self) -> None:
        self.total = Times()
        self.last_pass = Times()
        self._called: Mark = None
        self._open: deque[tuple[Mark, Mark, Callable[[float], None]]] = deque()
        self._collecting = threading.RLock()

    def begin_pass(self) -> None:
        self.collect(wait=False)
        self.last_pass = Times()

    def codec(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """The time of the body counts as the codec's, less what it spends in `waiting`."""
        return self._measure(device, codec=1, waiting=0)

    def waiting(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """The time of the body, which lies within that of `codec`, is spent waiting for the network."""
        return self._measure(device, codec=-1, waiting=1)

    @contextlib.contextmanager
    def _measure(self, device: torch.device, codec: int, waiting: int) -> Iterator[None]:
        both = (self.total, self.last_pass)

        def count(seconds: float) -> None:
            for times in both:
                times.codec_s += codec * seconds
                times.waiting_s += waiting * seconds

        begin = _mark(device)
        try:
            yield
        finally:
            self._between(begin, _mark(device), count)

    def left_to_ddp(self, device: torch.device) -> Callable[[], None]:
        """Call it when a hook returns whose answer DDP waits for, and what it returns when the answer is there."""
        this_pass = self.last_pass

        def count(seconds: float) -> None:  # the last answer counts
            longer = seconds - this_pass.left_to_ddp_s
            this_pass.left_to_ddp_s = seconds
            for times in (self.total, this_pass):
                times.waiting_s += longer

        self._called = _mark(device)
        return lambda: self._between(self._called, _mark(device), count)

    def collect(self, *, wait: bool) -> None:
        """Count what the device has come past; with `wait` everything that it was given, and the host waits for it."""
        with self._collecting:
            while self._open:
                head = begin, end, count = self._open[0]
                if wait:
                    begin.synchronize()  # they may be of two streams
                    end.synchronize()
                elif not (begin.query() and end.query()):
                    return
                if not self._open or self._open[0] is not head:
                    continue  # a signal handler has asked while this thread waited
                self._open.popleft()
                count(max(0.0, begin.elapsed_time(end) / 1000))

    def _between(self, begin: Mark, end: Mark, count: Callable[[float], None]) -> None:
        if isinstance(end, float):
            count(end - begin)
        elif end is not None:
            self._open.append((begin, end, count))

    def __getstate__(self) -> dict[str, Any]:
        self.collect(wait=True)
        return {"total": self.total, "last_pass": self.last_pass}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(saved)


def has_clock(device: torch.device) -> bool:
    """Whether times on `device` are known."""
    return precision.is_host_readable(device) or device.type == "cuda"


def _mark(device: torch.device) -> Mark:
    if precision.is_host_readable(device):
        return time.perf_counter()
    return event_on(device) if has_clock(device) else None


def event_on(device: torch.device) -> Any:
    """An event that passes when `device` gets to this point of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
