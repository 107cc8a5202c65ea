"""Spans of hook calls, exchanges, outer steps and native kernels in profiles of torch.profiler."""

import contextlib
from typing import Any

from torch.profiler import record_function

from commhooks.gradients.torch_private import profiler_is_on

_NOTHING = contextlib.nullcontext()


def span(what: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """Context manager: show the body in profiles as "commhooks {name}: {what}".

    Without a profiler it takes about a microsecond, several times less than `record_function`
    alone.
    """
    return record_function(f"commhooks {name}: {what}") if profiler_is_on() else _NOTHING
