"""Collect what this rank measures during a watch."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from commhooks.compressors.auto.energy import Energies
from commhooks.compressors.auto.report import Report, count_sound, median_pass
from commhooks.compressors.base import Compressor
from commhooks.compressors.kernel import Kernel
from commhooks.compressors.observation import Seen
from commhooks.errors import logger_of
from commhooks.gradients.layout import BucketLayout

logger = logger_of(__name__)

ROUNDS = 2
"""Of a rehearsal: the first allocates memory."""
SPECTRUM_ROUNDS = 3
"""Power iterations, to find the largest singular values."""
REHEARSALS = 3
"""Of each probe, at most."""
ENOUGH_CALM = 3
"""Passes after which nothing was rehearsed. If there are as many, only they count: a pass after rehearsals is longer
where another rank rehearses longer."""
MOST_OF_A_STEP = 0.5
"""Rehearsals after one pass take no more than one more rehearsal and this share of a step."""


class Watcher:
    """
    Args:
        probes: what to rehearse, by label; none if nothing is.
        spectrum: see `candidates.spectrum`; None: do not look at energies.
    """

    def __init__(self, probes: Mapping[str, Compressor[Any]], spectrum: Compressor[Any] | None) -> None:
        self.latest: Seen | None = None
        self.energies = Energies()
        self._probes = dict(probes)
        self._spectrum = spectrum
        self._passes: list[tuple[float, float, tuple[float, ...]]] = []
        self._calm: list[tuple[float, float, tuple[float, ...]]] = []
        self._codec_s: dict[str, list[float]] = {label: [] for label in probes}
        self._turn = 0
        self._rehearsed = False
        self._spent_s = 0.0

    def compute_with(self, kernel: Kernel) -> None:
        """Rehearse with the kernel that all ranks have."""
        for each in self._probes.values():
            each.kernel = kernel

    @property
    def layouts(self) -> Sequence[BucketLayout]:
        """The buckets of the latest pass."""
        return () if self.latest is None else self.latest.layouts

    def see(self, seen: Seen) -> None:
        """Take in one pass. The first with new buckets allocates memory and is not counted."""
        if self.latest is None or _names(self.latest) != _names(seen):
            self._passes.clear()
            self._calm.clear()
            self._rehearsed = False
        else:
            times = (seen.step_s, seen.waiting_s, seen.computing_s)
            self._passes.append(times)
            if not self._rehearsed:
                self._calm.append(times)
            before_s, before = self._spent_s, self._turn
            while self._rehearse_one(seen) and self._spent_s - before_s < MOST_OF_A_STEP * seen.step_s:
                pass
            self._rehearsed = self._turn > before
        self.latest = seen

    def report(self) -> Report:
        """What was measured so far. Ranks with the same buckets give as many numbers."""
        enough = count_sound(self._calm) >= ENOUGH_CALM
        step, waiting, *computing = median_pass(self._calm if enough else self._passes, len(self.layouts))
        codec_s = tuple(_fastest(times) for times in self._codec_s.values())
        passes = count_sound(self._passes)
        return Report(passes, step, waiting, self._spent_s, self._rehearsals, tuple(computing), codec_s)

    @property
    def _rehearsals(self) -> int:
        """How often each probe has had its turn, at least."""
        probes = len(self._probes) + (self._spectrum is not None)
        return self._turn // probes if probes else REHEARSALS

    def _rehearse_one(self, seen: Seen) -> bool:
        """Rehearse the probe whose turn it is. Returns whether there was one."""
        labels = [*self._probes, *([] if self._spectrum is None else [None])]
        if self._turn >= REHEARSALS * len(labels):
            return False
        label = labels[self._turn % len(labels)]
        self._turn += 1
        began = time.perf_counter()
        try:
            if label is None:
                assert self._spectrum is not None
                self._spent_s += seen.rehearse(self._spectrum, SPECTRUM_ROUNDS, self.energies.look).spent_s
            else:
                rehearsal = seen.rehearse(self._probes[label], ROUNDS)
                self._codec_s[label].append(rehearsal.fastest_s)
                self._spent_s += rehearsal.spent_s
        except (RuntimeError, MemoryError) as error:
            # As where the copies do not fit into memory. Without the candidate, which no rank chooses then, the
            # training goes on as before.
            self._spent_s += time.perf_counter() - began
            logger.info("auto: %s could not be rehearsed: %s", label or "powerSGD", error)
            if label is not None:
                self._codec_s[label].append(math.nan)
        return True


def _fastest(times: Sequence[float]) -> float:
    """NaN if there are none, or one that could not be measured."""
    return min(times) if times and all(map(math.isfinite, times)) else math.nan


def _names(seen: Seen) -> list[list[str]]:
    return [layout.names for layout in seen.layouts]
