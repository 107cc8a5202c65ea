"""Collects the residuals for a save: this rank's own, or those of all ranks in a joint save.

Residuals are the only tensors that differ between ranks, so they alone need communication.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.from_payload import kept_dtype
from commhooks.checkpoint.to_payload import SavedResiduals
from commhooks.comm.joint_save import Failure, JointSave, pieces
from commhooks.compressors.base import Compressor
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.engine.session import ExchangeDriver
from commhooks.errors import logger_of
from commhooks.gradients import precision
from commhooks.gradients.source import held_weakly

logger = logger_of(__name__)


class ResidualCollector:
    """Collects the residuals of a session. If that fails on any rank, no rank saves residuals.

    Args:
        hook: the name of the hook, for messages.
        plans_of: returns a compressor's plan for every parameter; an empty list for a compressor of
            whole buckets.
    """

    def __init__(
        self,
        hook: str,
        session: ExchangeDriver,
        group: dist.ProcessGroup,
        plans_of: Callable[[Compressor[Any]], list[UnitPlan]],
    ) -> None:
        self._hook = hook
        self._session = session
        self._plans_of = plans_of
        self._group = held_weakly(group)
        self._rank = group.rank()
        self._world_size = group.size()
        self._thread = threading.get_ident()
        self._joint_save: tuple[int, JointSave] | None = None

    def joint_save(self) -> JointSave | None:
        """Return the object that runs joint saves.

        Returns None before the first backward pass, in which the ranks agree on a nonce.
        """
        consensus = self._session.consensus
        if consensus.nonce is None:
            return None
        if self._joint_save is None or self._joint_save[0] != consensus.nonce:
            binding = consensus.binding
            device = next(iter(binding.names.named_parameters().values())).device
            saver = JointSave(
                self._group, self._rank, self._world_size, consensus.nonce, binding.shards, device
            )
            self._joint_save = (consensus.nonce, saver)
        return self._joint_save[1]

    def collect(
        self, form: str, *, mid_commit: bool, gather: bool, joint: bool, limit_s: float
    ) -> SavedResiduals:
        """Collect the residuals that a payload of this form holds.

        All ranks must call this, unless `joint` is false, each rank saves its own, or `form` is
        "drop".

        Args:
            form: "mean", "per_rank" or "drop".
            mid_commit: whether a commit is currently writing the state.
            gather: with "per_rank", collect the residuals of all ranks.
            joint: whether all ranks save together.
            limit_s: seconds to wait for the other ranks.
        """
        if form == "drop":
            return SavedResiduals(inexact=self._mid_commit if mid_commit else "")
        state = self._session.state
        lost = self._lost(mid_commit)
        if form == "per_rank" and not gather:
            return self._inexact(lost) if lost is not None else self._of_this_rank()
        saver = self.joint_save()
        residuals = self._residuals() if lost is None else {}
        if lost is None and (self._world_size == 1 or state.local_shared):
            # Each rank's residual is the mean.
            failure = saver.of_all_shards(None) if joint and saver is not None else None
            if failure is not None:
                return self._inexact(failure)
            return SavedResiduals("mean", list(range(self._world_size)), residuals)
        if not joint:
            return self._inexact(lost or self._failure(f"rank {self._rank} saved on its own"))
        if saver is None:
            return self._inexact(
                lost or self._failure("no backward pass has run since the hook was attached")
            )
        refusal = "" if lost is None else lost.reason
        return self._jointly(saver, form, residuals, refusal, mid_commit, limit_s)

    def _jointly(
        self,
        saver: JointSave,
        form: str,
        residuals: dict[str, torch.Tensor],
        refusal: str,
        mid_commit: bool,
        limit_s: float,
    ) -> SavedResiduals:
        """Collect the residuals of all ranks. `refusal`: why this rank has none; "" if it has."""
        averages = form == "mean"
        collected: dict[str, Any] = {}

        def collect(group: JointSave) -> None:
            for name, residual in residuals.items():
                collected[name] = group.mean(residual) if averages else group.gather(residual)

        failure = saver.run(
            self._session.state.step,
            collect,
            limit_s,
            # In another thread, a save's collectives could interleave with other collectives
            # differently on each rank.
            own_group=averages and self._on_accelerator and self._thread == threading.get_ident(),
            refusal=refusal,
            # A commit that failed on this rank may have succeeded on the others, which are then one
            # step ahead.
            others_may_be_ahead=mid_commit or self._session.held.commit_failed,
        )
        if failure is not None:
            return self._inexact(failure)
        if averages:
            self._rebase(collected)
        kind = "mean" if averages else "per_rank"
        return SavedResiduals(kind, list(range(self._world_size)), collected)

    def _of_this_rank(self) -> SavedResiduals:
        state = self._session.state
        return SavedResiduals(
            "per_rank",
            [self._rank],
            {name: [tensor] for name, tensor in state["residual"].items()},
            shares=bool(state.local) and self._session.consensus.reduction.nodes is not None,
        )

    def _residuals(self) -> dict[str, torch.Tensor]:
        """Return this rank's residuals, with the same names and shapes on every rank."""
        session = self._session
        state = session.state
        residuals = state["residual"]
        fields = [field for field in session.compressor.state_fields if not field.replicated]
        if not fields:
            return {}
        (field,) = fields  # only `RESIDUAL` may differ between ranks
        plans = self._plans_of(session.compressor)
        compressed = {plan.name: plan for plan in plans if plan.compressed}
        same_names = session.consensus.reduction.nodes is None and session.consensus.compared
        of_whole_buckets = not plans
        if same_names or of_whole_buckets or (state.local_shared and not residuals):
            # In the dtype of a load, not in FSDP's reduce_dtype, so that this run and a resumed run
            # have equal numbers.
            parameters = session.consensus.binding.names.named_parameters()
            return {
                name: residuals[name].to(kept_dtype(field, parameter, compressed.get(name)))
                for name, parameter in parameters.items()
                if name in residuals
            }
        return {
            name: (
                residuals[name]
                if name in residuals
                else torch.zeros(field.shape(plan), dtype=field.dtype(plan))
            )
            for name, plan in compressed.items()
        }

    def _rebase(self, means: dict[str, torch.Tensor]) -> None:
        """Replace the residuals by their saved means, as a run that loads them does."""
        session = self._session
        reduction = session.consensus.reduction
        residuals = session.state["residual"]
        parameters = session.consensus.binding.names.named_parameters()
        for name, mean in means.items():
            kept: dict[str, torch.Tensor] = {}
            reduction.rebase(kept, name, mean)
            if name not in kept:
                continue
            if name in residuals:
                # In pieces, because on an accelerator `overwrite` makes a copy there.
                for old, new in zip(pieces(residuals[name]), pieces(kept[name]), strict=True):
                    session.held.overwrite(old, new)
            else:  # another rank has loaded one
                residuals[name] = kept[name].to(parameters[name].device, copy=True)
        session.state.local_shared = reduction.nodes is None

    def _lost(self, mid_commit: bool) -> Failure | None:
        """Return why this rank has no residuals to save; None if it has."""
        state = self._session.state
        if not mid_commit and not state.local_missing:
            return None
        # A loaded payload without residuals concerns all ranks; a failed commit concerns only this
        # rank.
        return Failure(
            self._mid_commit if mid_commit else f"rank {self._rank} has lost its residuals",
            logged_here=not state.missing_was_said or self._rank == 0,
        )

    def _failure(self, reason: str) -> Failure:
        return Failure(reason, logged_here=self._rank == 0)

    def _inexact(self, failure: Failure) -> SavedResiduals:
        if failure.logged_here:
            logger.warning(
                "hook %s was saved at step %s without residuals, because %s. The saved state is"
                " marked inexact: a run that resumes from it starts from residuals of zero.",
                self._hook,
                self._session.state.step,
                failure.reason,
            )
        return SavedResiduals(inexact=failure.reason)

    @property
    def _mid_commit(self) -> str:
        return f"rank {self._rank} was committing a step at that moment"

    @property
    def _on_accelerator(self) -> bool:
        parameters = self._session.consensus.binding.names.named_parameters()
        return not precision.is_host_readable(next(iter(parameters.values())).device)
