"""Splits a payload into files for the ranks, and joins the files again.

docs/checkpoint_format.md documents their form. The shared part holds what is equal on all ranks;
the part of a rank holds its residuals, or its state of a user's hook. All parts of one save contain
the same fingerprint, a hash of the data that are equal on every rank, which identifies them without
communication.
"""

import hashlib
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from commhooks.checkpoint.payload import (
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
from commhooks.gradients.layout import bytes_of
from commhooks.gradients.precision import compute_dtype

PART_FORMAT = "commhooks rank part"


def split(
    saved: dict[str, Any], rank: int, run: int | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Split the result of `state_dict()` into the shared part and the part of this rank.

    The part is None if it would be empty. If each rank has residuals for a share of the parameters
    only, every rank has a part, and the shared part marks the residuals as split. `run`: a number
    that only the ranks of this run know; see `CommHook.run_number`.
    """
    saved = saved if run is None else {**saved, "run": f"{run:016x}"}
    shared = {**saved, "fingerprint": save_id(saved)}
    shares = shared.pop("residual_shares", False)
    residuals: dict[str, torch.Tensor] = {}
    if saved.get("residual") == "per_rank":
        if saved["residual_ranks"] != [rank]:
            raise ValueError(
                f"split: expected the residuals of rank {rank} only, not {saved['residual_ranks']}"
            )
        entries = saved["parameters"]
        residuals = {
            name: entry["residual"][0]
            for name, entry in entries.items()
            if entry["residual"] is not None
        }
        # []: the residual is in the ranks' parts; without them it counts as missing
        without = {
            name: entry | {"residual": [] if shares or name in residuals else None}
            for name, entry in entries.items()
        }
        shared |= {"parameters": without, "residual_ranks": []}
    if not residuals and not shares and saved.get("hook_state") is None:
        return shared, None
    part = {
        "format": PART_FORMAT,
        "version": VERSION,
        "fingerprint": shared["fingerprint"],
        "rank": rank,
        "world_size": saved["world_size"],
        "residuals": residuals,
        "hook_state": saved.get("hook_state"),
    }
    return shared, part


def save_id(saved: dict[str, Any]) -> str:
    """Return the fingerprint of a save: a hash of what is equal on all ranks."""
    digest = hashlib.sha256()
    head = [saved.get(key) for key in ("hook", "step", "world_size", "loss_scale")]
    digest.update(repr((head, sorted(saved["options"].items()))).encode())
    digest.update(str(saved.get("run", "")).encode())
    entries = saved.get("parameters", {}).items()
    factors = [(name, entry["q"]) for name, entry in entries]
    for name, entry in entries:
        factors += [(f"{key} of {name}", entry[key]) for key in factor_keys(entry) if key != "q"]
    factors += sorted(saved.get("batched_q", {}).items())
    factors += [
        (f"{key} of {name}", tensor)
        for key in bucket_keys(saved)
        for name, tensor in sorted(saved[key].items())
    ]
    for name, factor in factors:
        kind = None if factor is None else (factor.dtype, tuple(factor.shape))
        digest.update(repr((name, kind)).encode())
        if factor is not None:
            digest.update(bytes_of(factor.detach().cpu()))
    return digest.hexdigest()


def check_shared(shared: object) -> dict[str, Any]:
    """Return the shared part if it is whole; raise PayloadError if not."""
    checked = check_header(shared)
    if "parameters" in checked:
        check_learned(checked)
    else:
        check_world_size(checked)
    try:
        whole = checked.get("fingerprint") == save_id(checked)
    except Exception:
        # Not made by `split`: for example, options that cannot be sorted or have no repr.
        whole = False
    if not whole:
        raise PayloadError(
            "damaged hook state: its content and its fingerprint do not belong together"
        )
    return checked


def ranks_needed(shared: dict[str, Any], rank: int, world_size: int) -> list[int]:
    """Return the ranks whose parts `rank` must read: none, only `rank`, or all that saved.

    `world_size`: the current one.
    """
    same_world = shared["world_size"] == world_size
    if shared.get("hook_state") is not None:
        return [rank] if same_world else []
    entries = shared.get("parameters", {}).values()
    if not any(isinstance(entry["residual"], list) for entry in entries):
        return []
    return [rank] if same_world else list(range(shared["world_size"]))


def problem_of_part(shared: dict[str, Any], part: object, rank: int) -> str | None:
    """Return why `part` cannot be used as the part of `rank`, as the end of a sentence, or None."""
    if (
        not isinstance(part, dict)
        or part.get("format") != PART_FORMAT
        or part.get("version") != VERSION
    ):
        return "is not the part of one rank of a hook state of this version"
    if part.get("fingerprint") != shared["fingerprint"]:
        return "is of another save than the shared file in its folder"
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


def merge(
    shared: dict[str, Any], parts: Iterable[dict[str, Any] | None], rank: int, world_size: int
) -> dict[str, Any]:
    """Join the parts to the payload that `rank` loads.

    The payload has the rank's own residuals if the world size is unchanged, else the mean of all
    residuals. If a part is missing, it contains no residuals but states that there were some, so
    that all ranks drop theirs.

    Args:
        parts: in the order of `ranks_needed`, checked by `problem_of_part`; None for a missing
            part. An iterator is read part by part, so that only one model-sized copy is in memory.
        world_size: the current one.
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
    # A missing entry means a residual of zeros.
    merged["parameters"] = {
        name: entry | {"residual": residuals.get(name)} for name, entry in entries.items()
    }
    return merged


def cut_off(path: str | Path, error: Exception) -> str:
    """Return the end of a message about a truncated file that `torch.load` failed to read.

    Returns "" if the file is not truncated, or not on this machine. `error`: what `torch.load`
    raised.
    """
    try:
        size = Path(path).stat().st_size
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
    except OSError:
        return ""
    if size == 0:
        return "cannot be read: it is empty, because the program that wrote it was interrupted"
    # In torch's older format the pickle itself ends early (torch 2.13, Python 3.10 to 3.14).
    early = isinstance(error, EOFError) or re.search(
        "unexpected EOF|data was truncated|Ran out of input", str(error)
    )
    if early or (is_zip and not zipfile.is_zipfile(path)):
        return (
            f"cannot be read: it is cut off after {size} bytes, because writing or copying it was"
            " interrupted"
        )
    return ""
