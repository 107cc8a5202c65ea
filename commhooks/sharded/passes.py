"""Notice when a backward pass has reduced all gradients."""

from collections.abc import Callable

from commhooks.gradients.torch_private import run_after_backward


class Passes:
    """Calls `begins` before the first reduce-scatter of a backward pass, and `ends` at the end of
    the pass. A pass that ends in an exception has no end: the next one continues it.
    """

    def __init__(self) -> None:
        self.begins: list[Callable[[], None]] = []
        self.ends: list[Callable[[], None]] = []
        self._running = False

    def reduces(self) -> None:
        """Call this at every reduce-scatter: see `run_after_backward`."""
        if not self._running:
            self._running = True
            for begin in self.begins:
                begin()
        run_after_backward(self._end)

    def _end(self) -> None:
        if self._running:
            self._running = False
            for end in self.ends:
                end()
