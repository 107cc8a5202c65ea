"""torch's log line about compression, every so many steps."""

import logging

from commhooks.comm.counters import Counters
from commhooks.engine.backward_pass import BackwardPass

logger = logging.getLogger(__name__)


class StatisticsLog:
    """Logs how many gradient elements were sent instead of how many.

    Attributes:
        due: the step at whose commit `add` is to be called next.
    """

    def __init__(self) -> None:
        self.due = 0

    def add(self, current: BackwardPass, counters: Counters, every: int) -> None:
        """Call at the commit of a compressed pass that is due. `every`: steps between two lines."""
        self.due = current.step_at_most + every
        before, after = counters.numel_before, counters.numel_after
        logger.info(
            "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
            current.step_label,
            before,
            after,
            before / after if after else 0,
        )
