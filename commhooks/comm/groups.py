"""Manage process groups: their backend, new groups of their ranks, and the ranks that a failed
collective has lost.

gloo closes the connection to a rank that has ended. After a timeout it closes all connections of
this rank at both ends, so that the other ranks fail in turn. To find the cause, each rank that has
failed leaves a note in the store of the default group. A rank whose connection is closed and that
has left no note has ended or hangs. A note also names the lost ranks that its author has found,
because other ranks may communicate only with ranks that failed in turn.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commhooks.errors import AttachError, HookRunError, listed
from commhooks.gradients.torch_private import groups_here, is_torchcomms, store_of, timeout_of

TAG = 2**30
"""The tag of all messages. It is larger than the tags of users who send in the same group."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend for `device`: a group may have one per device type
    ("cpu:gloo,cuda:nccl").
    """
    if group in _ADOPTED:
        return _ADOPTED[group]
    kinds = dict(
        part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part
    )
    name: str = kinds.get(device.type, dist.get_backend(group))
    return name


_ADOPTED: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def adopt(group: dist.ProcessGroup, backend: str) -> None:
    """Register the backend of a group that torch.distributed does not know, such as a group of
    torchft.
    """
    _ADOPTED[group] = backend


GLOO_INTERFACE = (
    "on several machines set GLOO_SOCKET_IFNAME to the network interface between them; an exclusion"
    " such as ^lo works with NCCL only"
)
"""Advice in messages about ranks that cannot connect over gloo."""


def new_group(
    parts: Sequence[Sequence[int]], within: dist.ProcessGroup, device: torch.device
) -> dist.ProcessGroup:
    """Divide the ranks of `within` into new groups with the same timeout, and return the group of
    this rank. All ranks of `within` must call this with the same `parts`. torch keeps the groups
    until `destroy_process_group`.

    Args:
        parts: the ranks of each group, as ranks in `within`; every rank is in one of them.
        device: the device of this rank's model; the group is bound to it if it is an accelerator.

    Raises:
        AttachError: torch can only make groups together with all ranks of the run, and `within`
            lacks some of them.
        HookRunError: the ranks cannot connect.
    """
    everywhere, world = dist.get_process_group_ranks(within), dist.group.WORLD
    assert world is not None
    bound, partial = getattr(world, "bound_device_id", None), len(everywhere) < world.size()
    if partial and bound is not None:
        # NCCL would split the communicator of the default group, and all of its ranks must do that
        # together.
        raise AttachError(
            f"the default process group is bound to {bound}, and torch can then make new groups of"
            " all ranks only, but this model is on some of them: call init_process_group without"
            " device_id, or use a model on all ranks"
        )
    if partial:
        _count_alike(within, device)
    bind: dict[str, Any] = (
        {} if device.index is None or device.type == "cpu" or bound else {"device_id": device}
    )
    own: list[dist.ProcessGroup] = []
    for part in parts:
        # With `use_local_synchronization` only the members make a group, because ranks outside of
        # `within` do not call this. Otherwise all ranks must make all groups, in the same order.
        if partial and within.rank() not in part:
            continue
        ranks = [everywhere[rank] for rank in part]
        try:
            made = dist.new_group(
                ranks, timeout=timeout_of(within, device), use_local_synchronization=partial, **bind
            )
        except RuntimeError as error:
            raise HookRunError(
                f"the ranks cannot make another process group ({GLOO_INTERFACE}): {error}"
            ) from error
        if within.rank() in part:
            own.append(made)
    return own[0]


def check_futures(group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that collectives of `group` have futures, which DDP needs. Raise AttachError if they
    have none, as with some versions of torchcomms. All ranks of `group` must call this.
    """
    if not is_torchcomms(group, device):
        return
    work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    work.wait()
    try:
        work.get_future()
    except (RuntimeError, NotImplementedError) as error:
        raise AttachError(
            "the process group runs on torchcomms, whose collectives have no futures here, and"
            f" without them neither DDP nor its hooks work ({str(error).splitlines()[0]}): unset"
            " TORCH_DISTRIBUTED_USE_TORCHCOMMS"
        ) from error


def _count_alike(within: dist.ProcessGroup, device: torch.device) -> None:
    """Make all ranks of `within` members of equally many groups. torch 2.13 includes this number in
    the name under which the ranks of a new group find each other. If the numbers differ, the ranks
    wait until the timeout. A rank in fewer groups therefore creates unused groups of its own.
    """
    own = groups_here()
    most = torch.tensor([own], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=within)
    for _ in range(int(most) - own):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


Found = TypeVar("Found")
CPU = torch.device("cpu")
_LOST: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]]" = weakref.WeakKeyDictionary()
"""The lost ranks of each failed group. The futures of its buckets fail one by one, and all report
the same ranks.
"""
_NOTED: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
"""Default groups in whose store this rank has left a note. A rank that continues with another group
cannot distinguish old notes from new notes.
"""

CLOSED_LIMIT_S = 0.5
TIMED_OUT_LIMIT_S = 2.0
"""How long to wait for notes. Ranks whose connection was closed leave a note at once. A rank that
was busy when another rank's collective timed out may be late.
"""


def lost_ranks(group: dist.ProcessGroup, error: RuntimeError) -> list[int]:
    """Find the ranks that have ended or hang, after a collective of `group` has failed with
    `error`. Returns their ranks in the default group; empty if they are unknown, as on a rank that
    has continued after an earlier failure. Afterwards `group` cannot be used any more. Takes up to
    three times `CLOSED_LIMIT_S`, or `TIMED_OUT_LIMIT_S` after a timeout.
    """
    if (
        group.size() == 1
        or group in _ADOPTED
        or not dist.is_initialized()
        or backend_of(group, CPU) != "gloo"
    ):
        return []
    if group in _LOST:
        return _LOST[group]
    ranks, here = dist.get_process_group_ranks(group), group.rank()
    closed = [
        ranks[other] for other in range(group.size()) if other != here and _is_closed(other, group)
    ]
    world = dist.group.WORLD
    assert world is not None
    if not closed or world in _NOTED:
        return []
    _NOTED.add(world)
    timed_out = any(words in str(error).lower() for words in ("timed out", "timeout"))
    notes = _Notes(store_of(world), TIMED_OUT_LIMIT_S if timed_out else CLOSED_LIMIT_S)
    found = closed

    def look() -> None:
        nonlocal found
        with contextlib.suppress(RuntimeError):  # the process that holds the store has ended
            found = notes.find(ranks[here], closed, ranks)

    # If the process that holds the store is stopped, a call of the store never returns, whatever
    # its time limit.
    thread = threading.Thread(target=look, name="commhooks lost ranks", daemon=True)
    thread.start()
    thread.join(3.5 * notes.limit_s)
    if found:
        _LOST[group] = found
    return found


def note_lost_ranks(error: BaseException, group: dist.ProcessGroup) -> None:
    """Add to an error of gloo, raised by another collective than a hook's, which ranks have ended
    or hang. Afterwards `group` cannot be used any more.
    """
    if (
        isinstance(error, RuntimeError)
        and not isinstance(error, HookRunError)
        and "gloo" in str(error)
    ):
        lost = lost_ranks(group, error)
        note = f"commhooks: {described_lost(lost)}; look at the output there"
        if lost and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(note)


def described_lost(lost: Sequence[int]) -> str:
    who, verbs = (
        ("rank", "has ended or hangs") if len(lost) == 1 else ("ranks", "have ended or hang")
    )
    return f"{who} {listed(lost)} {verbs}"


def _is_closed(other: int, group: dist.ProcessGroup) -> bool:
    try:
        dist.irecv(torch.empty(1, dtype=torch.uint8), group=group, group_src=other, tag=TAG + 1)
    except RuntimeError:
        return True
    return False


class _Notes:
    def __init__(self, store: dist.Store, limit_s: float) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # restarts may share a store
        self._store = dist.PrefixStore(f"commhooks/failed/{attempt}", store)
        self.limit_s = limit_s

    def find(self, own: int, closed: Collection[int], group: Collection[int]) -> list[int]:
        self._store.set(str(own), "")  # leave a note
        others = [rank for rank in group if rank != own]
        # Look at the ranks with closed connections first, because a rank that was not in a
        # collective yet may not have noticed the failure.
        found = (
            self._silent(closed)
            or self._silent(others)
            or self._within_limit(lambda: self._named_by(others))
        )
        self._store.set(str(own), " ".join(map(str, found)))
        return found

    def _silent(self, ranks: Collection[int]) -> list[int]:
        silent = list(ranks)

        def all_noted() -> bool:
            silent[:] = [rank for rank in silent if not self._store.check([str(rank)])]
            return not silent

        self._within_limit(all_noted)
        return silent

    def _named_by(self, ranks: Collection[int]) -> list[int]:
        return sorted(
            {int(each) for rank in ranks for each in self._store.get(str(rank)).decode().split()}
        )

    def _within_limit(self, look: Callable[[], Found]) -> Found:
        deadline = time.monotonic() + self.limit_s
        while not (found := look()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found


def is_logging_rank(group: dist.ProcessGroup, shard_group: dist.ProcessGroup | None) -> bool:
    return group.rank() == 0 and (shard_group is None or shard_group.rank() == 0)
