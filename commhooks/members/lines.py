"""Log lines that would repeat: each at most every 10 s."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from commhooks.errors import logger_of

LINE_EVERY_S = 10.0
logger = logger_of(__name__)


class Lines:
    """Logs warnings on one rank of a machine, each text at most every `LINE_EVERY_S`."""

    def __init__(self, logs: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._logs = logs
        self._clock = clock
        self._said: dict[str, float] = {}  # lines -> when they may be said again
        self._lock = threading.Lock()

    def say(self, text: str, *arguments: Any, about: str = "", once: bool = False) -> None:
        """Log `text` at most every `LINE_EVERY_S` for each `about`; with `once`, only once."""
        if not self._logs:
            return
        key = f"{text} {about}"
        now = self._clock()
        with self._lock:
            self._said = {line: until for line, until in self._said.items() if now < until}
            if key in self._said:
                return
            self._said[key] = math.inf if once else now + LINE_EVERY_S
        logger.warning(f"members: {text}", *arguments)
