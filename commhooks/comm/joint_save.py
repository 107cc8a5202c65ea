"""Collectives while saving, that can neither hang nor disturb the training's own.

They run on a gloo group of our own, on CPU copies, in pieces with a time limit each. Before the first one the ranks
announce themselves in the store of the process group. Whether to go ahead is decided once, by the first to write the
decision (an atomic compare-and-set): rank 0 when all have announced themselves, or whoever has waited too long. A save
that not every rank joins is thus found out where it harms nothing. The same vote, taken again after the last piece,
tells whether every rank has got everything.
"""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PIECE_NUMEL = 1 << 22
"""Numbers per collective: 16 MB in float32, some seconds on a link of 100 Mbit."""


class JointSave:
    """Saves of one registration. Every rank of `group` has one, made with the same `nonce`.

    Args:
        nonce: tells this registration's keys in the store from those of any other.
    """

    def __init__(self, group: dist.ProcessGroup, nonce: int) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._store = dist.PrefixStore(f"commhooks/{nonce:016x}", group.get_group_store())
        self._limit = timedelta(0)
        self._voted: list[str] = []
        self._saves: Counter[int] = Counter()
        self._group: Any = None  # a ProcessGroupGloo, whose collectives torch's stubs leave out
        self._generation = 0
        self._broken = True  # there is no group yet
        self.speaker = 0
        """The rank that may warn of the latest failure: of those that know of it, one."""

    def run(self, step: int, collect: Callable[["JointSave"], None], limit_s: float) -> str:
        """Run `collect`, which calls `mean` and `gather` on this object, jointly on all ranks.

        Args:
            limit_s: seconds to wait for the other ranks, and for each piece.

        Returns:
            "" if it succeeded on every rank, else why not; a failure is one on every rank. Never waits longer than the
            limits and never raises for what another rank did or did not do.
        """
        self._limit = timedelta(seconds=limit_s)
        self.speaker = 0
        self._saves[step] += 1
        place = f"{step}.{self._saves[step]}"
        generation = self._generation + (1 if self._broken else 0)
        late = f"not every rank took part within {limit_s:g} s"
        decision = self._try_vote(f"{place}/begin", str(generation))
        if decision is None:
            return late
        failure = ""
        try:
            self._use_generation(max(map(int, decision)))
            collect(self)
        except Exception as error:  # a dead rank, a time-out: torch has no narrower class for them
            failure = f"rank {self._rank} failed: {type(error).__name__}: {error}"
        outcome = self._try_vote(f"{place}/end", failure)
        failures = [late] if outcome is None else [each for each in outcome if each]
        if failures:
            self._broken = True
            return failures[0]
        self._forget_votes(place)
        return ""

    def _try_vote(self, place: str, vote: str) -> list[str] | None:
        try:
            return self._vote(place, vote)
        except RuntimeError:  # the store itself is gone, with the process that kept it
            self.speaker = self._rank
            return None

    def _forget_votes(self, place: str) -> None:
        """Take out of the store what nobody reads any more: all ranks have voted at the end of `place`, so they are
        beyond its beginning, and beyond every save before it."""
        if self._rank == 0:
            for old in (*self._voted, f"{place}/begin"):
                for key in ("decision", *(f"vote{rank}" for rank in range(self._size))):
                    self._store.delete_key(f"{old}/{key}")
            self._voted = [f"{place}/end"]

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean of `tensor` over the ranks, on the CPU."""
        total = tensor.detach().to("cpu", copy=True).contiguous()
        for piece in total.view(-1).split(PIECE_NUMEL):
            self._live_group().allreduce([piece]).wait(self._limit)
        return total.div_(self._size)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """`tensor` of every rank, on the CPU."""
        own = tensor.detach().cpu().contiguous()
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        pieces = [own.view(-1).split(PIECE_NUMEL)] + [each.view(-1).split(PIECE_NUMEL) for each in gathered]
        for mine, *theirs in zip(*pieces, strict=True):
            self._live_group().allgather([theirs], [mine]).wait(self._limit)
        return gathered

    def _live_group(self) -> Any:
        assert self._group is not None
        return self._group

    def _use_generation(self, generation: int) -> None:
        """A group in which a collective has failed stays broken for all its members: make another one."""
        if self._group is None or self._broken or generation != self._generation:
            store = dist.PrefixStore(f"gloo{generation}", self._store)
            self._group = dist.ProcessGroupGloo(store, self._rank, self._size, self._limit)
            self._generation, self._broken = generation, False

    def _vote(self, place: str, vote: str) -> list[str] | None:
        """The votes of all ranks, or None where they did not all vote in time; the same on every rank."""
        store = dist.PrefixStore(place, self._store)
        store.set(f"vote{self._rank}", vote)
        ballots = [f"vote{rank}" for rank in range(self._size)]
        verdict = "all"
        try:
            store.wait(ballots if self._rank == 0 else ["decision"], self._limit)
        except RuntimeError:  # a time-out: DistStoreError from a TCPStore, a plain RuntimeError from a FileStore
            verdict = str(self._rank)
        if self._rank == 0 or verdict != "all":
            decision = store.compare_set("decision", "", verdict)
        else:
            decision = store.get("decision")
        if decision != b"all":
            self.speaker = int(decision)  # who gave up: rank 0 may never learn of a save that it did not join
            return None
        return [store.get(ballot).decode() for ballot in ballots]
