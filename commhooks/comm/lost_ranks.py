"""Which ranks a collective of gloo has failed for.

gloo closes the connection to a rank that has ended, and after a time-out all connections of this rank, at both ends, so
that the others fail in turn. In order not to take them for the cause, each rank that has failed leaves a note in the
store of the default group: whose connection is closed, and who has left no note, has ended or hangs. The note also says
whom that rank has found to be the cause, for those that communicate only with ranks that have failed in turn.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import TypeVar

import torch
import torch.distributed as dist

from commhooks.comm.groups import backend_of
from commhooks.comm.point_to_point import TAG
from commhooks.gradients.torch_private import store_of

Found = TypeVar("Found")
CPU = torch.device("cpu")
_KNOWN: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]]" = weakref.WeakKeyDictionary()
"""What has been found. A group whose connections are closed stays so; the futures of its buckets fail one by one."""
_TOLD: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
"""Default groups in whose store this rank has left a note. A rank that goes on, with another group, cannot tell later
which notes are new."""

CLOSED_LIMIT_S = 0.5
TIMED_OUT_LIMIT_S = 2.0
"""How long ranks are waited for that may leave a note: those whose connection was closed do it at once; those who were
busy when another one's patience ended may be late."""


def lost_ranks(group: dist.ProcessGroup, error: RuntimeError) -> list[int]:
    """The ranks, by their numbers in the default group, that have ended or hang, after a collective of `group` has
    failed with `error`. Empty if that cannot be told, as in a rank that has gone on after such a failure. Afterwards
    `group` cannot be used any more; it could not before, if any rank is found. Takes up to three times
    `CLOSED_LIMIT_S`, or `TIMED_OUT_LIMIT_S` after a time-out."""
    if group.size() == 1 or not dist.is_initialized() or backend_of(group, CPU) != "gloo":
        return []
    if group in _KNOWN:
        return _KNOWN[group]
    ranks, here = dist.get_process_group_ranks(group), group.rank()
    closed = [ranks[other] for other in range(group.size()) if other != here and _is_closed(other, group)]
    world = dist.group.WORLD
    assert world is not None
    if not closed or world in _TOLD:
        return []
    _TOLD.add(world)
    timed_out = any(words in str(error).lower() for words in ("timed out", "timeout"))
    notes = _Notes(store_of(world), TIMED_OUT_LIMIT_S if timed_out else CLOSED_LIMIT_S)
    found = closed

    def look() -> None:
        nonlocal found
        with contextlib.suppress(RuntimeError):  # the process that holds the store has ended
            found = notes.find(ranks[here], closed, ranks)

    # The process that holds the store may be stopped, and then no limit ends a call of the store.
    thread = threading.Thread(target=look, name="commhooks lost ranks", daemon=True)
    thread.start()
    thread.join(3.5 * notes.limit_s)
    if found:
        _KNOWN[group] = found
    return found


def _is_closed(other: int, group: dist.ProcessGroup) -> bool:
    """Whether the connection to rank `other` of `group` is closed: a message cannot even be waited for then."""
    try:
        dist.irecv(torch.empty(1, dtype=torch.uint8), group=group, group_src=other, tag=TAG + 1)
    except RuntimeError:
        return True
    return False


class _Notes:
    """What ranks that have failed have left in the store."""

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # they may share a store
        self._store = dist.PrefixStore(f"commhooks/failed/{attempt}", store)
        self.limit_s = limit_s

    def find(self, own: int, closed: Collection[int], group: Collection[int]) -> list[int]:
        """Leave a note, and find the ranks that have ended or hang."""
        self._store.set(str(own), "")
        others = [rank for rank in group if rank != own]
        # In this order: a rank that was not in a collective yet need not have noticed.
        found = self._silent(closed) or self._silent(others) or self._within_limit(lambda: self._named_by(others))
        self._store.set(str(own), " ".join(map(str, found)))
        return found

    def _silent(self, ranks: Collection[int]) -> list[int]:
        """Those that leave no note within the limit."""
        silent = list(ranks)

        def all_spoke() -> bool:
            silent[:] = [rank for rank in silent if not self._store.check([str(rank)])]
            return not silent

        self._within_limit(all_spoke)
        return silent

    def _named_by(self, ranks: Collection[int]) -> list[int]:
        return sorted({int(each) for rank in ranks for each in self._store.get(str(rank)).decode().split()})

    def _within_limit(self, look: Callable[[], Found]) -> Found:
        deadline = time.monotonic() + self.limit_s
        while not (found := look()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found
