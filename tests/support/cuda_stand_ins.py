"""Stand-ins for the streams and events of an accelerator, to test on the CPU which work waits for
which.

A stream knows the names of all work that its next work comes after. Tests name work by
`Cuda.queue`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from commhooks.engine import streams
from commhooks.gradients import precision

Clock = dict["Stream", int]
"""Per stream, the number of the latest work that something comes after; see
`simulated_accelerator.py`.
"""


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, name: str = "") -> None:
        self.device = device
        self.priority = priority
        self.after: set[str] = set()
        self.clock: Clock = {}
        self._name = name or f"the stream of priority {priority}"

    def __repr__(self) -> str:
        return self._name

    def see(self, clock: Clock) -> None:
        """What this stream does next comes after this work."""
        for stream, number in clock.items():
            self.clock[stream] = max(number, self.clock.get(stream, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.after |= other.after
        self.see(other.clock)

    def wait_event(self, event: "Event") -> None:
        self.after |= event.after
        self.see(event.clock)

    def record_event(self) -> Any:
        event: Any = torch.Event()
        event.record(self)
        return event


class Event:
    def __init__(self, cuda: "Cuda") -> None:
        self.after: frozenset[str] = frozenset()
        self.clock: Clock = {}
        self._cuda = cuda
        self._recorded = False

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._cuda.current()
        self.after = frozenset(stream.after)
        self.clock = dict(stream.clock)
        self._recorded = True

    def query(self) -> bool:
        """The device is as late as it can be: whether the host has waited for it."""
        return self._has_passed()

    def _has_passed(self) -> bool:
        return all(
            number <= self._cuda.host.get(stream, 0) for stream, number in self.clock.items()
        )

    def synchronize(self) -> None:
        if not self.query():
            self._cuda.wait_for(self)

    def elapsed_time(self, end: "Event") -> float:
        for event in (self, end):
            if not (event._recorded and event._has_passed()):
                raise RuntimeError(
                    "the time of an event that was not recorded, or for which nobody has waited"
                )
        return 0.0


class Cuda:
    """The state that tests inspect.

    Attributes:
        made: the streams made so far. Every thread begins on `default`, which is not among them.
        kept: the storage of each tensor given to `record_stream`, with the stream.
        host_waits: thread -> what the host waited for whenever it read a tensor in that thread.
        capturing: whether a CUDA graph is being captured.
        host: the work that the host has waited for.
        pinned: copies of tensors in the host's memory.
    """

    def __init__(self) -> None:
        self.default = Stream(name="the default stream")
        self.made: list[Stream] = []
        self.kept: set[tuple[int, Stream]] = set()
        self.host_waits: dict[threading.Thread, list[frozenset[str]]] = {}
        self.capturing = False
        self.host: Clock = {}
        self.pinned: list[torch.Tensor] = []
        self._local = threading.local()

    def new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        self.made.append(Stream(device, priority))
        return self.made[-1]

    def new_event(self, device: Any = None, enable_timing: bool = False) -> Event:
        return Event(self)

    def host_sees(self, clock: Clock) -> None:
        for stream, number in clock.items():
            self.host[stream] = max(number, self.host.get(stream, 0))

    def current(self, device: Any = None) -> Stream:
        return getattr(self._local, "stream", self.default)

    def set_current(self, stream: Stream) -> None:
        self._local.stream = stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current()
        self.set_current(stream)
        try:
            yield
        finally:
            self.set_current(before)

    def wait_for(self, event: Event) -> None:
        self.wait(event.after)
        self.host_sees(event.clock)

    def wait(self, work: Iterable[str]) -> None:
        """Record that the host waits for this work."""
        self.host_waits.setdefault(threading.current_thread(), []).append(frozenset(work))

    def copy(self, to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap `to` so that it waits, unless it copies to pinned host memory. torch pins what is
        copied `non_blocking`.
        """

        def copying(
            tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any
        ) -> torch.Tensor:
            moves = any(
                isinstance(argument, (str, torch.device)) for argument in (*args, *kwargs.values())
            )
            if not (non_blocking and moves):
                return (self.waits(to) if moves else to)(tensor, *args, **kwargs)
            copied = to(tensor, *args, **kwargs, copy=True)
            self.pinned.append(copied)
            return copied

        return copying

    def queue(self, name: str) -> None:
        """Queue work with this name on the current stream."""
        self.current().after.add(name)

    @property
    def codec(self) -> Stream:
        (stream,) = (stream for stream in self.made if stream.priority < 0)
        return stream

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.kept.add((storage(tensor), stream))

    def waits(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `read`, a method by which the host reads a tensor, to record what it waits for."""

        def noting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not any(tensor is pinned for pinned in self.pinned):
                self.wait(self.current().after)
            return read(tensor, *args, **kwargs)

        return noting


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def cuda_stand_ins() -> Iterator[Cuda]:
    """Context manager: treat tensors on the CPU as if they were on a CUDA device."""
    cuda = Cuda()
    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (precision, "is_host_readable", lambda device: False),
            (precision, "has_streams", lambda device: True),
            (precision, "is_capturing", lambda device: cuda.capturing),
            (torch, "Stream", cuda.new_stream),
            (torch, "Event", cuda.new_event),
            (torch.accelerator, "current_stream", cuda.current),
            (torch.accelerator, "set_stream", cuda.set_current),
            (torch.Tensor, "record_stream", lambda tensor, stream: cuda.keep(tensor, stream)),
            (torch.Tensor, "item", cuda.waits(torch.Tensor.item)),
            (torch.Tensor, "tolist", cuda.waits(torch.Tensor.tolist)),
            (torch.Tensor, "__bool__", cuda.waits(torch.Tensor.__bool__)),
            (torch.Tensor, "to", cuda.copy(torch.Tensor.to)),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        patches.enter_context(mock.patch.dict(streams._streams, clear=True))
        yield cuda
