"""Memory for messages, allocated once and lent to one collective after another."""

import contextlib
from collections.abc import Iterator

import torch

from commhooks.gradients import precision
from commhooks.gradients.modes import plain_mode


class Memory:
    """Lends buffers of `size` bytes. There are as many as were ever in use at the same time: one,
    and one for each unit that FSDP2 gathers or reduces ahead.

    Attributes:
        size: bytes of a buffer; reserve before the first use.
        allocated: bytes of all buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[tuple[torch.Tensor, torch.Event | None]] = []
        self.size = self.allocated = 0

    def reserve(self, size: int) -> None:
        self.size = max(self.size, size)

    def take(self) -> torch.Tensor:
        """Return a buffer (uint8). The current stream waits for the work that last used it."""
        if not self._free:
            self.allocated += self.size
            with plain_mode():  # a tensor made in inference mode could not be written outside of it
                return torch.empty(self.size, dtype=torch.uint8, device=self.device)
        buffer, last_use = self._free.pop()
        if last_use is not None:
            torch.accelerator.current_stream(self.device).wait_event(last_use)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Lend `buffer` again after the work queued on the current stream. A buffer that is not
        given back, because a collective has failed and may still write into it, is not used again.
        """
        last_use = None
        if precision.has_streams(self.device):
            last_use = torch.Event(self.device)
            last_use.record(torch.accelerator.current_stream(self.device))
        self._free.append((buffer, last_use))

    def free(self) -> None:
        self._free.clear()
        self.allocated = 0

    @contextlib.contextmanager
    def lent(self, numel: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Lend `numel` numbers (1-D) for the body."""
        buffer = self.take()
        yield buffer[: numel * dtype.itemsize].view(dtype)
        self.give_back(buffer)
