"""The line about the hook that rank 0 logs at the first backward pass."""

import logging
import sys

from commhooks.hook.request import HookRequest

logger = logging.getLogger(__name__)


def announce(request: HookRequest, what_it_does: str) -> None:
    """Log the line, or print it if logging is not configured, so that users see that the hook is active."""
    text = f"commhooks: {request.name}{what_it_does}"
    if request.wrapper is not None:
        text += f", {request.wrapper} on the wire"
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    else:
        print(text, file=sys.stderr, flush=True)
