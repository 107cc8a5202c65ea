"""The streams on which hooks compute and are read. Nothing here has an effect on devices without streams.

A hook computes on the *codec stream* of its device, so that waiting for the network does not block the backward pass.
The host reads the results on another stream, the *reading stream*, which waits for the latest commit only.

A process has one codec stream and one reading stream per device, because cuBLAS keeps a workspace per stream that it
never frees. The hooks of several models therefore run on a device in the order in which they are called. All ranks must
call them in the same order, which NCCL requires anyway.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch

from commhooks.gradients import precision
from commhooks.gradients.torch_private import sparse_indices, sparse_values

# The kernels of the codec are small and depend on each other: with the default priority, 0, every kernel would queue
# behind the kernels of the backward pass.
_CODEC_PRIORITY, _READING_PRIORITY = -1, 0

_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    stream = _streams.get((device, priority))
    if stream is None:
        # Another thread may have been faster.
        stream = _streams.setdefault((device, priority), torch.cuda.Stream(device, priority=priority))
    return stream


@contextlib.contextmanager
def computing_on(buffer: torch.Tensor) -> Iterator[None]:
    """Run the body on the codec stream of the buffer's device, after the work queued on the current stream."""
    device = buffer.device
    stream = _stream(device, _CODEC_PRIORITY)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        keep_for_current_stream([buffer])
        yield


def wait_for_codec(device: torch.device) -> None:
    """Make the current stream wait for all work queued on the codec stream."""
    if precision.has_streams(device):
        torch.cuda.current_stream(device).wait_stream(_stream(device, _CODEC_PRIORITY))


def keep_for_current_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the memory of `tensors`, allocated on another stream, from reuse while work of the current stream that was
    queued before they were freed is unfinished."""
    for tensor in tensors:
        if precision.has_streams(tensor.device):
            for part in (sparse_indices(tensor), sparse_values(tensor)) if tensor.is_sparse else (tensor,):
                part.record_stream(torch.cuda.current_stream(tensor.device))


class CommitMark:
    """Marks the end of the latest commit on the codec stream.

    Readers of the learned state wait for this mark and not for the whole stream. The stream may already hold
    collectives of the next pass, which other ranks begin only after a save in which this rank takes part.

    Hold the lock of the learned state while calling these methods.
    """

    def __init__(self) -> None:
        self._at: tuple[torch.device, torch.cuda.Event] | None = None

    def set(self, device: torch.device) -> None:
        """Set the mark after the work queued on the current stream of `device`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self._at = device, event

    def wait(self) -> None:
        """Make the current stream wait for the latest commit."""
        if self._at is not None:
            device, event = self._at
            torch.cuda.current_stream(device).wait_event(event)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Run the body on the reading stream, after the latest commit. The body must leave no unfinished work on that
        stream: it ends with copies to the host."""
        if self._at is None:
            yield
            return
        device, event = self._at
        stream = _stream(device, _READING_PRIORITY)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    def overwrite(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copy `value`, on the CPU, into `tensor` of the learned state, in the order of the codec stream. The host does
        not wait for the codec."""
        device = tensor.device
        if not precision.has_streams(device):
            tensor.copy_(value)
            return
        on_device, stream = value.to(device), _stream(device, _CODEC_PRIORITY)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            tensor.copy_(on_device)
            keep_for_current_stream([on_device])
            self.set(device)
