"""Collectives for saving that can neither hang nor interfere with those of the training.

They run on a gloo group of each save's own, on CPU copies, in pieces with a time limit each. It ends with the save, so
that no training leaves one behind, and none is idle for hours between two saves. Before the first piece each rank
writes a vote to the store of the process group. The decision whether to start is made once, by the first rank to write
it (an atomic compare-and-set): rank 0 when all votes are there, or any rank whose time limit has passed. A save that
not every rank joins is therefore detected before any collective starts. A second vote after the last piece tells every
rank whether all of them succeeded. A rank that fails closes its connections, which fails the others: the first to fail
writes why to the store before, and all ranks report this.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.groups import GLOO_INTERFACE
from commhooks.errors import HookRunError
from commhooks.gradients.torch_private import address_key, store_of

PIECE_NUMEL = 1 << 22
"""Elements per collective: 16 MiB in float32, a few seconds at 100 Mbit/s."""


class JointSave:
    """Joint saves of one session. Every rank of the group makes one, with the same `nonce`.

    Args:
        group: returns the group of the ranks that save; raises HookRunError once it was destroyed.
        rank, size: of this rank in it, and of it.
        nonce: distinguishes the keys of this session in the store from those of others.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup], rank: int, size: int, nonce: int) -> None:
        self._ranks, self._rank, self._size, self._nonce = group, rank, size, nonce
        self._limit = timedelta(0)
        self._written: list[str] = []  # keys, in the order of the saves
        self._saves: Counter[int] = Counter()
        self._declined = ""
        # Of the running save. The group is a ProcessGroupGloo; torch's type stubs lack its collectives.
        self._store: Any = None
        self._group: Any = None
        self.logging_rank = 0
        """The one rank that logs a warning about the latest failure; it is a rank that knows of it."""

    def run(self, step: int, collect: Callable[["JointSave"], None], limit_s: float, passes: int | None = None) -> str:
        """Run `collect`, which calls `mean` and `gather` on this object, jointly on all ranks. All ranks should call
        this; if one does not, the others return a failure after the time limit.

        Args:
            step: the step that is saved, equal on all ranks; part of the keys in the store.
            limit_s: seconds to wait for the other ranks, and for each piece.
            passes: the backward passes that this rank has made, where ranks with different numbers must not save.

        Returns:
            "" if it succeeded on every rank, else the reason of the failure; all ranks succeed or all fail. Never waits
            longer than the limits and never raises because of another rank.
        """
        self._limit, self.logging_rank, self._declined = timedelta(seconds=limit_s), 0, ""
        self._saves[step] += 1
        place, late = f"{step}.{self._saves[step]}", f"not every rank took part within {limit_s:g} s"
        try:
            self._store = self._shared_store()
            votes = self._vote(f"{place}/begin", "" if passes is None else str(passes))
            if votes is None:
                return self._declined or late
            if len(different := sorted(set(votes), key=lambda each: int(each or 0))) > 1:
                return f"the ranks have made {' and '.join(different)} backward passes"
            failure, before = self._try_collecting(place, collect), len(self._written)
            outcome = self._vote(f"{place}/end", failure)
            failures = [late] if outcome is None else [each for each in outcome if each]
            if outcome is not None:
                self._forget(before)
            return failures[0] if failures else ""
        except HookRunError as error:  # the group of the ranks was destroyed
            self.logging_rank = self._rank
            return str(error)
        finally:
            self._store = self._group = None

    def decline(self, steps: Sequence[int], reason: str) -> None:
        """Tell the ranks that save, or will, at one of these steps why this one cannot take part, so that they need not
        wait for it."""
        with contextlib.suppress(HookRunError, RuntimeError):  # there is nobody to tell any more
            shared = self._shared_store()
            for each in steps:
                self._saves[each] += 1
                place = f"{each}.{self._saves[each]}/begin"
                self._written += [f"{place}/decision", f"{place}/vote{self._rank}"]
                store = dist.PrefixStore(place, shared)
                store.compare_set("decision", "", f"{self._rank} {reason}")
                store.set(f"vote{self._rank}", "")

    def _shared_store(self) -> dist.Store:
        return dist.PrefixStore(f"commhooks/{self._nonce:016x}", store_of(self._ranks()))

    def _try_collecting(self, place: str, collect: Callable[["JointSave"], None]) -> str:
        """Connect the ranks and run `collect`. Returns "" or what failed: a dead rank or a timeout, for which torch has
        no narrower class than Exception."""
        self._written += [f"{place}/gloo/{address_key(self._rank)}"]
        try:
            store = dist.PrefixStore(f"{place}/gloo", self._store)
            self._group = dist.ProcessGroupGloo(store, self._rank, self._size, self._limit)
        except Exception as error:
            return self._first_failure(
                place,
                f"rank {self._rank} could not connect to the other ranks over gloo ({GLOO_INTERFACE}): "
                f"{type(error).__name__}: {error}",
            )
        try:
            collect(self)
        except Exception as error:
            failure = self._first_failure(place, f"rank {self._rank} failed: {type(error).__name__}: {error}")
            self._group = None  # closes the connections: the others need not wait for this rank
            return failure
        return ""

    def _first_failure(self, place: str, own: str) -> str:
        """Of the failures of this save the first, which is the cause of the others; the same on all ranks that fail."""
        self._written += [f"{place}/cause"]
        with contextlib.suppress(RuntimeError):  # the process that hosts the store has ended
            return self._store.compare_set(f"{place}/cause", "", own).decode()
        return own

    def _forget(self, count: int) -> None:
        """Delete the first `count` keys that this rank has written. All ranks have voted at the end of a save, so they
        are through with what came before in it and with all earlier saves. A rank that has missed one of those, and
        comes to it after a load of an earlier step, waits there for its time limit, as the first one does."""
        with contextlib.suppress(RuntimeError):  # the process that hosts the store has ended
            for key in self._written[:count]:
                self._store.delete_key(key)
        del self._written[:count]

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean of `tensor` over the ranks, on the CPU. All ranks must call this with equal shapes and dtypes."""
        total = tensor.detach().to("cpu", copy=True).contiguous()
        for piece in total.view(-1).split(PIECE_NUMEL):
            self._group.allreduce([piece]).wait(self._limit)
        return total.div_(self._size)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks in rank order, on the CPU. All ranks must call this with equal shapes and dtypes."""
        own = tensor.detach().cpu().contiguous()
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        pieces = [own.view(-1).split(PIECE_NUMEL)] + [each.view(-1).split(PIECE_NUMEL) for each in gathered]
        for mine, *theirs in zip(*pieces, strict=True):
            self._group.allgather([theirs], [mine]).wait(self._limit)
        return gathered

    def _vote(self, place: str, vote: str) -> list[str] | None:
        """The votes of all ranks, or None if not all of them voted in time; the same on all ranks. None also where the
        process that hosts the store has ended."""
        store = dist.PrefixStore(place, self._store)
        ballots = [f"vote{rank}" for rank in range(self._size)]
        verdict = "all"
        self._written += [f"{place}/vote{self._rank}", f"{place}/decision"]
        try:
            store.set(f"vote{self._rank}", vote)
            try:
                store.wait(ballots if self._rank == 0 else ["decision"], self._limit)
            except RuntimeError:  # a timeout: DistStoreError from a TCPStore, RuntimeError from a FileStore
                verdict = str(self._rank)
            if self._rank == 0 or verdict != "all":
                decision = store.compare_set("decision", "", verdict)
            else:
                decision = store.get("decision")
            if decision == b"all":
                return [store.get(ballot).decode() for ballot in ballots]
            # The rank that declined, or whose time limit passed: rank 0 may not have joined this save.
            rank, _, self._declined = decision.decode().partition(" ")
            self.logging_rank = int(rank)
        except RuntimeError:
            self.logging_rank = self._rank
        return None
