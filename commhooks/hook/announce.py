"""The lines in which rank 0 says what the hook does: at the first backward pass, and when it resumes."""

import logging
import sys

logger = logging.getLogger(__name__)


def announce(hook: str, what_it_does: str) -> None:
    """Log the line, or print it if logging is not configured, so that users see that the hook is active."""
    say(f"{hook}{what_it_does}")


def say(line: str) -> None:
    """Log a line for users, or print it if logging is not configured."""
    text = f"commhooks: {line}"
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    else:
        print(text, file=sys.stderr, flush=True)
