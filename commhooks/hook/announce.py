"""The lines in which rank 0 says what the hook does, at the first backward pass and on a resume, and why it fails."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import torch.distributed as dist

from commhooks.errors import CommHookError

logger = logging.getLogger(__name__)


def say(line: str) -> None:
    """Log a line for users, or print it if logging is not configured, so that users see that the hook is active."""
    text = f"commhooks: {line}"
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    else:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def reason_first() -> Iterator[None]:
    """Let rank 0 print the message of a CommHookError as soon as it is raised in the body. All ranks raise such errors:
    their tracebacks follow, one in another, and the reason would stand at the end of each."""
    try:
        yield
    except CommHookError as error:
        if dist.is_initialized():
            rank, ranks = dist.get_rank(), dist.get_world_size()
        else:  # set by launchers
            rank, ranks = (int(os.environ.get(name) or default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        if rank == 0 and ranks > 1 and not error.said:
            error.said = True
            print(f"commhooks: error: {error}", file=sys.stderr, flush=True)
        raise
