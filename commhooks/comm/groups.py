"""Manage process groups: their backends, new groups, and the ranks that a failed collective lost.

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
    """Return the name of the backend for `device`.

    A group may have one per device type ("cpu:gloo,cuda:nccl").
    """
    if group in _ADOPTED:
        return _ADOPTED[group]
    parts = [part.partition(":") for part in dist.get_backend_config(group).split(",")]
    by_device_type = {device_type: backend for device_type, colon, backend in parts if colon}
    name: str = by_device_type.get(device.type, dist.get_backend(group))
    return name


_ADOPTED: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def adopt(group: dist.ProcessGroup, backend: str) -> None:
    """Register the backend of a group that torch.distributed does not know, as torchft's."""
    _ADOPTED[group] = backend


GLOO_INTERFACE = (
    "on several machines set GLOO_SOCKET_IFNAME to the network interface between them; an exclusion"
    " such as ^lo works with NCCL only"
)
"""Advice in messages about ranks that cannot connect over gloo."""


def new_group(
    parts: Sequence[Sequence[int]], within: dist.ProcessGroup, device: torch.device
) -> dist.ProcessGroup:
    """Divide the ranks of `within` into new groups, and return the group of this rank.

    All ranks of `within` must call this with the same `parts`. The groups have the timeout of
    `within`; torch keeps them until `destroy_process_group`.

    Args:
        parts: the ranks of each group, as ranks in `within`; every rank is in one of them.
        device: the device of this rank's model; the group is bound to it if it is an accelerator.

    Raises:
        AttachError: torch can only make groups together with all ranks of the run, and `within`
            lacks some of them.
        HookRunError: the ranks cannot connect.
    """
    everywhere = dist.get_process_group_ranks(within)
    world = dist.group.WORLD
    assert world is not None
    bound = getattr(world, "bound_device_id", None)
    partial = len(everywhere) < world.size()
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
    options = _group_options(within, device, partial=partial, bind=bound is None)
    here: list[dist.ProcessGroup] = []
    for part in parts:
        # With `use_local_synchronization` only the members make a group, because ranks outside of
        # `within` do not call this. Otherwise all ranks must make all groups, in the same order.
        if partial and within.rank() not in part:
            continue
        ranks = [everywhere[rank] for rank in part]
        try:
            group = dist.new_group(ranks, **options)
        except RuntimeError as error:
            raise HookRunError(
                f"the ranks cannot make another process group ({GLOO_INTERFACE}): {error}"
            ) from error
        if within.rank() in part:
            here.append(group)
    return here[0]


def _group_options(
    within: dist.ProcessGroup, device: torch.device, *, partial: bool, bind: bool
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "timeout": timeout_of(within, device),
        "use_local_synchronization": partial,
    }
    if bind and device.index is not None and device.type != "cpu":
        options["device_id"] = device
    return options


def check_futures(group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that collectives of `group` have futures, which DDP needs.

    Raise AttachError if they have none, as with some versions of torchcomms. All ranks of `group`
    must call this.
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
    """Make all ranks of `within` members of equally many groups.

    torch 2.13 includes this number in the name under which the ranks of a new group find each
    other. If the numbers differ, the ranks wait until the timeout. A rank in fewer groups therefore
    creates unused groups of its own.
    """
    here = groups_here()
    most = torch.tensor([here], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=within)
    for _ in range(int(most) - here):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


Result = TypeVar("Result")
CPU = torch.device("cpu")
_LOST: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]]" = weakref.WeakKeyDictionary()
"""The lost ranks of each failed group.

The futures of its buckets fail one by one, and all report the same ranks.
"""
_NOTED: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
"""Default groups in whose store this rank has left a note.

A rank that continues with another group cannot distinguish old notes from new notes.
"""

CLOSED_LIMIT_S = 0.5
"""How long to wait for notes. Ranks whose connection was closed leave a note at once."""
TIMED_OUT_LIMIT_S = 2.0
"""The same after a timeout: a rank that was busy when a collective timed out may be late."""


def lost_ranks(group: dist.ProcessGroup, error: RuntimeError) -> list[int]:
    """Find the ranks that have ended or hang, after a collective of `group` has failed.

    Returns their ranks in the default group; empty if they are unknown, as on a rank that has
    continued after an earlier failure. Afterwards `group` cannot be used any more. Takes up to
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
    ranks = dist.get_process_group_ranks(group)
    here = group.rank()
    peers = [rank for rank in range(group.size()) if rank != here]
    closed = [ranks[peer] for peer in peers if _is_closed(peer, group)]
    world = dist.group.WORLD
    assert world is not None
    if not closed or world in _NOTED:
        return []
    _NOTED.add(world)
    timed_out = any(words in str(error).lower() for words in ("timed out", "timeout"))
    notes = _Notes(store_of(world), TIMED_OUT_LIMIT_S if timed_out else CLOSED_LIMIT_S)
    lost = closed

    def look() -> None:
        nonlocal lost
        with contextlib.suppress(RuntimeError):  # the process that holds the store has ended
            lost = notes.find(ranks[here], closed, ranks)

    # If the process that holds the store is stopped, a call of the store never returns, whatever
    # its time limit.
    thread = threading.Thread(target=look, name="commhooks lost ranks", daemon=True)
    thread.start()
    thread.join(3.5 * notes.limit_s)
    if lost:
        _LOST[group] = lost
    return lost


def note_lost_ranks(error: BaseException, group: dist.ProcessGroup) -> None:
    """Add to an error of gloo which ranks have ended or hang.

    It is for collectives that are not a hook's. Afterwards `group` cannot be used any more.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, HookRunError):
        return
    if "gloo" not in str(error):
        return
    lost = lost_ranks(group, error)
    if lost and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"commhooks: {described_lost(lost)}; look at the output there")


def described_lost(lost: Sequence[int]) -> str:
    if len(lost) == 1:
        return f"rank {listed(lost)} has ended or hangs"
    return f"ranks {listed(lost)} have ended or hang"


def _is_closed(peer: int, group: dist.ProcessGroup) -> bool:
    try:
        dist.irecv(torch.empty(1, dtype=torch.uint8), group=group, group_src=peer, tag=TAG + 1)
    except RuntimeError:
        return True
    return False


class _Notes:
    def __init__(self, store: dist.Store, limit_s: float) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # restarts may share a store
        self._store = dist.PrefixStore(f"commhooks/failed/{attempt}", store)
        self.limit_s = limit_s

    def find(self, here: int, closed: Collection[int], group: Collection[int]) -> list[int]:
        """Leave a note as rank `here`, and return the lost ranks."""
        self._store.set(str(here), "")
        others = [rank for rank in group if rank != here]
        # Look at the ranks with closed connections first, because a rank that was not in a
        # collective yet may not have noticed the failure.
        lost = (
            self._silent(closed)
            or self._silent(others)
            or self._within_limit(lambda: self._named_by(others))
        )
        self._store.set(str(here), " ".join(map(str, lost)))
        return lost

    def _silent(self, ranks: Collection[int]) -> list[int]:
        silent = list(ranks)

        def all_noted() -> bool:
            silent[:] = [rank for rank in silent if not self._store.check([str(rank)])]
            return not silent

        self._within_limit(all_noted)
        return silent

    def _named_by(self, ranks: Collection[int]) -> list[int]:
        notes = [self._store.get(str(rank)).decode() for rank in ranks]
        return sorted({int(rank) for note in notes for rank in note.split()})

    def _within_limit(self, look: Callable[[], Result]) -> Result:
        deadline = time.monotonic() + self.limit_s
        while not (result := look()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return result


def is_logging_rank(group: dist.ProcessGroup, shard_group: dist.ProcessGroup | None) -> bool:
    return group.rank() == 0 and (shard_group is None or shard_group.rank() == 0)
