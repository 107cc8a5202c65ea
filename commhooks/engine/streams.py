"""Manage the streams on which hooks compute and are read.

On devices without streams nothing here has an effect.

A hook computes on the *codec stream* of its device, so that waiting for the network does not block
the backward pass. The host reads the results on the *reading stream*, which waits only for the
latest commit. State in host memory is copied on the *copy stream*. An outer step of DiLoCo during
training computes on the *background stream*.

A process has one stream of each kind per device, because cuBLAS keeps a workspace per stream that
it never frees. So all ranks must call the hooks of several models in the same order, which NCCL
requires anyway.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch

from commhooks.gradients import precision
from commhooks.gradients.precision import keep_for_current_stream

# The kernels of the codec are small and depend on each other. With the default priority, 0, each of
# them would queue behind the kernels of the backward pass.
_PRIORITIES = {"codec": -1, "reading": 0, "copy": 0, "background": 0}

_streams: dict[tuple[torch.device, str], torch.Stream] = {}


def _stream(device: torch.device, name: str) -> torch.Stream:
    stream = _streams.get((device, name))
    if stream is None:
        made = torch.Stream(device, priority=_PRIORITIES[name])
        # Another thread may have created the stream in the meantime.
        stream = _streams.setdefault((device, name), made)
    return stream


@contextlib.contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """Make `stream` and its device current in the body.

    `with stream:` keeps the previous stream in the stream object, which is an error in a second
    thread, or when nested.
    """
    outside = torch.accelerator.current_stream()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_stream(outside)  # also makes its device current again


@contextlib.contextmanager
def computing_on(buffer: torch.Tensor) -> Iterator[None]:
    """Run the body on the codec stream of the buffer's device, after the current stream's work."""
    device = buffer.device
    stream = _stream(device, "codec")
    stream.wait_stream(torch.accelerator.current_stream(device))
    with _on(stream):
        keep_for_current_stream([buffer])
        yield


@contextlib.contextmanager
def _working_on(name: str, device: torch.device, *, after_current: bool) -> Iterator[None]:
    """Run the body on a stream of `device`.

    With `after_current`, the body runs after the work queued on the current stream.
    """
    if not precision.has_streams(device):
        yield
        return
    stream = _stream(device, name)
    if after_current:
        stream.wait_stream(torch.accelerator.current_stream(device))
    with _on(stream):
        yield


def _wait_for(name: str, device: torch.device) -> None:
    if precision.has_streams(device):
        torch.accelerator.current_stream(device).wait_stream(_stream(device, name))


copying = functools.partial(_working_on, "copy")
wait_for_copies = functools.partial(_wait_for, "copy")
in_background = functools.partial(_working_on, "background")
wait_for_background = functools.partial(_wait_for, "background")
wait_for_codec = functools.partial(_wait_for, "codec")


class CommitMark:
    """Marks the end of the latest commit on the codec stream.

    All waiting is done by streams, not by the host. Hold the lock of the learned state while
    calling these methods.

    Readers of the learned state wait for this mark and not for the whole stream, which may already
    hold collectives of the next pass: another rank may begin these only after a save in which this
    rank takes part.
    """

    def __init__(self) -> None:
        self._at: tuple[torch.device, torch.Event] | None = None

    def set(self, device: torch.device) -> None:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        self._at = device, event

    def wait(self) -> None:
        if self._at is not None:
            device, event = self._at
            torch.accelerator.current_stream(device).wait_event(event)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Run the body on the reading stream, after the latest commit.

        The body must leave no unfinished work on that stream: it ends with copies to the host.
        """
        if self._at is None:
            yield
            return
        device, event = self._at
        stream = _stream(device, "reading")
        stream.wait_event(event)
        with _on(stream):
            yield

    def overwrite(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copy `value`, on the CPU, into `tensor` in the order of the codec stream.

        The host does not wait.
        """
        device = tensor.device
        if not precision.has_streams(device):
            tensor.copy_(value)
            return
        on_device = value.to(device)
        stream = _stream(device, "codec")
        stream.wait_stream(torch.accelerator.current_stream(device))
        with _on(stream):
            tensor.copy_(on_device)
            keep_for_current_stream([on_device])
            self.set(device)
