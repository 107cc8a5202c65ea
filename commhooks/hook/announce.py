"""The lines in which rank 0 says what the hook does, at the first backward pass and on a resume."""

import logging
import sys

logger = logging.getLogger(__name__)


def say(line: str) -> None:
    """Log a line for users, or print it if logging is not configured, so that users see that the hook is active."""
    text = f"commhooks: {line}"
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    else:
        print(text, file=sys.stderr, flush=True)
