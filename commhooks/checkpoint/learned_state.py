"""Saves the learned state of a session as a checkpoint payload, and loads a payload completely or
not at all.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.payload import (
    COUNTERS,
    FLOATS,
    INEXACT_BECAUSE,
    VERSION,
    check_count,
    check_learned,
    check_range,
    damaged,
    why_inexact,
)
from commhooks.comm.groups import is_logging_rank
from commhooks.comm.joint_save import Failure, JointSave, pieces
from commhooks.compressors.base import RESIDUAL, Compressor
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.engine.session import ExchangeDriver
from commhooks.engine.state import LearnedState
from commhooks.errors import HookConfigError, PayloadError, logger_of, shown
from commhooks.gradients import precision
from commhooks.gradients.layout import memory_order
from commhooks.gradients.names import ParameterNames, by_own_names
from commhooks.gradients.precision import compute_dtype
from commhooks.gradients.source import GradientSource, held_weakly

logger = logger_of(__name__)


@dataclass(frozen=True)
class Contribution:
    """Holds the residuals for a payload, which alone differ between ranks.

    Attributes:
        kind: "mean", "per_rank" or "none".
        residuals: per parameter a flat tensor, or a list with one tensor per rank in `ranks`.
        inexact: why a run that resumes from the payload does not continue exactly as this run; ""
            if it does.
        shares: whether each rank has residuals for a share of the parameters only.
    """

    kind: str = "none"
    ranks: list[int] = field(default_factory=list)
    residuals: Mapping[str, torch.Tensor | list[torch.Tensor]] = field(default_factory=dict)
    inexact: str = ""
    shares: bool = False


class LearnedStateCheckpointer:
    """Saves and loads the learned state of a session on this rank. `plans`: returns a compressor's
    plan for every parameter; an empty list for a compressor of whole buckets.
    """

    step_is = "step"
    """What to call `step` in messages."""
    not_begun_anew = ""
    """The end of a message: what `begin_anew` does not reset."""

    def __init__(
        self,
        hook: str,
        session: ExchangeDriver,
        group: dist.ProcessGroup,
        plans: Callable[[Compressor[Any]], list[UnitPlan]],
    ) -> None:
        self._hook = hook
        self._session = session
        self._group = held_weakly(group)
        self._plans_with = plans
        self._rank, self._world_size = group.rank(), group.size()
        self._is_logging_rank = is_logging_rank(group, session.consensus.binding.shard_group)
        self._joint_save: tuple[int, JointSave] | None = None
        self._thread = threading.get_ident()
        self._first_start = session.compressor.start_step

    def begin_anew(self) -> None:
        compressor = self._session.compressor.with_start(self._first_start)
        self._take_over(LearnedState.of(compressor.state_fields), compressor)

    @property
    def step(self) -> int:
        return self._session.state.step

    def save(
        self, residual: str, *, limit_s: float, gather: bool = False, joint: bool = True
    ) -> dict[str, Any]:
        session = self._session
        with session.held.lock, contextlib.ExitStack() as body:
            # A signal handler may interrupt a commit of the same thread, which holds this reentrant
            # lock.
            mid_commit = session.held.in_commit
            if not mid_commit:
                body.enter_context(session.held.settled())
            if residual == "drop":
                local = Contribution(inexact=self._mid_commit if mid_commit else "")
            else:
                local = self._residuals_for(
                    residual, mid_commit=mid_commit, gather=gather, joint=joint, limit_s=limit_s
                )
            return self._payload(local)

    def _payload(self, local: Contribution) -> dict[str, Any]:
        compressor, state = self._session.compressor, self._session.state
        parameters: dict[str, dict[str, Any]] = {}
        fields = [each for each in compressor.state_fields if each.per == "parameter"]
        for name, parameter in self._parameters.items():
            entry: dict[str, Any] = {
                "shape": list(parameter.shape),
                "row_dim": memory_order(parameter)[0] if parameter.dim() else 0,
                # Every entry has these two keys, whatever the hook.
                "q": None,
                "residual": None,
            }
            for each in fields:
                value = (state[each.key] if each.replicated else local.residuals).get(name)
                if isinstance(value, list):
                    entry[each.key] = [each.to_saved(one, parameter) for one in value]
                elif value is not None:
                    entry[each.key] = saved = each.to_saved(value, parameter)
                    if saved.dtype not in FLOATS:
                        raise PayloadError(
                            f"the field {each.key!r} is kept in {saved.dtype}; a checkpoint takes"
                            " float16, bfloat16, float32, float64"
                        )
            parameters[name] = entry
        return {
            "format": "commhooks",
            "version": VERSION,
            "hook": self._hook,
            "options": dataclasses.asdict(compressor.config),
            "step": state.step,
            "nonfinite_steps": state.nonfinite_steps,
            COUNTERS: self._session.counters.cumulative(),
            "world_size": self._world_size,
            "loss_scale": float(state.loss_scale),
            "exact": not local.inexact,
            **({INEXACT_BECAUSE: local.inexact} if local.inexact else {}),
            "residual": local.kind,
            "residual_ranks": list(local.ranks),
            **({"residual_shares": True} if local.shares else {}),
            "parameters": parameters,
            "batched_q": {},
            **{
                f"batched_{each.key}": {
                    n: one.detach().to("cpu", copy=True) for n, one in state[each.key].items()
                }
                for each in compressor.state_fields
                if each.per == "bucket"
            },
            "hook_state": None,
            **({} if compressor.notes is None else {"notes": compressor.notes}),
        }

    def prepare_load(self, content: dict[str, Any], strict: bool) -> Callable[[], None]:
        """Check all of `content` without changing anything, and return a function that applies it.
        Raises PayloadError if `content` is damaged, or, with `strict`, belongs to another model.
        """
        start, option = (
            self._session.compressor.start_step,
            self._session.compressor.config.start_option,
        )
        if option is not None:
            start = content["options"].get(option, start)
            check_count({option: start}, option, 0)
        same_ranks = content.get("world_size") == self._world_size
        try:
            compressor = self._session.compressor.with_start(start)
            compressor = compressor.with_notes(
                content.get("notes"), content["step"], same_ranks=same_ranks
            )
        except HookConfigError as error:
            raise damaged(str(error)) from error
        state = self._read(content, compressor, strict=strict)
        self._drop_uncompressed(state, compressor)

        def take_over() -> None:
            self._take_over(state, compressor)
            self._session.counters.resume_from(content[COUNTERS])

        return take_over

    def _read(
        self, payload: dict[str, Any], compressor: Compressor[Any], *, strict: bool
    ) -> LearnedState:
        check_learned(payload)
        parameters = by_own_names(payload["parameters"], self._names)
        fitting = self._compare(parameters, strict)
        plans = self._compressed(compressor)
        state = LearnedState.of(compressor.state_fields)
        state.step, state.nonfinite_steps = payload["step"], payload["nonfinite_steps"]
        state.local_shared = payload["residual"] != "per_rank"
        state.loss_scale = float(payload["loss_scale"])
        fields = [each for each in compressor.state_fields if each.per == "parameter"]
        for name in fitting:
            entry, parameter = parameters[name], self._parameters[name]
            check_range(name, entry, compute_dtype(parameter.dtype), payload["loss_scale"])
            for each in fields:
                saved = entry.get(each.key)
                # The gradient of a complex parameter is sent uncompressed and leaves no residual.
                if saved is None or (parameter.is_complex() and not each.replicated):
                    continue
                if each.replicated:
                    value = _fitted(
                        each, saved, entry["row_dim"], parameter, plans.get(name), compressor
                    )
                else:
                    own = self._own_residual(saved, payload)
                    state.local_missing |= own is None
                    value = (
                        None if own is None else each.from_saved(own, parameter, entry["row_dim"])
                    )
                if value is not None:
                    # Keep a wider dtype, because FSDP's reduce_dtype, unknown before the first
                    # pass, may be wider, too.
                    dtype = torch.promote_types(
                        value.dtype, _kept_dtype(each, parameter, plans.get(name))
                    )
                    # Copies, because the state changes in place.
                    device = self._device_of(each, parameter)
                    state[each.key][name] = value.to(device, dtype, copy=True).contiguous()
        if payload.get("residual_shares") is True and payload["step"] > compressor.start_step:
            # The rank that saved this file may have had no residuals, because it owned no
            # compressed parameter.
            state.local_missing |= not self._is_of(payload)
        if payload["exact"] is False:
            lost = payload["residual"] == "none" and bool(state.local)
            if lost:
                state.local_missing = state.missing_was_said = True
            self._warn_of_inexact(payload, lost=lost)
        if state.local_missing:
            state.forget_local()
        if not state.local:
            state.drop_local()
        for each in compressor.state_fields:
            if each.per == "bucket":
                saved = payload.get(f"batched_{each.key}", {})
                copies = {
                    name: tensor.detach().clone(memory_format=torch.contiguous_format)
                    for name, tensor in saved.items()
                }
                state[each.key].update(copies)
        return state

    def _warn_of_inexact(self, payload: dict[str, Any], *, lost: bool) -> None:
        if self._is_logging_rank:
            reason = why_inexact(payload)
            logger.warning(
                "the saved state of hook %s is marked inexact%s. %s",
                payload["hook"],
                f", because {reason}" if reason else "",
                (
                    "It is loaded without residuals, so the run resumes from residuals of zero;"
                    " step and Q are kept."
                    if lost
                    else "The run does not go on exactly as the run that saved it."
                ),
            )

    def _compare(self, parameters: dict[str, Any], strict: bool) -> list[str]:
        problems, known = {}, self._parameters
        for name in parameters:
            if name not in known and (key := self._names.key_of(name)) in known:
                problems[name] = f"saved apart from {key}, with which it is tied now"
            elif name not in known:
                problems[name] = (
                    "in the saved state, not in the model (removed, renamed, or frozen now)"
                )
            elif list(known[name].shape) != parameters[name]["shape"]:
                saved, now = tuple(parameters[name]["shape"]), tuple(known[name].shape)
                problems[name] = f"saved with shape {saved}, now {now}"
        for name in known:
            if name not in parameters:
                problems[name] = (
                    "in the model, not in the saved state (added, renamed, or frozen or tied then)"
                )
        if problems:
            text = "the saved hook state is of another model:\n  " + "\n  ".join(
                f"{name}: {problem}" for name, problem in problems.items()
            )
            if strict:
                raise PayloadError(
                    f"{text}\nstrict=False, with hook=... or in the load, gives these parameters"
                    " fresh memory and loads the others"
                )
            if self._is_logging_rank:
                logger.warning("%s\nThese parameters start with fresh memory (strict=False).", text)
        return [name for name in parameters if name not in problems]

    def _own_residual(self, saved: Any, payload: dict[str, Any]) -> torch.Tensor | None:
        ranks, world_size = payload["residual_ranks"], payload["world_size"]
        own: torch.Tensor | None = None
        if payload["residual"] == "mean":
            own = saved
        elif self._is_of(payload):
            own = saved[ranks.index(self._rank)]
        elif len(ranks) == world_size != self._world_size:
            # Saved by all ranks of another world size. Giving every rank the mean preserves their
            # mean.
            own = torch.stack(saved).mean(0)
        return own

    def _is_of(self, payload: dict[str, Any]) -> bool:
        return payload["world_size"] == self._world_size and self._rank in payload["residual_ranks"]

    def resumed(self, content: dict[str, Any]) -> str:
        said, state, ranks = "", self._session.state, content["world_size"]
        if state.local:
            if (
                not content[COUNTERS]["compressed_steps"]
                and content["step"] <= self._session.compressor.start_step
            ):
                said = "; not yet compressing"
            elif state.local_missing or content["residual"] == "none":
                said = "; residuals: none, they start from zero"
            elif all(entry["residual"] is None for entry in content["parameters"].values()):
                said = "; no parameter has a residual"
            elif content["residual"] == "per_rank" and ranks == self._world_size:
                said = "; residuals: each rank's own"
            else:
                said = f"; residuals: mean of {ranks} rank{'s' if ranks > 1 else ''}"
        option, start = (
            self._session.compressor.config.start_option,
            self._session.compressor.start_step,
        )
        if (
            option is not None
            and start != self._first_start
            and max(start, self._first_start) > content["step"]
        ):
            said += f"; {option}={start} as it was saved, not {self._first_start}"
        return said

    def kept_fields(self, source: GradientSource) -> dict[str, dict[str, torch.dtype]]:
        """Return the fields with one number per element of a parameter, such as "residual", as
        field -> name -> dtype, for every whole parameter of the model that could have the field.
        """
        compressor = self._session.compressor
        if not self._session.state.local:
            return {}
        names, config = source.whole, compressor.config
        infos = [
            ParameterInfo.of(n, p, names, config, id(p) in source.sparse)
            for n, p in names.named_parameters().items()
        ]
        infos = [
            info for info, may in zip(infos, compressor.may_compress(infos), strict=True) if may
        ]
        return {
            RESIDUAL.key: {
                each.name: compute_dtype(each.parameter.dtype) for each in infos if not each.sparse
            }
        }

    def joint_save(self) -> JointSave | None:
        """Return the object that runs joint saves; None before the first backward pass, in which
        the ranks agree on a nonce.
        """
        consensus = self._session.consensus
        if consensus.nonce is None:
            return None
        if self._joint_save is None or self._joint_save[0] != consensus.nonce:
            binding = consensus.binding
            device = next(iter(self._parameters.values())).device
            ranks = self._group, self._rank, self._world_size
            self._joint_save = (
                consensus.nonce,
                JointSave(*ranks, consensus.nonce, binding.shards, device),
            )
        return self._joint_save[1]

    def _drop_uncompressed(self, state: LearnedState, compressor: Compressor[Any]) -> None:
        """Drop the residuals of parameters that are no longer compressed. No step would use them,
        but a later run that compresses these parameters again would add stale residuals to its
        gradients.
        """
        # Empty for compressors of whole buckets, where every parameter may have a residual.
        plans = self._plans_with(compressor)
        dropped = [
            plan.name for plan in plans if not plan.compressed and plan.name in state["residual"]
        ]
        for name in dropped:
            del state["residual"][name]
        if dropped and self._is_logging_rank:
            logger.warning(
                "hook %s no longer compresses these parameters, so their saved residuals are"
                " dropped: %s",
                self._hook,
                ", ".join(dropped),
            )

    def _residuals_for(
        self, residual: str, *, mid_commit: bool, gather: bool, joint: bool, limit_s: float
    ) -> Contribution:
        """Collect the residuals. All ranks must call this, unless `joint` is false or each rank
        saves its own. `mid_commit`: whether a commit is currently writing the state.
        """
        state, everyone = self._session.state, list(range(self._world_size))
        missing = f"rank {self._rank} has lost its residuals" if state.local_missing else ""
        missing = self._mid_commit if mid_commit else missing
        # A loaded payload without residuals concerns all ranks; a failed commit concerns only this
        # rank.
        failure = (
            Failure(missing, not state.missing_was_said or self._rank == 0) if missing else None
        )
        if residual == "per_rank" and not gather:
            if failure is None:
                shares = bool(state.local) and self._session.consensus.reduction.nodes is not None
                own = {name: [tensor] for name, tensor in state["residual"].items()}
                return Contribution("per_rank", [self._rank], own, shares=shares)
            return self._inexact(failure)
        saver, residuals = self.joint_save(), {} if missing else self._residuals()
        # each rank's residual is the mean
        alike = not missing and (self._world_size == 1 or state.local_shared)
        collected: dict[str, Any] = {}

        def collect(group: JointSave) -> None:
            for name, mine in residuals.items():
                collected[name] = group.mean(mine) if residual == "mean" else group.gather(mine)

        if alike:
            failure = saver.of_all_shards(None) if joint and saver is not None else None
        elif not joint:
            failure = failure or Failure(f"rank {self._rank} saved on its own", self._rank == 0)
        elif saver is None:
            failure = failure or Failure(
                "no backward pass has run since the hook was attached", self._rank == 0
            )
        else:
            # A commit that failed on this rank may have succeeded on the others, which are then one
            # step ahead.
            ahead = mid_commit or self._session.held.commit_failed
            # In another thread, a save's collectives could interleave with other collectives
            # differently on each rank.
            own_group = (
                residual == "mean"
                and self._on_accelerator
                and self._thread == threading.get_ident()
            )
            failure = saver.run(
                state.step,
                collect,
                limit_s,
                own_group=own_group,
                refusal=missing,
                others_may_be_ahead=ahead,
            )
        if failure is not None:
            return self._inexact(failure)
        if alike:
            return Contribution("mean", everyone, residuals)
        if residual == "mean":
            self._rebase(collected)
        return Contribution("mean" if residual == "mean" else "per_rank", everyone, collected)

    def _residuals(self) -> dict[str, torch.Tensor]:
        session, state, own = self._session, self._session.state, self._session.state["residual"]
        field = next(
            (each for each in session.compressor.state_fields if not each.replicated), None
        )
        if field is None:
            return {}
        same_names = session.consensus.reduction.nodes is None and session.consensus.compared
        of_whole_buckets = not self._plans_with(session.compressor)
        if same_names or of_whole_buckets or (state.local_shared and not own):
            plans = self._compressed(session.compressor)
            # In the dtype of a load, not in FSDP's reduce_dtype, so that this run and a resumed run
            # have equal numbers.
            return {
                n: own[n].to(_kept_dtype(field, p, plans.get(n)))
                for n, p in self._parameters.items()
                if n in own
            }
        return {
            name: (
                own[name]
                if name in own
                else torch.zeros(field.shape(plan), dtype=field.dtype(plan))
            )
            for name, plan in self._compressed(session.compressor).items()
        }

    def _device_of(self, field: StateField, parameter: torch.Tensor) -> torch.device:
        return parameter.device

    def _rebase(self, means: dict[str, torch.Tensor]) -> None:
        """Replace the residuals by their saved means, so that this run continues as a run that
        loads them.
        """
        session, state = self._session, self._session.state
        for name, mean in means.items():
            kept: dict[str, torch.Tensor] = {}
            session.consensus.reduction.rebase(kept, name, mean)
            if name in kept and name in state["residual"]:
                # In pieces, because on an accelerator `overwrite` makes a copy there.
                for old, new in zip(
                    pieces(state["residual"][name]), pieces(kept[name]), strict=True
                ):
                    session.held.overwrite(old, new)
            elif name in kept:  # another rank has loaded one
                device = self._parameters[name].device
                state["residual"][name] = kept[name].to(device, copy=True)
        state.local_shared = session.consensus.reduction.nodes is None

    def _inexact(self, failure: Failure) -> Contribution:
        if failure.logged_here:
            logger.warning(
                "hook %s was saved at step %s without residuals, because %s. The saved state is"
                " marked inexact: a run that resumes from it starts from residuals of zero.",
                self._hook,
                self.step,
                failure.reason,
            )
        return Contribution(inexact=failure.reason)

    @property
    def _mid_commit(self) -> str:
        return f"rank {self._rank} was committing a step at that moment"

    def _take_over(self, state: LearnedState, compressor: Compressor[Any]) -> None:
        session = self._session
        with session.held.lock:
            # Unread outcomes of earlier steps belong to the old state.
            session.held.settle()
            # In one statement, so that a signal handler never saves a half-replaced state.
            vars(session.state).update(vars(state))
            session.consensus.replace_compressor(compressor)

    @property
    def _on_accelerator(self) -> bool:
        return not precision.is_host_readable(next(iter(self._parameters.values())).device)

    @property
    def _names(self) -> ParameterNames:
        return self._session.consensus.binding.names

    @property
    def _parameters(self) -> Mapping[str, torch.Tensor]:
        return self._names.named_parameters()

    def _compressed(self, compressor: Compressor[Any]) -> dict[str, UnitPlan]:
        return {plan.name: plan for plan in self._plans_with(compressor) if plan.compressed}


def _kept_dtype(field: StateField, parameter: torch.Tensor, plan: UnitPlan | None) -> torch.dtype:
    return compute_dtype(parameter.dtype) if plan is None else field.dtype(plan)


def _fitted(
    field: StateField,
    saved: torch.Tensor,
    row_dim: int,
    parameter: torch.Tensor,
    plan: UnitPlan | None,
    compressor: Compressor[Any],
) -> torch.Tensor | None:
    """Fit a saved replicated tensor to the current plan. Returns None if the parameter is not
    compressed now, or the tensor cannot be used. Raises PayloadError if it cannot belong to this
    parameter.
    """
    if plan is None:
        return None
    try:
        value = field.from_saved(saved, parameter, row_dim)
        problem = None if value is None else field.problem(value, plan)
        if value is not None and problem is None:
            value = field.refit(value, plan, compressor.initial_value(field, plan, torch.float64))
    except (
        Exception
    ) as error:  # the content of a user's field was only checked to be finite tensors
        raise damaged(
            f"parameters[{shown(plan.name)}][{field.key!r}] does not fit: {error}"
        ) from error
    if problem is not None:
        raise damaged(f"it has {problem}")
    return value
