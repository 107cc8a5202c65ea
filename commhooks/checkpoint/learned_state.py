"""Convert the learned state of a session to a checkpoint payload and back."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint import payload
from commhooks.checkpoint.checks import COUNTERS, check_count, damaged
from commhooks.checkpoint.payload import Contribution
from commhooks.comm.joint_save import JointSave
from commhooks.comm.shards import is_logging_rank
from commhooks.compressors.adaptive import AdaptiveCompressor
from commhooks.compressors.base import RESIDUAL, Compressor
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.engine.learning import Learning
from commhooks.engine.state import LearnedState
from commhooks.errors import HookConfigError, logger_of
from commhooks.gradients.precision import compute_dtype
from commhooks.gradients.source import GradientSource, held_weakly

logger = logger_of(__name__)


class SavedLearnedState:
    """Saves and loads the learned state of a session on this rank.

    Args:
        hook: name of the hook in the payload.
        plans: returns the plan of every parameter with a compressor; an empty list for one of whole buckets.
    """

    step_is = "step"
    """What `step` counts."""
    not_begun_anew = ""
    """What `begin_anew` does not reset, as the end of a sentence for messages."""

    def __init__(
        self, hook: str, session: Learning, group: dist.ProcessGroup, plans: Callable[[Compressor[Any]], list[UnitPlan]]
    ) -> None:
        self._hook = hook
        self._session = session
        self._group = held_weakly(group)
        self._plans_with = plans
        self._rank, self._world_size = group.rank(), group.size()
        self._is_logging_rank = is_logging_rank(group, session.consensus.binding.shard_group)
        self._joint_save: tuple[int, JointSave] | None = None
        self._first_start = session.compressor.start_step

    def begin_anew(self) -> None:
        """Reset all learned state and the start step, if that was changed by a load."""
        compressor = self._session.compressor.with_start(self._first_start)
        self._take_over(LearnedState.of(compressor.state_fields), compressor)

    @property
    def step(self) -> int:
        return self._session.state.step

    def save(self, residual: str, *, limit_s: float, gather: bool = False, joint: bool = True) -> dict[str, Any]:
        """See `CommHook.state_dict`. `limit_s`: seconds to wait for the other ranks."""
        session = self._session
        with session.held.lock, contextlib.ExitStack() as body:
            # A signal handler may run in the middle of a commit of the same thread, which holds this reentrant lock.
            torn = session.held.in_commit
            if not torn:
                body.enter_context(session.held.settled())
            if residual == "drop":
                local = Contribution(exact=not torn)
            elif torn:
                self._warn_inexact("it was being written at that moment", self._rank)
                local = Contribution(exact=False)
            else:
                local = self._collect(residual == "mean", residual == "per_rank" and not gather, joint, limit_s)
            return payload.build(self._target(session.compressor), session.state, local, session.counters.cumulative())

    def prepare_load(self, content: dict[str, Any], strict: bool) -> Callable[[], None]:
        """Check all of `content` without changing anything. Returns a function that applies it.

        Raises:
            PayloadError: `content` is damaged, or, with `strict`, of another model.
        """
        start, option = self._session.compressor.start_step, self._session.compressor.config.start_option
        if option is not None:
            start = content["options"].get(option, start)
            check_count({option: start}, option, 0)
        same_ranks = content.get("world_size") == self._world_size
        try:
            compressor = self._session.compressor.with_start(start)
            if isinstance(compressor, AdaptiveCompressor):
                compressor = compressor.with_notes(content.get("notes"), content["step"], same_ranks=same_ranks)
        except HookConfigError as error:
            raise damaged(str(error)) from error
        state = payload.read(content, self._target(compressor), strict=strict)
        self._drop_uncompressed(state, compressor)

        def take_over() -> None:
            self._take_over(state, compressor)
            self._session.counters.resume_from(content[COUNTERS])

        return take_over

    def resumed(self, content: dict[str, Any]) -> str:
        """What became of the residuals in `content`, which was loaded, and of the start step, for the log line."""
        said, state, ranks = "", self._session.state, content["world_size"]
        if state.local:
            if not content[COUNTERS]["compressed_steps"]:
                said = "; not yet compressing"
            elif state.local_missing or content["residual"] == "none":
                said = "; residuals: none, they start from zero"
            elif all(entry["residual"] is None for entry in content["parameters"].values()):
                said = "; nothing is compressed"
            elif content["residual"] == "per_rank" and ranks == self._world_size:
                said = "; residuals: each rank's own"
            else:
                said = f"; residuals: mean of {ranks} rank{'s' if ranks > 1 else ''}"
        option, start = self._session.compressor.config.start_option, self._session.compressor.start_step
        if option is not None and start != self._first_start and max(start, self._first_start) > content["step"]:
            said += f"; {option}={start} as it was saved, not {self._first_start}"
        return said

    def kept_fields(self, source: GradientSource) -> dict[str, dict[str, torch.dtype]]:
        """What the hook keeps for each number of a parameter, such as "residual": for every whole parameter of the
        model that could have one, its dtype."""
        compressor = self._session.compressor
        if not self._session.state.local:
            return {}
        names, config = source.whole, compressor.config
        infos = [ParameterInfo.of(n, p, names, config, id(p) in source.sparse) for n, p in names.known().items()]
        if not compressor.per_bucket:
            infos = [info for info, may in zip(infos, compressor.may_compress(infos), strict=True) if may]
        return {RESIDUAL.key: {each.name: compute_dtype(each.parameter.dtype) for each in infos if not each.sparse}}

    def joint_save(self) -> JointSave | None:
        """The joint saves of this session; None before the first backward pass, in which the ranks agree on a nonce."""
        nonce = self._session.consensus.nonce
        if nonce is None:
            return None
        if self._joint_save is None or self._joint_save[0] != nonce:
            self._joint_save = (nonce, JointSave(self._group, self._rank, self._world_size, nonce))
        return self._joint_save[1]

    def _drop_uncompressed(self, state: LearnedState, compressor: Compressor[Any]) -> None:
        """Drop residuals of parameters that are no longer compressed: no step would use them, but they would be saved
        again, and a later run that compresses these parameters would add them."""
        # Empty for compressors of whole buckets, where every parameter may have a residual.
        plans = self._plans_with(compressor)
        dropped = [plan.name for plan in plans if not plan.compressed and plan.name in state["residual"]]
        for name in dropped:
            del state["residual"][name]
        if dropped and self._is_logging_rank:
            logger.warning(
                "hook %s compresses these parameters no longer, so that the residuals saved for them are dropped: %s",
                self._hook,
                ", ".join(dropped),
            )

    def _collect(self, mean: bool, alone: bool, joint: bool, limit_s: float) -> Contribution:
        """The residuals for the payload: their mean; or those of this rank `alone`, without communication; or those of
        all ranks. But for `alone`, and unless `joint` is false, all ranks must call this."""
        state, everyone, saver = self._session.state, list(range(self._world_size)), self.joint_save()
        if state.local_missing:
            if not alone and joint and saver is not None:
                # A commit that failed here may have succeeded on the other ranks, which are one step ahead then.
                steps = [state.step, state.step + 1] if self._session.held.torn else [state.step]
                saver.decline(steps, f"rank {self._rank} has lost its own")
            # Rank 0 warns if residuals were missing in a loaded payload, which concerns all ranks; this rank warns
            # if a commit failed on it.
            self._warn_inexact("this rank has lost its own", 0 if state.missing_was_said else self._rank)
            return Contribution(exact=False)
        if alone:
            shares = bool(state.local) and not self._session.consensus.arrangement.complete
            own = {name: [tensor] for name, tensor in state["residual"].items()}
            return Contribution("per_rank", [self._rank], own, shares=shares)
        residuals = self._residuals()
        if self._world_size == 1 or state.local_shared:
            # No communication needed: the residual of each rank is the mean.
            return Contribution("mean", everyone, residuals)
        collected: dict[str, Any] = {}

        def collect(group: JointSave) -> None:
            for name, mine in residuals.items():
                collected[name] = group.mean(mine) if mean else group.gather(mine)

        logging_rank = 0
        if not joint:
            reason = "this rank saves on its own"
        elif saver is None:
            reason = "no backward pass has run since the hook was attached"
        else:
            reason, logging_rank = saver.run(state.step, collect, limit_s), saver.logging_rank
        if reason:
            self._warn_inexact(reason, logging_rank)
            return Contribution(exact=False)
        if mean:
            self._rebase(collected)
        return Contribution("mean" if mean else "per_rank", everyone, collected)

    def _residuals(self) -> dict[str, torch.Tensor]:
        """This rank's residuals; the same names on all ranks."""
        session, state, own = self._session, self._session.state, self._session.state["residual"]
        field = next((each for each in session.compressor.state_fields if not each.replicated), None)
        if field is None:
            return {}
        same_names = session.consensus.arrangement.complete and session.consensus.compared
        if same_names or session.compressor.per_bucket or (state.local_shared and not own):
            target = self._target(session.compressor)
            # In one dtype, whichever FSDP reduces in: the run that saves goes on with what it has saved.
            return {n: own[n].to(target.kept_dtype(field, n)) for n in target.parameters if n in own}
        return {
            plan.name: own[plan.name] if plan.name in own else torch.zeros(field.shape(plan), dtype=field.dtype(plan))
            for plan in self._plans_with(session.compressor)
            if plan.compressed
        }

    def _rebase(self, means: dict[str, torch.Tensor]) -> None:
        """Continue from the means that were saved, as a run that loads them does."""
        session, state = self._session, self._session.state
        for name, mean in means.items():
            kept: dict[str, torch.Tensor] = {}
            session.consensus.arrangement.rebase(kept, name, mean)
            if name in kept and name in state["residual"]:
                session.held.overwrite(state["residual"][name], kept[name])
            elif name in kept:  # another rank has loaded one
                device = session.consensus.binding.names.known()[name].device
                state["residual"][name] = kept[name].to(device, copy=True)
        state.local_shared = session.consensus.arrangement.complete

    def _warn_inexact(self, reason: str, logging_rank: int) -> None:
        """Log one warning on rank `logging_rank`: rank 0 if all ranks know of the failure, else a rank that does."""
        if self._rank != logging_rank:
            return
        logger.warning(
            "hook %s was saved at step %s without residuals, because %s. The saved state is marked inexact: "
            "a run that resumes from it starts from residuals of zero.",
            self._hook,
            self.step,
            reason,
        )

    def _take_over(self, state: LearnedState, compressor: Compressor[Any]) -> None:
        session = self._session
        with session.held.lock:
            # Unread outcomes of earlier steps belong to the state that is replaced now.
            session.held.settle()
            # At once: a signal handler that saves never finds a part of it.
            vars(session.state).update(vars(state))
            session.consensus.replaced(compressor)

    def _target(self, compressor: Compressor[Any]) -> payload.Target:
        compressed = {plan.name: plan for plan in self._plans_with(compressor) if plan.compressed}
        names, ranks = self._session.consensus.binding.names.known(), (self._rank, self._world_size)
        return payload.Target(self._hook, compressor, names, compressed, *ranks, self._is_logging_rank)
