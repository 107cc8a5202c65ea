"""The threads of native kernels: those that torch uses, in torch's own pool.

torch's operators run in the threads of an OpenMP library that torch loads. Where it has the entry point
`GOMP_parallel`, as it has on Linux, kernels run in the same threads. A second pool would compete with the first.
"""

import ctypes
import functools
import os

import torch

_GRAIN = 2**15
"""Elements per thread, at least: as many as torch's operators ask for."""
_IMPORTED_IN = os.getpid()


def team(elements: int) -> tuple[int | None, int]:
    """The address of `GOMP_parallel` (None: there is none) and how many threads should share work on so many elements,
    when called from this thread: at most as many as torch has, and 1 where torch's cannot be used. The results do not
    depend on it."""
    start = _entry_point()
    threads = min(torch.get_num_threads(), max(1, elements // _GRAIN))
    if start is None or threads == 1:
        return start, 1
    # OpenMP waits for ever in a process that was forked from one in which it had run, for the kernel or for torch.
    return start, threads if os.getpid() == _IMPORTED_IN else 1


@functools.cache
def _entry_point() -> int | None:
    # torch loads its OpenMP into the global scope, so this finds the one that torch calls.
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):  # another OpenMP; TypeError: Windows has no global scope
        return None
