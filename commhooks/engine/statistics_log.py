"""torch's log line about compression, every so many steps."""

import logging

from commhooks.comm.counters import Counters
from commhooks.engine.backward_pass import BackwardPass

logger = logging.getLogger(__name__)


class StatisticsLog:
    """Logs how many gradient elements were sent instead of how many."""

    def __init__(self) -> None:
        self._next = 0

    def add(self, current: BackwardPass, counters: Counters, every: int) -> None:
        """Call at the commit of each compressed pass. Logs if `every` steps have passed since the last line."""
        if current.step_at_most < self._next:
            return
        self._next = current.step_at_most + every
        before, after = counters.numel_before, counters.numel_after
        logger.info(
            "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
            current.step_label,
            before,
            after,
            before / after if after else 0,
        )
