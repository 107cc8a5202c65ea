"""The stream on which a hook computes."""

import contextlib
from collections.abc import Iterator

import torch


class CodecStreams:
    """On CUDA a stream of our own per device, so that waiting for the network does not stop the backward pass."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def computing_on(self, buffer: torch.Tensor) -> Iterator[None]:
        """Run the body on the stream of the buffer's device, after what was queued for the buffer so far."""
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
        """What the caller's stream reads from now on, it reads after these streams have written it."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
