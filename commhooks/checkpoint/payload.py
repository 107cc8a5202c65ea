"""The checkpoint payload: what `CommHook.state_dict()` returns. Documented in docs/checkpoint_format.md.

Plain types and tensors only, so that `torch.load(weights_only=True)` reads it. Tensors are keyed by parameter name and
stored in the parameter's logical order, independent of its memory format. Loading is all or nothing: `read` checks
everything and returns new learned state, which the caller then applies.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from commhooks.checkpoint.checks import COUNTERS, FLOATS, VERSION, check_learned, check_range, damaged
from commhooks.compressors.adaptive import AdaptiveCompressor
from commhooks.compressors.base import Compressor
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.engine.state import LearnedState
from commhooks.errors import PayloadError, logger_of, shown
from commhooks.gradients.layout import memory_order
from commhooks.gradients.precision import compute_dtype

logger = logger_of(__name__)


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
