"""Run joint saves: collectives that can neither hang nor interfere with those of the training.

Each save makes a gloo group and sends CPU copies in pieces; if all ranks request it, it uses their
own process group. The ranks meet twice through the store of their process group: before the first
collective, and after the last. At each meeting the first rank to write a decision (an atomic
compare-and-set) decides for all: rank 0 when all ranks are there, or any rank that has waited for
its time limit, has failed, or refuses to take part. So a save that not every rank joins ends before
any collective starts, and all ranks succeed or all report the same failure.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import gather_rows, gather_texts
from commhooks.comm.groups import GLOO_INTERFACE
from commhooks.errors import HookRunError, listed
from commhooks.gradients.torch_private import address_key, store_of

PIECE_NUMEL = 1 << 22
"""Elements per collective: 16 MiB in float32, a few seconds at 100 Mbit/s."""
_OWN_GROUP = "own group"
"""What a rank adds to its vote to request its own process group; the decision if all ranks do."""


@dataclass(frozen=True)
class Failure:
    """Explains why a joint save failed.

    `logged_here`: True on one of the ranks that know the reason.
    """

    reason: str
    logged_here: bool


class JointSave:
    """Runs the joint saves of one session; every rank of the group makes one, with equal `nonce`.

    Args:
        group: returns the process group of the ranks that save; raises HookRunError once it was
            destroyed.
        nonce: distinguishes the keys of this session in the store from the keys of other sessions.
        shards: returns the ranks with all shards of the model, which save together; None: not
            sharded.
    """

    def __init__(
        self,
        group: Callable[[], dist.ProcessGroup],
        rank: int,
        size: int,
        nonce: int,
        shards: Callable[[], dist.ProcessGroup] | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._ranks = group
        self._rank = rank
        self._size = size
        self._nonce = nonce
        self._shards = shards
        self._device = device
        self._limit = timedelta(0)
        self._written: list[str] = []  # keys, in the order of the saves
        self._saves: Counter[int] = Counter()
        # The store and the groups of the running save. `_group` is a ProcessGroupGloo, whose
        # collectives are missing from torch's type stubs.
        self._store: Any = None
        self._group: Any = None
        self._own_group: dist.ProcessGroup | None = None

    def run(
        self,
        step: int,
        collect: Callable[["JointSave"], None],
        limit_s: float,
        *,
        passes: int | None = None,
        own_group: bool = False,
        refusal: str = "",
        others_may_be_ahead: bool = False,
    ) -> Failure | None:
        """Run `collect`, which calls `mean` and `gather` on this object, jointly on all ranks.

        If a rank does not call this, the others return a failure after the time limit.

        Args:
            step: the step that is saved, equal on all ranks; part of the keys in the store.
            limit_s: seconds to wait for the other ranks, and for each piece of a collective.
            passes: the number of backward passes on this rank, if ranks with different numbers must
                not save together.
            own_group: use the ranks' process group instead of a new gloo group, if all ranks pass
                True, and in `mean` the device of the model. Nothing else may use that group
                meanwhile, and a rank waits for a rank that fails up to the timeout of the group.
                `gather` cannot be called.
            refusal: why this rank cannot take part. It does not wait, and no other rank waits for
                it.
            others_may_be_ahead: with `refusal`, whether the other ranks may be one step ahead of
                this rank.

        Returns:
            None if it succeeded on every rank, else the failure; all ranks succeed or all fail.
            Never raises because of another rank.
        """
        self._limit = timedelta(seconds=float(limit_s))
        try:
            self._store = dist.PrefixStore(f"commhooks/{self._nonce:016x}", store_of(self._ranks()))
            if refusal:
                failure: Failure | None = self._refuse(f"{self._next_place(step)}/begin", refusal)
                if others_may_be_ahead:
                    failure = self._refuse(f"{self._next_place(step + 1)}/begin", refusal)
            else:
                vote = f"{'' if passes is None else passes} {_OWN_GROUP if own_group else ''}"
                failure = self._attempt(self._next_place(step), collect, vote)
        except HookRunError as error:  # the group of the ranks was destroyed
            failure = Failure(str(error), logged_here=True)
        finally:
            self._store = None
            self._group = None
            self._own_group = None
        return self.of_all_shards(failure)

    def of_all_shards(self, failure: Failure | None) -> Failure | None:
        if self._shards is None:
            return failure
        group = self._shards()
        failed_here = torch.tensor([failure is not None], dtype=torch.int64, device=self._device)
        what = "the joint save of all shards (save on every rank, or on none)"
        failed = gather_rows(failed_here, group, None, what)
        if not failed.any():
            return None
        reasons = gather_texts("" if failure is None else failure.reason, group, self._device, what)
        if failure is None:
            return Failure(next(filter(None, reasons)), logged_here=False)
        is_first = not failed[: group.rank()].any()
        return replace(failure, logged_here=failure.logged_here and is_first)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of `tensor` over the ranks, on the CPU.

        All ranks must call this with equal shapes and dtypes.
        """
        if self._own_group is not None:
            total = torch.empty(tensor.shape, dtype=tensor.dtype)
            for mine, mean in zip(pieces(tensor.detach()), pieces(total), strict=True):
                piece = mine.to(self._device, copy=True)  # the only copy on the device
                dist.all_reduce(piece, group=self._own_group)
                mean.copy_(piece)
            return total.div_(self._size)
        total = tensor.detach().to("cpu", copy=True).contiguous()
        for piece in pieces(total):
            self._group.allreduce([piece]).wait(self._limit)
        return total.div_(self._size)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return `tensor` of all ranks, in rank order, on the CPU.

        All ranks must call this with equal shapes and dtypes.
        """
        sent = tensor.detach().cpu().contiguous()
        gathered = [torch.empty_like(sent) for _ in range(self._size)]
        for mine, *theirs in zip(*map(pieces, (sent, *gathered)), strict=True):
            self._group.allgather([theirs], [mine]).wait(self._limit)
        return gathered

    def _next_place(self, step: int) -> str:
        self._saves[step] += 1
        return f"{step}.{self._saves[step]}"

    def _attempt(
        self, place: str, collect: Callable[["JointSave"], None], vote: str
    ) -> Failure | None:
        failure, own_group = self._meet(f"{place}/begin", vote)
        if failure is not None:
            return failure
        what = f"could not connect to the other ranks over gloo ({GLOO_INTERFACE})"
        try:
            if own_group:
                self._own_group = self._ranks()
            else:
                self._written += [f"{place}/gloo/{address_key(self._rank)}"]
                store = dist.PrefixStore(f"{place}/gloo", self._store)
                self._group = dist.ProcessGroupGloo(store, self._rank, self._size, self._limit)
            what = "failed"
            collect(self)
        except Exception as error:  # torch has no narrower class for a dead rank or a timeout
            # Refuse before the group is destroyed, which closes the connections and makes the other
            # ranks fail in turn.
            reason = f"rank {self._rank} {what}: {type(error).__name__}: {error}"
            return self._refuse(f"{place}/end", reason)
        before = len(self._written)
        failure, _ = self._meet(f"{place}/end", "")
        if failure is not None:
            return failure
        # All ranks have ended this save, so none needs the keys of earlier saves. A rank that has
        # missed such a save, and comes to it after loading an earlier step, waits for its time
        # limit.
        with contextlib.suppress(RuntimeError):  # the process that hosts the store has ended
            for key in self._written[:before]:
                self._store.delete_key(key)
        del self._written[:before]
        return None

    def _meet(self, place: str, vote: str) -> tuple[Failure | None, bool]:
        """Wait for all ranks. Return the failure, and whether all ranks request their own group.

        Both are the same on all ranks. `vote` has the number of passes, which must be the same on
        all ranks, a space, and `_OWN_GROUP` or nothing.
        """
        store = self._store_at(place)
        ballots = [f"vote{rank}" for rank in range(self._size)]
        late = f"not every rank took part within {self._limit.total_seconds():g} s"
        verdict = ""
        try:
            store.set(f"vote{self._rank}", vote)
            try:
                store.wait(ballots if self._rank == 0 else ["decision"], self._limit)
            except RuntimeError:  # a timeout: a TCPStore raises a subclass, DistStoreError
                verdict = f"{self._rank} {late}"
            if self._rank == 0 and not verdict:
                verdict = _counted([store.get(ballot).decode() for ballot in ballots])
            if verdict:
                decision = store.compare_set("decision", "", verdict)
            else:
                decision = store.get("decision")
        except RuntimeError:  # the process that hosts the store has ended
            return Failure(late, logged_here=True), False
        return self._failure(decision), decision.decode() == _OWN_GROUP

    def _refuse(self, place: str, reason: str) -> Failure:
        store = self._store_at(place)
        try:
            decision = store.compare_set("decision", "", f"{self._rank} {reason}")
            store.set(f"vote{self._rank}", "")
        except RuntimeError:  # the process that hosts the store has ended
            return Failure(reason, logged_here=True)
        failure = self._failure(decision)
        assert failure is not None  # rank 0 has not had the vote of this rank
        return failure

    def _store_at(self, place: str) -> dist.Store:
        self._written += [f"{place}/vote{self._rank}", f"{place}/decision"]
        return dist.PrefixStore(place, self._store)

    def _failure(self, decision: bytes) -> Failure | None:
        if decision.decode() in ("all", _OWN_GROUP):
            return None
        rank, _, reason = decision.decode().partition(" ")
        return Failure(reason, int(rank) == self._rank)


def _counted(votes: list[str]) -> str:
    """Return the decision of rank 0 on the votes of all ranks; see `JointSave._meet`."""
    split = [vote.partition(" ") for vote in votes]
    passes = sorted({count for count, _, _ in split}, key=lambda count: int(count or 0))
    if len(passes) > 1:
        return f"0 the ranks have made {listed(passes, ' and ')} backward passes"
    return _OWN_GROUP if all(group == _OWN_GROUP for _, _, group in split) else "all"


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.view(-1).split(PIECE_NUMEL)
