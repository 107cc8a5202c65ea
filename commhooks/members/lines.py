"""Log lines that would repeat: each at most every 10 s."""

import time
from typing import Any

from commhooks.errors import logger_of

LINE_EVERY_S = 10.0
logger = logger_of(__name__)


class Lines:
    """Logs warnings on one rank of a machine, each text at most every `LINE_EVERY_S`."""

    def __init__(self, logs: bool) -> None:
        self._logs = logs
        self._said: dict[str, float] = {}

    def say(self, text: str, *arguments: Any, about: str = "", once: bool = False) -> None:
        """Log `text` at most every `LINE_EVERY_S` for each `about`; with `once`, only once."""
        key, now = f"{text} {about}", time.monotonic()
        before = self._said.get(key)
        if not self._logs or (before is not None and (once or now < before + LINE_EVERY_S)):
            return
        self._said[key] = now
        logger.warning(f"members: {text}", *arguments)
