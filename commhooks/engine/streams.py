"""The CUDA streams on which hooks compute."""

import contextlib
from collections.abc import Iterator

import torch


class CodecStreams:
    """A separate CUDA stream per device, so that waiting for the network does not block the backward pass. No effect on
    other devices."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def computing_on(self, buffer: torch.Tensor) -> Iterator[None]:
        """Run the body on the codec stream of the buffer's device, after the work queued on the current stream."""
        if buffer.device.type != "cuda":
            yield
            return
        stream = self._streams.get(buffer.device)
        if stream is None:
            stream = self._streams[buffer.device] = torch.cuda.Stream(buffer.device)
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        if not buffer.is_sparse:
            buffer.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Make the caller's current streams wait for the codec streams."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
