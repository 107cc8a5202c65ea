"""The learned state of a session as a checkpoint payload, and back. Loading is all or nothing."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.payload import COUNTERS, FLOATS, VERSION, check_count, check_learned, check_range, damaged
from commhooks.comm.groups import is_logging_rank
from commhooks.comm.joint_save import JointSave
from commhooks.compressors.adaptive import AdaptiveCompressor
from commhooks.compressors.base import RESIDUAL, Compressor
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.engine.learning import Learning
from commhooks.engine.state import LearnedState
from commhooks.errors import HookConfigError, PayloadError, logger_of, shown
from commhooks.gradients.layout import memory_order
from commhooks.gradients.precision import compute_dtype
from commhooks.gradients.source import GradientSource, held_weakly


@dataclass(frozen=True)
class Target:
    """The hook and the model for which a payload is made or loaded.

    Attributes:
        hook: name of the hook.
        compressor: the compressor with its current options.
        parameters: name -> parameter of the current model.
        plans: name -> plan of each compressed parameter; empty for a compressor of whole buckets.
        rank, world_size: those of this process in the hook's group.
        is_logging_rank: this rank logs the warnings that concern all ranks.
    """

    hook: str
    compressor: Compressor[Any]
    parameters: Mapping[str, torch.Tensor]
    plans: Mapping[str, UnitPlan]
    rank: int
    world_size: int
    is_logging_rank: bool

    def kept_dtype(self, field: StateField, name: str) -> torch.dtype:
        """The dtype in which a field of a parameter of this name is kept, as far as the weights tell."""
        plan = self.plans.get(name)
        return compute_dtype(self.parameters[name].dtype) if plan is None else field.dtype(plan)


@dataclass(frozen=True)
class Contribution:
    """The residuals of a payload: what differs between ranks.

    Attributes:
        kind: "mean", "per_rank" or "none".
        ranks: the ranks whose residuals are included.
        residuals: per parameter a tensor, or a list with one per rank, in the form of the learned state.
        exact: a run that resumes from the payload continues exactly as this one.
        shares: each rank has residuals for its share of the parameters only.
    """

    kind: str = "none"
    ranks: list[int] = field(default_factory=list)
    residuals: Mapping[str, torch.Tensor | list[torch.Tensor]] = field(default_factory=dict)
    exact: bool = True
    shares: bool = False


def build(target: Target, state: LearnedState, local: Contribution, counters: dict[str, int]) -> dict[str, Any]:
    """Make a payload. `counters`: `Counters.cumulative()`."""
    parameters: dict[str, dict[str, Any]] = {}
    fields = [each for each in target.compressor.state_fields if each.per == "parameter"]
    for name, parameter in target.parameters.items():
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
                        f"the field {each.key!r} is kept in {saved.dtype}; a checkpoint takes float16, bfloat16, "
                        "float32, float64"
                    )
        parameters[name] = entry
    return {
        "format": "commhooks",
        "version": VERSION,
        "hook": target.hook,
        "options": dataclasses.asdict(target.compressor.config),
        "step": state.step,
        "nonfinite_steps": state.nonfinite_steps,
        COUNTERS: counters,
        "world_size": target.world_size,
        "loss_scale": float(state.loss_scale),
        "exact": local.exact,
        "residual": local.kind,
        "residual_ranks": list(local.ranks),
        **({"residual_shares": True} if local.shares else {}),
        "parameters": parameters,
        "batched_q": {},
        **{
            f"batched_{each.key}": {n: tensor.detach().to("cpu", copy=True) for n, tensor in state[each.key].items()}
            for each in target.compressor.state_fields
            if each.per == "bucket"
        },
        "hook_state": None,
        **({"notes": target.compressor.notes} if isinstance(target.compressor, AdaptiveCompressor) else {}),
    }


def read(payload: dict[str, Any], target: Target, *, strict: bool) -> LearnedState:
    """Make new learned state from a payload whose header has been checked. Has no side effects except warnings.

    Raises:
        PayloadError: the payload is damaged, or, with `strict`, of another model (names and shapes are listed).
    """
    check_learned(payload)
    parameters = payload["parameters"]
    fitting = _compare(parameters, target, strict)
    state = LearnedState.of(target.compressor.state_fields)
    state.step, state.nonfinite_steps = payload["step"], payload["nonfinite_steps"]
    state.local_shared = payload["residual"] != "per_rank"
    state.loss_scale = float(payload["loss_scale"])
    fields = [each for each in target.compressor.state_fields if each.per == "parameter"]
    for name in fitting:
        entry, parameter = parameters[name], target.parameters[name]
        check_range(name, entry, compute_dtype(parameter.dtype), payload["loss_scale"])
        for each in fields:
            saved = entry.get(each.key)
            # The gradient of a complex parameter is sent uncompressed and leaves no residual.
            if saved is None or (parameter.is_complex() and not each.replicated):
                continue
            if each.replicated:
                value = _fitted(each, saved, entry["row_dim"], name, target)
            else:
                own = _own_residual(saved, payload, target)
                state.local_missing |= own is None
                value = None if own is None else each.from_saved(own, parameter, entry["row_dim"])
            if value is not None:
                # A wider one stays: FSDP's reduce_dtype, known in the first pass only, may be wider than the weights.
                dtype = torch.promote_types(value.dtype, target.kept_dtype(each, name))
                # Copies: the state changes in place, and what was loaded may be loaded into another hook, too.
                state[each.key][name] = value.to(parameter.device, dtype, copy=True).contiguous()
    if payload.get("residual_shares") is True and payload["step"] > target.compressor.start_step:
        # The rank that saved may have had none, as the owner of nothing that is compressed.
        state.local_missing |= not _is_of(payload, target)
    if payload["residual"] == "none" and payload["exact"] is False and state.local:
        state.local_missing = state.missing_was_said = True
        if target.is_logging_rank:
            logger.warning(
                "the saved state of hook %s is marked inexact: it was saved where not all ranks could take part, "
                "without residuals. Training resumes from residuals of zero; step and Q are kept.",
                payload["hook"],
            )
    if state.local_missing:
        state.forget_local()
    if not state.local:
        state.drop_local()
    for each in target.compressor.state_fields:
        if each.per == "bucket":
            saved = payload.get(f"batched_{each.key}", {})
            copies = {
                name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in saved.items()
            }
            state[each.key].update(copies)
    return state


def _fitted(field: StateField, saved: torch.Tensor, row_dim: int, name: str, target: Target) -> torch.Tensor | None:
    """A replicated tensor fitted to the current plan; None if the parameter is not compressed now, or if the tensor
    cannot be used.

    Raises:
        PayloadError: the tensor cannot belong to this parameter.
    """
    plan = target.plans.get(name)
    if plan is None:
        return None
    try:
        value = field.from_saved(saved, target.parameters[name], row_dim)
        problem = None if value is None else field.problem(value, plan)
        if value is not None and problem is None:
            value = field.refit(value, plan, target.compressor.initial_value(field, plan, torch.float64))
    except Exception as error:  # fields of users' compressors: so far only checked to be finite tensors
        raise damaged(f"parameters[{shown(name)}][{field.key!r}] does not fit: {error}") from error
    if problem is not None:
        raise damaged(f"it has {problem}")
    return value


def _compare(parameters: dict[str, Any], target: Target, strict: bool) -> list[str]:
    """The saved names whose shapes match the model. If some do not match, raises PayloadError with `strict`, else logs
    a warning."""
    problems = {}
    for name in parameters:
        if name not in target.parameters:
            problems[name] = "in the saved state, not in the model (removed, renamed, or frozen now)"
        elif list(target.parameters[name].shape) != parameters[name]["shape"]:
            saved, now = tuple(parameters[name]["shape"]), tuple(target.parameters[name].shape)
            problems[name] = f"saved with shape {saved}, now {now}"
    for name in target.parameters:
        if name not in parameters:
            problems[name] = "in the model, not in the saved state (added, renamed, or frozen then)"
    if problems:
        text = "the saved hook state is of another model:\n  " + "\n  ".join(
            f"{name}: {problem}" for name, problem in problems.items()
        )
        if strict:
            raise PayloadError(
                f"{text}\nstrict=False beside hook=... or in the load gives these parameters fresh memory and "
                "loads the others"
            )
        if target.is_logging_rank:
            logger.warning("%s\nThese parameters start with fresh memory (strict=False).", text)
    return [name for name in parameters if name not in problems]


def _own_residual(saved: Any, payload: dict[str, Any], target: Target) -> torch.Tensor | None:
    """This rank's residual from the saved ones of a parameter; None if it was not saved."""
    ranks, world_size = payload["residual_ranks"], payload["world_size"]
    own: torch.Tensor | None = None
    if payload["residual"] == "mean":
        own = saved
    elif _is_of(payload, target):
        own = saved[ranks.index(target.rank)]
    elif len(ranks) == world_size != target.world_size:  # all ranks are included: `check_learned` excludes duplicates
        # Another world size: every rank uses the mean, which preserves the mean over the ranks.
        own = torch.stack(saved).mean(0)
    return own


def _is_of(payload: dict[str, Any], target: Target) -> bool:
    """Whether a payload with residuals per rank has those of this one."""
    return payload["world_size"] == target.world_size and target.rank in payload["residual_ranks"]


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
            return build(self._target(session.compressor), session.state, local, session.counters.cumulative())

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
        state = read(content, self._target(compressor), strict=strict)
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

    def _target(self, compressor: Compressor[Any]) -> Target:
        compressed = {plan.name: plan for plan in self._plans_with(compressor) if plan.compressed}
        names, ranks = self._session.consensus.binding.names.known(), (self._rank, self._world_size)
        return Target(self._hook, compressor, names, compressed, *ranks, self._is_logging_rank)
