"""What one rank has measured, as numbers to exchange; and what all have together. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Seconds of a step. NaN stands for what could not be measured.

    Attributes:
        passes: how many passes were measured.
        step_s, waiting_s: as in `Seen`.
        spent_s: of all rehearsals together.
        rehearsals: how often each probe had its turn, at least.
        computing_s: as in `Seen`, per bucket.
        codec_s: per probe: of the fastest rehearsal.
    """

    passes: int
    step_s: float
    waiting_s: float
    spent_s: float
    rehearsals: int
    computing_s: tuple[float, ...]
    codec_s: tuple[float, ...]

    def numbers(self) -> list[float]:
        """In the form that ranks exchange: as many numbers on each rank."""
        first = [self.passes, self.step_s, self.waiting_s, self.spent_s, self.rehearsals]
        return [*first, *self.computing_s, *self.codec_s]


def median_pass(passes: Sequence[tuple[float, float, tuple[float, ...]]], buckets: int) -> tuple[float, ...]:
    """The medians of (step, waiting, computing per bucket) over the passes whose times make sense, flat; NaN if there
    are none. A clock that jumps spoils a pass, not the median."""
    sound = [[step, waiting, *computing] for step, waiting, computing in passes if _sound(step, waiting, computing)]
    if not sound:
        return (math.nan,) * (2 + buckets)
    return tuple(statistics.median(column) for column in zip(*sound, strict=True))


def count_sound(passes: Sequence[tuple[float, float, tuple[float, ...]]]) -> int:
    """How many of them make sense."""
    return sum(_sound(*each) for each in passes)


def combined(table: Sequence[Sequence[float]], buckets: int) -> Report:
    """All ranks' reports as one: each time that of the slowest rank, the two counts the smallest. Two times are
    the least of any rank. Waiting: the others wait for that rank, too, and not only for the network. The step: all
    ranks end it together, and the others have waited in it for that rank, whose rehearsals after the step before took
    longest. A time that any rank could not measure is NaN.

    Args:
        table: a row of `Report.numbers` per rank.
        buckets: how many of the times are computing times.
    """
    passes, step, waiting, _, rehearsals, *_ = zip(*table, strict=True)
    times = [max(column) if all(_usable(each) for each in column) else math.nan for column in zip(*table, strict=True)]
    waiting_s = min(waiting) if all(_usable(each) for each in waiting) else math.nan
    step_s = min(step) if all(_usable(each) for each in step) else math.nan
    computing_s, codec_s = tuple(times[5 : 5 + buckets]), tuple(times[5 + buckets :])
    return Report(_least(passes), step_s, waiting_s, times[3], _least(rehearsals), computing_s, codec_s)


def _least(counts: Sequence[float]) -> int:
    return int(min(counts)) if all(math.isfinite(each) for each in counts) else 0


def _usable(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0


def _sound(step: float, waiting: float, computing: Sequence[float]) -> bool:
    return _usable(step) and step > 0 and _usable(waiting) and all(_usable(each) for each in computing)
