"""Divide a payload into parts for frameworks in which every rank writes its own file: one shared part, one per rank.

The shared part is the payload with empty lists in place of the residuals, and a fingerprint. The part of a rank holds
its residuals by parameter name, or its state of a user's hook, and the same fingerprint: a hash of the data that are
equal on every rank (hook, options, step, Q, the number of the run), so that parts of one save can be recognised without
communication.
Documented in docs/checkpoint_format.md. Pure functions; no files, no collectives.
"""

import ctypes
import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from commhooks.checkpoint.checks import (
    VERSION,
    bucket_keys,
    check_header,
    check_learned,
    check_range,
    check_tensor,
    check_world_size,
    factor_keys,
)
from commhooks.errors import PayloadError, shown
from commhooks.gradients.precision import compute_dtype

PART_FORMAT = "commhooks rank part"


def split(saved: dict[str, Any], rank: int, run: int | None = None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Divide the result of `state_dict()` into the shared part and the part of this rank (None if that is empty). If
    each rank has residuals for a share of the parameters only, every rank has a part, and the shared part says so, even
    if the rank that makes it has no residuals.

    Args:
        run: a number that the ranks have agreed on, and no others; see `CommHook.run_number`.
    """
    saved = saved if run is None else {**saved, "run": f"{run:016x}"}
    shared = {**saved, "fingerprint": save_id(saved)}
    shares = shared.pop("residual_shares", False)
    own: dict[str, torch.Tensor] = {}
    if saved.get("residual") == "per_rank":
        if saved["residual_ranks"] != [rank]:
            raise ValueError(f"split: expected the residuals of rank {rank} only, not {saved['residual_ranks']}")
        entries = saved["parameters"]
        own = {name: entry["residual"][0] for name, entry in entries.items() if entry["residual"] is not None}
        without = {name: entry | {"residual": [] if shares or name in own else None} for name, entry in entries.items()}
        shared |= {"parameters": without, "residual_ranks": []}
    if not own and not shares and saved.get("hook_state") is None:
        return shared, None
    part = {
        "format": PART_FORMAT,
        "version": VERSION,
        "fingerprint": shared["fingerprint"],
        "rank": rank,
        "world_size": saved["world_size"],
        "residuals": own,
        "hook_state": saved.get("hook_state"),
    }
    return shared, part


def save_id(saved: dict[str, Any]) -> str:
    """A hash of the data of a payload that are equal on every rank: hook, options, step, loss scale, factors, run."""
    digest = hashlib.sha256()
    head = [saved.get(key) for key in ("hook", "step", "world_size", "loss_scale")]
    digest.update(repr((head, sorted(saved["options"].items()))).encode())
    digest.update(str(saved.get("run", "")).encode())
    entries = saved.get("parameters", {}).items()
    factors = [(name, entry["q"]) for name, entry in entries]
    for name, entry in entries:
        factors += [(f"{key} of {name}", entry[key]) for key in factor_keys(entry) if key != "q"]
    factors += sorted(saved.get("batched_q", {}).items())
    factors += [(f"{key} of {name}", each) for key in bucket_keys(saved) for name, each in sorted(saved[key].items())]
    for name, q in factors:
        digest.update(repr((name, None if q is None else (q.dtype, tuple(q.shape)))).encode())
        if q is not None:
            flat = q.detach().cpu().contiguous()
            # Read the bytes of the tensor without numpy, which torch does not require.
            digest.update(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()))
    return digest.hexdigest()


def check_shared(shared: object) -> dict[str, Any]:
    """Check that a shared part is complete and undamaged; returns it.

    Raises:
        PayloadError: it is incomplete or damaged.
    """
    checked = check_header(shared)
    if "parameters" in checked:
        check_learned(checked)
    else:
        check_world_size(checked)
    try:
        whole = checked.get("fingerprint") == save_id(checked)
    except Exception:  # not made by `split`, for example options that cannot be sorted or have no repr
        whole = False
    if not whole:
        raise PayloadError("damaged hook state: its content and its fingerprint do not belong together")
    return checked


def ranks_needed(shared: dict[str, Any], rank: int, world_size: int) -> list[int]:
    """The ranks whose parts `rank` (of `world_size` ranks now) must read to load: none, its own, or all that saved."""
    if shared.get("hook_state") is not None:
        return [rank] if shared["world_size"] == world_size else []
    if not any(isinstance(entry["residual"], list) for entry in shared.get("parameters", {}).values()):
        return []
    return [rank] if shared["world_size"] == world_size else list(range(shared["world_size"]))


def problem_of_part(shared: dict[str, Any], part: object, rank: int) -> str | None:
    """The reason why `part` cannot be used with `shared` as the part of `rank`; None if it can."""
    if not isinstance(part, dict) or part.get("format") != PART_FORMAT or part.get("version") != VERSION:
        return "is not the part of one rank of a hook state of this version"
    if part.get("fingerprint") != shared["fingerprint"]:
        return "is of another save than the shared file beside it"
    if part.get("rank") != rank:
        return f"is of rank {shown(part.get('rank'))}, not of rank {rank}"
    residuals = part.get("residuals")
    if not isinstance(residuals, dict):
        return "has no residuals"
    if "hook_state" not in part:
        return "has no hook_state"
    entries = shared.get("parameters", {})
    for name, residual in residuals.items():
        q = entries[name]["q"] if name in entries else None
        try:
            check_tensor(residual, "it")
            if "loss_scale" in shared:
                dtype = torch.float32 if q is None else compute_dtype(q.dtype)
                check_range(name, {"q": None, "residual": residual}, dtype, shared["loss_scale"])
        except PayloadError as error:
            return f"has a residual for {shown(name)} that does not fit ({error})"
        if name not in entries or list(residual.shape) != entries[name]["shape"]:
            return f"has a residual for {shown(name)} that does not fit"
    return None


def merge(shared: dict[str, Any], parts: Iterable[dict[str, Any] | None], rank: int, world_size: int) -> dict[str, Any]:
    """The payload that `rank` (of `world_size` ranks now) loads.

    Args:
        parts: in the order of `ranks_needed`, checked by `problem_of_part`; None for a missing one. An iterator is read
            one part at a time, so that only one model-sized copy is in memory.

    Returns:
        The payload with the rank's own residuals if the world size is unchanged, else with their mean. If a part is
        missing, the payload states that residuals exist but contains none: after loading it, all ranks drop theirs.
    """
    merged = {key: value for key, value in shared.items() if key not in ("fingerprint", "run")}
    if shared.get("hook_state") is not None:
        for part in parts:
            merged["hook_state"] = shared["hook_state"] if part is None else part["hook_state"]
        return merged
    needed = ranks_needed(shared, rank, world_size)
    if not needed:
        return merged
    total: dict[str, torch.Tensor] = {}
    for part in parts:
        if part is None:
            return merged
        for name, residual in part["residuals"].items():
            total[name] = residual if name not in total else total[name] + residual
    entries = shared["parameters"]
    if shared["world_size"] == world_size:
        residuals: dict[str, Any] = {name: [residual] for name, residual in total.items()}
        merged |= {"residual": "per_rank", "residual_ranks": [rank]}
    else:
        residuals = {name: residual / shared["world_size"] for name, residual in total.items()}
        merged |= {"residual": "mean", "residual_ranks": needed}
    # A missing entry stands for a residual of zeros.
    merged["parameters"] = {name: entry | {"residual": residuals.get(name)} for name, entry in entries.items()}
    return merged
