"""The checkpoint payload: what `CommHook.state_dict()` returns. Documented in docs/checkpoint_format.md.

Plain types and tensors only, so that `torch.load(weights_only=True)` reads it. Everything is keyed by parameter name
and in the parameter's logical order, whatever its memory format is. Loading is all or nothing: `read` checks everything
and returns new memory; only then does the caller take it over.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from commhooks.checkpoint.checks import VERSION, check_header, check_low_rank, check_range
from commhooks.engine.state import Memory
from commhooks.errors import PayloadError
from commhooks.gradients.layout import memory_order, to_logical, to_memory
from commhooks.gradients.precision import compute_dtype

logger = logging.getLogger(__name__)

__all__ = ["SAVE_RESIDUAL", "VERSION", "SaveResidual", "Target", "build", "check_header", "read"]

SaveResidual = Literal["mean", "per_rank", "drop"]
SAVE_RESIDUAL: tuple[str, ...] = ("mean", "per_rank", "drop")


@dataclass(frozen=True)
class Target:
    """What a payload is loaded into or made from.

    Attributes:
        hook: its name.
        options: its options, plain types.
        parameters: name -> parameter, as the model has them now.
        ranks: name -> rank of the compressed ones.
        rank, world_size: of this process in the hook's group.
        refit: name -> fresh Q of `rank x m`, whose first rows are replaced by saved ones.
    """

    hook: str
    options: dict[str, Any]
    parameters: Mapping[str, torch.Tensor]
    ranks: Mapping[str, int]
    rank: int
    world_size: int
    refit: Callable[[str], torch.Tensor] | None = None


def build(
    target: Target,
    memory: Memory,
    residual: str,
    residual_ranks: list[int],
    residuals: Mapping[str, torch.Tensor | list[torch.Tensor]],
    *,
    exact: bool,
) -> dict[str, Any]:
    """Put a payload together. `residuals`: per parameter, flat in memory order, one tensor or one per rank."""
    parameters: dict[str, dict[str, Any]] = {}
    for name, parameter in target.parameters.items():
        saved = residuals.get(name)
        q = memory.q.get(name) if name not in memory.p_is_newer else None
        parameters[name] = {
            "shape": list(parameter.shape),
            "row_dim": memory_order(parameter)[0] if parameter.dim() else 0,
            "q": None if q is None else _q_to_logical(q.detach().to("cpu", copy=True), parameter),
            "residual": (
                [_logical_copy(each, parameter) for each in saved]
                if isinstance(saved, list)
                else None
                if saved is None
                else _logical_copy(saved, parameter)
            ),
        }
        if name in memory.p_is_newer:
            parameters[name]["p"] = memory.p[name].detach().to("cpu", copy=True)
    return {
        "format": "commhooks",
        "version": VERSION,
        "hook": target.hook,
        "options": dict(target.options),
        "step": memory.step,
        "nonfinite_steps": memory.nonfinite_steps,
        "world_size": target.world_size,
        "loss_scale": float(memory.loss_scale),
        "exact": exact,
        "residual": residual,
        "residual_ranks": list(residual_ranks),
        "parameters": parameters,
        "batched_q": {
            name: q.detach().to("cpu", copy=True) for name, q in memory.q.items() if name.startswith("batched.")
        },
        "hook_state": None,
    }


def read(payload: dict[str, Any], target: Target, *, strict: bool) -> Memory:
    """Make new memory of a payload whose header has been checked. Changes nothing but the new memory.

    Raises:
        PayloadError: another model (names and shapes are listed) and `strict`, or a damaged payload.
    """
    check_low_rank(payload)
    parameters = payload["parameters"]
    fitting = _compare(parameters, target, strict)
    memory = Memory(step=payload["step"], nonfinite_steps=payload["nonfinite_steps"])
    memory.residuals_shared = payload["residual"] != "per_rank"
    memory.loss_scale = float(payload["loss_scale"])
    pick = _residual_picker(payload["residual"], payload["residual_ranks"], payload["world_size"], target)
    for name in fitting:
        entry, parameter = parameters[name], target.parameters[name]
        check_range(name, entry, compute_dtype(parameter.dtype), memory.loss_scale)
        if name in target.ranks:
            q = _fit_q(name, entry, parameter, target)
            if q is not None:
                memory.q[name] = q.to(parameter.device, compute_dtype(parameter.dtype))
            p = _fit_p(entry, parameter, target.ranks[name])
            if p is not None and target.options.get("alternate"):
                memory.p[name] = p.to(parameter.device, compute_dtype(parameter.dtype))
                memory.p_is_newer.add(name)
        # The gradient of a complex parameter is sent as it is: it leaves no residual.
        if entry["residual"] is not None and not parameter.is_complex():
            picked = pick(entry["residual"])
            if picked is None:
                memory.residual_missing = True
            else:
                flat = to_memory(picked.detach(), parameter)
                flat = flat.to(parameter.device, compute_dtype(parameter.dtype), copy=True)
                memory.residuals[name] = flat.contiguous()
    if payload["residual"] == "none" and payload.get("exact") is False:
        memory.residual_missing = memory.missing_was_said = True
        if target.rank == 0:
            logger.warning(
                "the saved state of hook %s is marked inexact: it was saved where not all ranks could take part, "
                "without residuals. Training resumes from residuals of zero; step and Q are kept.",
                payload["hook"],
            )
    if memory.residual_missing:
        memory.residuals.clear()
    memory.q.update((name, q.detach().clone()) for name, q in payload["batched_q"].items())
    return memory


def _compare(parameters: dict[str, Any], target: Target, strict: bool) -> list[str]:
    """The names that fit. Raises or warns where some do not."""
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
            raise PayloadError(f"{text}\nstrict=False gives these parameters fresh memory and loads the others")
        if target.rank == 0:
            logger.warning("%s\nThese parameters start with fresh memory (strict=False).", text)
    return [name for name in parameters if name not in problems]


def _residual_picker(
    kind: str, ranks: list[int], world_size: int, target: Target
) -> Callable[[Any], torch.Tensor | None]:
    """How to get this rank's residual from what is saved per parameter; None where it is not there."""
    if kind == "mean":
        return lambda saved: saved
    if world_size == target.world_size and target.rank in ranks:
        place = ranks.index(target.rank)
        return lambda saved: saved[place]
    if len(ranks) == world_size != target.world_size:  # all of them: none is there twice
        # Another world: everybody takes the mean, with which the sum over the ranks is what it was.
        return lambda saved: torch.stack(saved).mean(0)
    return lambda saved: None


def _fit_q(name: str, entry: dict[str, Any], parameter: torch.Tensor, target: Target) -> torch.Tensor | None:
    """The saved Q (r x m, memory order), refitted to another rank; None where the matrix has other rows now."""
    if entry["q"] is None or entry["row_dim"] != memory_order(parameter)[0]:
        return None
    rows = entry["q"].shape[0]
    q = _q_to_memory(entry["q"].detach(), parameter)
    rank = target.ranks[name]
    if rows == rank:
        return q.clone()
    fresh = q[:rank].clone() if rows > rank or target.refit is None else target.refit(name).to(q)
    if rows < rank:
        fresh[:rows] = q
    return fresh


def _fit_p(entry: dict[str, Any], parameter: torch.Tensor, rank: int) -> torch.Tensor | None:
    """The saved P (r x n), refitted to another rank: missing rows are zero, which the codec refills."""
    saved = entry.get("p")
    if saved is None or entry["row_dim"] != memory_order(parameter)[0]:
        return None
    p = torch.zeros(rank, saved.shape[1], dtype=saved.dtype)
    rows = min(rank, saved.shape[0])
    p[:rows] = saved[:rows]
    return p


def _logical_copy(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """On the CPU: a clone on an accelerator would take memory that the model was given."""
    return to_logical(flat.detach().to("cpu", copy=True), parameter).contiguous()


def _q_to_logical(q: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`r x m` in memory order -> `r x (the other dimensions in logical order)`."""
    rest = memory_order(parameter)[1:]
    view = q.view(q.shape[0], *(parameter.size(dim) for dim in rest))
    return view.permute(0, *(1 + rest.index(dim) for dim in sorted(rest))).contiguous()


def _q_to_memory(q: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    rest = memory_order(parameter)[1:]
    ordered = sorted(rest)
    return q.permute(0, *(1 + ordered.index(dim) for dim in rest)).reshape(q.shape[0], -1)
