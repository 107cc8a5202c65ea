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

from commhooks.errors import PayloadError
from commhooks.layout import memory_order, to_logical, to_memory
from commhooks.memory import Memory

logger = logging.getLogger(__name__)

VERSION = 1
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
        refit: (name, rows) -> fresh Q of `rank x m` whose first rows may be replaced by saved ones.
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
        q = memory.q.get(name)
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
    return {
        "format": "commhooks",
        "version": VERSION,
        "hook": target.hook,
        "options": dict(target.options),
        "step": memory.step,
        "nonfinite_steps": memory.nonfinite_steps,
        "world_size": target.world_size,
        "loss_scale": memory.loss_scale,
        "exact": exact,
        "residual": residual,
        "residual_ranks": list(residual_ranks),
        "parameters": parameters,
        "batched_q": {
            name: q.detach().to("cpu", copy=True) for name, q in memory.q.items() if name.startswith("batched.")
        },
        "hook_state": None,
    }


def check_header(payload: object) -> dict[str, Any]:
    """The parts that every payload has, whatever the hook.

    Raises:
        PayloadError: not a payload, or of a version that this one does not know.
    """
    if not isinstance(payload, dict) or payload.get("format") != "commhooks":
        raise PayloadError(
            f"this is not the state of a commhooks hook (a {type(payload).__name__} without format='commhooks'); "
            "give load_state_dict what state_dict returned"
        )
    version = payload.get("version")
    if version != VERSION:
        raise PayloadError(
            f"the saved hook state has version {version!r}, this commhooks reads version {VERSION}: "
            "load it with the version of commhooks that wrote it, or a newer one"
        )
    _expect(payload, "hook", str)
    _expect(payload, "options", dict)
    return payload


def read(payload: dict[str, Any], target: Target, *, strict: bool) -> Memory:
    """Make new memory of a payload whose header has been checked. Changes nothing but the new memory.

    Raises:
        PayloadError: another model (names and shapes are listed) and `strict`, or a damaged payload.
    """
    parameters = _expect(payload, "parameters", dict)
    step = _expect(payload, "step", int)
    residual_kind = _expect(payload, "residual", str)
    residual_ranks = _expect(payload, "residual_ranks", list)
    world_size = _expect(payload, "world_size", int)
    if step < 0 or world_size < 1 or residual_kind not in ("mean", "per_rank", "none"):
        raise PayloadError("damaged hook state: step, world_size or residual is out of range")
    for name, entry in parameters.items():
        _check_entry(name, entry, residual_kind, residual_ranks)
    fitting = _compare(parameters, target, strict)

    memory = Memory(step=step, nonfinite_steps=_expect(payload, "nonfinite_steps", int))
    memory.residuals_shared = residual_kind != "per_rank"
    memory.loss_scale = float(_expect(payload, "loss_scale", (int, float)))
    pick = _residual_picker(residual_kind, residual_ranks, world_size, target)
    for name in fitting:
        entry, parameter = parameters[name], target.parameters[name]
        if name in target.ranks:
            q = _fit_q(name, entry, parameter, target)
            if q is not None:
                memory.q[name] = q.to(parameter.device)
        if entry["residual"] is not None:
            picked = pick(entry["residual"])
            if picked is None:
                memory.residual_missing = True
            else:
                memory.residuals[name] = to_memory(picked, parameter).contiguous().clone().to(parameter.device)
    if residual_kind == "none" and payload.get("exact") is False and target.rank == 0:
        logger.warning(
            "the saved state of hook %s is marked inexact: it was saved where not all ranks could take part, without "
            "residuals. Training resumes from residuals of zero; step and Q are kept.",
            payload["hook"],
        )
    if memory.residual_missing:
        memory.residuals.clear()
    for name, q in _expect(payload, "batched_q", dict).items():
        if not isinstance(q, torch.Tensor) or q.dim() != 2:
            raise PayloadError(f"damaged hook state: batched_q[{name!r}] is not a matrix")
        memory.q[name] = q.clone()
    return memory


def _compare(parameters: dict[str, Any], target: Target, strict: bool) -> list[str]:
    """The names that fit. Raises or warns where some do not."""
    problems = []
    for name in parameters:
        if name not in target.parameters:
            problems.append(f"{name}: in the saved state, not in the model")
        elif list(target.parameters[name].shape) != parameters[name]["shape"]:
            saved, now = tuple(parameters[name]["shape"]), tuple(target.parameters[name].shape)
            problems.append(f"{name}: saved with shape {saved}, now {now}")
    problems += [
        f"{name}: in the model, not in the saved state" for name in target.parameters if name not in parameters
    ]
    bad = {problem.split(":")[0] for problem in problems}
    if problems:
        text = "the saved hook state is of another model:\n  " + "\n  ".join(problems)
        if strict:
            raise PayloadError(f"{text}\nstrict=False gives these parameters fresh memory and loads the others")
        if target.rank == 0:
            logger.warning("%s\nThese parameters start with fresh memory (strict=False).", text)
    return [name for name in parameters if name not in bad]


def _residual_picker(
    kind: str, ranks: list[int], world_size: int, target: Target
) -> Callable[[Any], torch.Tensor | None]:
    """How to get this rank's residual from what is saved per parameter; None where it is not there."""
    if kind == "mean":
        return lambda saved: saved
    if world_size == target.world_size and target.rank in ranks:
        place = ranks.index(target.rank)
        return lambda saved: saved[place]
    if sorted(ranks) == list(range(world_size)) and world_size != target.world_size:
        # Another world: everybody takes the mean, with which the sum over the ranks is what it was.
        return lambda saved: torch.stack(saved).mean(0)
    return lambda saved: None


def _fit_q(name: str, entry: dict[str, Any], parameter: torch.Tensor, target: Target) -> torch.Tensor | None:
    """The saved Q (r x m, memory order), refitted to another rank; None where the matrix has other rows now."""
    if entry["q"] is None or entry["row_dim"] != memory_order(parameter)[0]:
        return None
    rows = entry["q"].shape[0]
    q = _q_to_memory(entry["q"], parameter)
    rank = target.ranks[name]
    if rows == rank:
        return q.clone()
    fresh = q[:rank].clone() if rows > rank or target.refit is None else target.refit(name).to(q)
    if rows < rank:
        fresh[:rows] = q
    return fresh


def _check_entry(name: object, entry: object, residual_kind: str, ranks: list[int]) -> None:
    def bad(what: str) -> PayloadError:
        return PayloadError(f"damaged hook state: parameters[{name!r}]{what}")

    if not isinstance(name, str) or not isinstance(entry, dict):
        raise bad(" is not a dict with a name")
    for key in ("shape", "row_dim", "q", "residual"):
        if key not in entry:
            raise bad(f" has no {key!r}")
    shape, q, residual = entry["shape"], entry["q"], entry["residual"]
    if not isinstance(shape, list) or not all(isinstance(x, int) and x >= 0 for x in shape):
        raise bad("['shape'] is not a list of sizes")
    dims = len(shape)
    if not isinstance(entry["row_dim"], int) or not 0 <= entry["row_dim"] < max(dims, 1):
        raise bad("['row_dim'] is not a dimension")
    if q is not None:
        rest = shape[: entry["row_dim"]] + shape[entry["row_dim"] + 1 :]
        if not isinstance(q, torch.Tensor) or dims < 2 or not q.is_floating_point() or list(q.shape[1:]) != rest:
            raise bad("['q'] does not fit the shape")
    copies = residual if isinstance(residual, list) else [residual]
    if residual is None:
        return
    if isinstance(residual, list) != (residual_kind == "per_rank") or residual_kind == "none":
        raise bad(f"['residual'] does not go with residual={residual_kind!r}")
    if isinstance(residual, list) and len(residual) != len(ranks):
        raise bad("['residual'] does not hold one tensor per rank")
    for each in copies:
        if not isinstance(each, torch.Tensor) or not each.is_floating_point() or list(each.shape) != shape:
            raise bad("['residual'] does not fit the shape")


def _expect(payload: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    value = payload.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PayloadError(f"damaged hook state: {key!r} is {type(value).__name__}")
    return value


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
