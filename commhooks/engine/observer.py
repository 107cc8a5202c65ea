"""Measure the passes that an adaptive compressor watches; see `compressors/adaptive.py`."""

from typing import Any

import torch

from commhooks.comm.counters import Mark, mark, seconds_between
from commhooks.compressors.adaptive import AdaptiveCompressor, ObservedPass
from commhooks.compressors.base import Compressor
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.names import ParameterNames


class Observer:
    """The times of the passes of one session. Costs nothing outside of the watch.

    Args:
        names: of the parameters.
    """

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self._watching: AdaptiveCompressor[Any] | None = None  # measures the running pass
        self._begin = 0
        self._follows = False  # another pass that was measured, which ended at `_ended`
        self._ended: Mark = None
        self._layouts: list[BucketLayout] = []

    @property
    def active(self) -> bool:
        """The running pass is measured."""
        return self._watching is not None

    def begin_pass(self, step: int, compressor: Compressor[Any]) -> None:
        """Call at the beginning of a pass. The pass before a watch is measured, too: where it ends, the first watched
        one begins.

        Args:
            step: committed steps before the pass.
        """
        self._watching = None
        self._layouts.clear()
        if isinstance(compressor, AdaptiveCompressor) and compressor.watch is not None:
            self._begin = compressor.watch.begin
            self._watching = compressor if step + 1 >= self._begin else None
        self._follows = self._follows and self.active

    def add(self, layout: BucketLayout) -> None:
        """The pass has a bucket with this layout."""
        if self.active:
            self._layouts.append(layout)

    def show(self, step: int, good: torch.Tensor, device: torch.device) -> None:
        """Show the compressor the pass that ends now, if it is watched and was committed. On accelerators the host
        waits.

        Args:
            step: committed steps before it, if it was committed.
            good: whether it was committed.
        """
        began, ended, follows = self._ended, mark(device), self._follows
        self._ended, self._follows = ended, True
        if self._watching is None or not follows or step < self._begin or not bool(good):
            return
        seen = ObservedPass(seconds_between(began, ended), list(self._layouts), self._names)
        self._watching.observe(seen)
        self._ended = mark(device)  # looking at the pass is no part of the next one
