"""Reads a checkpoint payload: checks it against the model, and makes learned state of it.

Nothing that exists is changed, so a payload that does not fit leaves everything as it was.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.checkpoint.payload import check_learned, check_range, damaged, why_inexact
from commhooks.compressors.base import Compressor
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.engine.state import LearnedState
from commhooks.errors import PayloadError, logger_of, shown
from commhooks.gradients.names import ParameterNames, by_own_names
from commhooks.gradients.precision import compute_dtype

logger = logger_of(__name__)


@dataclass(frozen=True)
class PayloadReader:
    """Reads payloads for one model on this rank.

    Attributes:
        hook: the name of the hook, for messages.
        names: the names of the model's parameters.
        compressor: the compressor that continues with the state.
        plans: its plan of every parameter; empty for a compressor of whole buckets.
        logs: whether this rank logs warnings.
        device_of: returns the device on which a field of a parameter is kept.
    """

    hook: str
    names: ParameterNames
    compressor: Compressor[Any]
    plans: Mapping[str, UnitPlan]
    rank: int
    world_size: int
    logs: bool
    device_of: Callable[[StateField, torch.Tensor], torch.device]

    def read(self, payload: dict[str, Any], *, strict: bool) -> LearnedState:
        """Return the learned state in `payload`, as copies.

        `strict`: raise PayloadError if it was saved by another model; otherwise leave out the
        parameters that do not fit.
        """
        check_learned(payload)
        entries = by_own_names(payload["parameters"], self.names)
        fitting = self._fitting(entries, strict=strict)
        state = LearnedState.of(self.compressor.state_fields)
        state.step = payload["step"]
        state.nonfinite_steps = payload["nonfinite_steps"]
        state.local_shared = payload["residual"] != "per_rank"
        state.loss_scale = float(payload["loss_scale"])
        for name in fitting:
            self._read_parameter(state, name, entries[name], payload)
        self._settle_residuals(state, payload)
        for field in self.compressor.state_fields:
            if field.per == "bucket":
                for name, tensor in payload.get(f"batched_{field.key}", {}).items():
                    state[field.key][name] = tensor.detach().clone(
                        memory_format=torch.contiguous_format
                    )
        self._drop_uncompressed(state)
        return state

    def _fitting(self, entries: Mapping[str, Any], *, strict: bool) -> list[str]:
        """Return the names of the entries that fit the model."""
        problems = differences(entries, self.names)
        if problems:
            lines = [f"{name}: {problem}" for name, problem in problems.items()]
            text = "\n  ".join(["the saved hook state is of another model:", *lines])
            if strict:
                raise PayloadError(
                    f"{text}\nstrict=False, with hook=... or in the load, gives these parameters"
                    " fresh state and loads the others"
                )
            if self.logs:
                logger.warning("%s\nThese parameters start with fresh state (strict=False).", text)
        return [name for name in entries if name not in problems]

    def _read_parameter(
        self, state: LearnedState, name: str, entry: Mapping[str, Any], payload: Mapping[str, Any]
    ) -> None:
        parameter = self.names.named_parameters()[name]
        plan = self._compressed_plan(name)
        check_range(name, entry, compute_dtype(parameter.dtype), payload["loss_scale"])
        for field in self.compressor.state_fields:
            saved = entry.get(field.key)
            if field.per != "parameter" or saved is None:
                continue
            if field.replicated:
                value = self._fitted(field, entry, parameter, plan)
            elif parameter.is_complex():
                # The gradient of a complex parameter is sent uncompressed and leaves no residual.
                value = None
            else:
                residual = residual_of_rank(saved, payload, self.rank, self.world_size)
                if residual is None:
                    state.local_missing = True
                    value = None
                else:
                    value = field.from_saved(residual, parameter, entry["row_dim"])
            if value is not None:
                # Keep a wider dtype, because FSDP's reduce_dtype, unknown before the first pass,
                # may be wider, too.
                dtype = torch.promote_types(value.dtype, kept_dtype(field, parameter, plan))
                device = self.device_of(field, parameter)
                # A copy, because the state changes in place.
                state[field.key][name] = value.to(device, dtype, copy=True).contiguous()

    def _fitted(
        self,
        field: StateField,
        entry: Mapping[str, Any],
        parameter: torch.Tensor,
        plan: UnitPlan | None,
    ) -> torch.Tensor | None:
        """Fit a saved replicated tensor to the current plan.

        Return None if the parameter is not compressed now, or the tensor cannot be used; raise
        PayloadError if it cannot belong to this parameter.
        """
        if plan is None:
            return None
        problem = None
        # A user's field was only checked to be finite tensors, so that its code may raise anything.
        try:
            value = field.from_saved(entry[field.key], parameter, entry["row_dim"])
            if value is not None:
                problem = field.problem(value, plan)
            if value is not None and problem is None:
                initial = self.compressor.initial_value(field, plan, torch.float64)
                value = field.refit(value, plan, initial)
        except Exception as error:
            raise damaged(
                f"parameters[{shown(plan.name)}][{field.key!r}] does not fit: {error}"
            ) from error
        if problem is not None:
            raise damaged(f"it has {problem}")
        return value

    def _settle_residuals(self, state: LearnedState, payload: dict[str, Any]) -> None:
        """Decide whether this rank has its residuals, and drop what was loaded if it has not."""
        if payload.get("residual_shares") is True and payload["step"] > self.compressor.start_step:
            # The rank that saved this file may have had no residuals, because it owned no
            # compressed parameter.
            state.local_missing |= not _saved_by(payload, self.rank, self.world_size)
        if payload["exact"] is False:
            without_residuals = payload["residual"] == "none" and bool(state.local)
            if without_residuals:
                state.local_missing = True
                state.missing_was_said = True
            if self.logs:
                _warn_of_inexact(payload, without_residuals=without_residuals)
        if state.local_missing:
            state.forget_local()
        if not state.local:
            state.drop_local()

    def _drop_uncompressed(self, state: LearnedState) -> None:
        """Drop the residuals of parameters that are no longer compressed.

        No step would use them, but a later run that compresses these parameters again would add
        stale residuals to its gradients.
        """
        # `plans` is empty for compressors of whole buckets, where every parameter may have a
        # residual.
        dropped = [
            name
            for name, plan in self.plans.items()
            if not plan.compressed and name in state["residual"]
        ]
        for name in dropped:
            del state["residual"][name]
        if dropped and self.logs:
            logger.warning(
                "hook %s no longer compresses these parameters, so their saved residuals are"
                " dropped: %s",
                self.hook,
                ", ".join(dropped),
            )

    def _compressed_plan(self, name: str) -> UnitPlan | None:
        plan = self.plans.get(name)
        return plan if plan is not None and plan.compressed else None


def differences(entries: Mapping[str, Any], names: ParameterNames) -> dict[str, str]:
    """Return in which parameters a saved model differs from this one, as name -> explanation."""
    parameters = names.named_parameters()
    problems = {}
    for name, entry in entries.items():
        key = names.key_of(name)
        if name in parameters:
            shape = list(parameters[name].shape)
            if shape != entry["shape"]:
                problems[name] = f"saved with shape {tuple(entry['shape'])}, now {tuple(shape)}"
        elif key in parameters:
            problems[name] = f"saved apart from {key}, with which it is tied now"
        else:
            problems[name] = (
                "in the saved state, not in the model (removed, renamed, or frozen now)"
            )
    for name in parameters:
        if name not in entries:
            problems[name] = (
                "in the model, not in the saved state (added, renamed, or frozen or tied then)"
            )
    return problems


def residual_of_rank(
    saved: Any, payload: Mapping[str, Any], rank: int, world_size: int
) -> torch.Tensor | None:
    """Return the residual that a rank continues with, or None if its own was not saved.

    `saved`: what the payload holds for the parameter.
    """
    residual: torch.Tensor | None = None
    if payload["residual"] == "mean":
        residual = saved
    elif _saved_by(payload, rank, world_size):
        residual = saved[payload["residual_ranks"].index(rank)]
    elif len(payload["residual_ranks"]) == payload["world_size"] != world_size:
        # Saved by all ranks of another world size. Giving every rank the mean preserves their mean.
        residual = torch.stack(saved).mean(0)
    return residual


def kept_dtype(field: StateField, parameter: torch.Tensor, plan: UnitPlan | None) -> torch.dtype:
    """Return the dtype in which a loaded field is kept. `plan`: None if it is not compressed."""
    return compute_dtype(parameter.dtype) if plan is None else field.dtype(plan)


def _saved_by(payload: Mapping[str, Any], rank: int, world_size: int) -> bool:
    return payload["world_size"] == world_size and rank in payload["residual_ranks"]


def _warn_of_inexact(payload: dict[str, Any], *, without_residuals: bool) -> None:
    reason = why_inexact(payload)
    logger.warning(
        "the saved state of hook %s is marked inexact%s. %s",
        payload["hook"],
        f", because {reason}" if reason else "",
        (
            "It is loaded without residuals, so the run resumes from residuals of zero; step and Q"
            " are kept."
            if without_residuals
            else "The run does not go on exactly as the run that saved it."
        ),
    )
