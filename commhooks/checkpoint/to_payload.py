"""Writes the learned state of a session as a checkpoint payload: plain types and CPU tensors.

docs/checkpoint_format.md documents the form, and `payload.py` checks it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.checkpoint.payload import COUNTERS, FLOATS, INEXACT_BECAUSE, VERSION
from commhooks.compressors.state_field import StateField
from commhooks.engine.session import ExchangeDriver
from commhooks.engine.state import LearnedState
from commhooks.errors import PayloadError
from commhooks.gradients.layout import memory_order


@dataclass(frozen=True)
class SavedResiduals:
    """Holds the residuals for a payload: the only tensors that differ between ranks.

    Attributes:
        kind: "mean", "per_rank" or "none".
        ranks: the ranks whose residuals these are.
        tensors: per parameter a flat tensor, or a list with one tensor per rank in `ranks`.
        inexact: why a run that resumes from the payload does not continue exactly as this run; ""
            if it does.
        shares: whether each rank has residuals for a share of the parameters only.
    """

    kind: str = "none"
    ranks: list[int] = dataclasses.field(default_factory=list)
    tensors: Mapping[str, torch.Tensor | list[torch.Tensor]] = dataclasses.field(
        default_factory=dict
    )
    inexact: str = ""
    shares: bool = False


def payload_of(
    session: ExchangeDriver, hook: str, world_size: int, residuals: SavedResiduals
) -> dict[str, Any]:
    """Return the payload of `session`. The caller holds the lock of the learned state."""
    compressor = session.compressor
    state = session.state
    payload = {
        "format": "commhooks",
        "version": VERSION,
        "hook": hook,
        "options": dataclasses.asdict(compressor.config),
        "step": state.step,
        "nonfinite_steps": state.nonfinite_steps,
        COUNTERS: session.counters.cumulative(),
        "world_size": world_size,
        "loss_scale": float(state.loss_scale),
        "exact": not residuals.inexact,
        "residual": residuals.kind,
        "residual_ranks": list(residuals.ranks),
        "parameters": _parameter_entries(
            state,
            [field for field in compressor.state_fields if field.per == "parameter"],
            residuals.tensors,
            session.consensus.binding.names.named_parameters(),
        ),
        "batched_q": {},
        "hook_state": None,
    }
    for field in compressor.state_fields:
        if field.per == "bucket":
            payload[f"batched_{field.key}"] = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in state[field.key].items()
            }
    if residuals.inexact:
        payload[INEXACT_BECAUSE] = residuals.inexact
    if residuals.shares:
        payload["residual_shares"] = True
    if compressor.notes is not None:
        payload["notes"] = compressor.notes
    return payload


def _parameter_entries(
    state: LearnedState,
    fields: Iterable[StateField],
    residuals: Mapping[str, torch.Tensor | list[torch.Tensor]],
    parameters: Mapping[str, torch.Tensor],
) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        entries[name] = entry = {
            "shape": list(parameter.shape),
            "row_dim": memory_order(parameter)[0] if parameter.dim() else 0,
            # Every entry has these two keys, whatever the hook.
            "q": None,
            "residual": None,
        }
        for field in fields:
            tensors = state[field.key] if field.replicated else residuals
            value = tensors.get(name)
            if isinstance(value, list):
                entry[field.key] = [_saved(field, tensor, parameter) for tensor in value]
            elif value is not None:
                entry[field.key] = _saved(field, value, parameter)
    return entries


def _saved(field: StateField, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    saved = field.to_saved(value, parameter)
    if saved.dtype not in FLOATS:
        raise PayloadError(
            f"the field {field.key!r} is kept in {saved.dtype}; a checkpoint takes float16,"
            " bfloat16, float32, float64"
        )
    return saved
