"""Checks checkpoint payloads, and splits them into files per rank. docs/checkpoint_format.md
documents their form.

A payload has plain types and tensors only, so that `torch.load(weights_only=True)` reads it. It may
come from an untrusted source, so everything is checked before any of it is used, and every defect
is a `PayloadError` with the key.

A split payload has a shared part, and a part per rank with the rank's residuals or its state of a
user's hook. All parts contain the same fingerprint, a hash of the data that are equal on every
rank, which identifies the parts of one save without communication.
"""

import hashlib
import math
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from commhooks.comm.counters import CONTINUED
from commhooks.errors import PayloadError, shown
from commhooks.gradients.layout import bytes_of
from commhooks.gradients.precision import compute_dtype

VERSION = 1
COUNTERS = "counters"
"""The key of the saving rank's counters."""
REPLICAS_EQUAL = "replicas_equal"
"""This key is False in payloads of hooks that average nothing, and missing in others."""
INEXACT_BECAUSE = "inexact_because"
"""The key of the reason why `exact` is False. Missing if it is True, and in older payloads."""
_LONGEST_REASON = 500  # characters in a message
_LARGEST = 2**62  # the largest counter; ranks exchange counters as int64
_MOST_RANKS = 2**20
# a GradScaler's scale and its inverse are normal float32 numbers
_LARGEST_LOSS_SCALE = float(2**127)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_header(payload: object) -> dict[str, Any]:
    if not isinstance(payload, dict) or not _is(payload.get("format"), "commhooks"):
        raise PayloadError(
            f"this is not the state of a commhooks hook (a {type(payload).__name__} without"
            " format='commhooks'); expected what a hook's state_dict returned. To begin with fresh"
            " memory, leave out this load"
        )
    if not _is(payload.get("version"), VERSION):
        raise PayloadError(
            f"the saved hook state has format version {shown(payload.get('version'))}; this"
            f" commhooks reads version {VERSION}: load it with the commhooks that saved it"
        )
    if type(payload.get("hook")) is not str or type(payload.get("options")) is not dict:
        raise damaged("'hook' is not a name or 'options' not a dict")
    counters = payload.get(COUNTERS)
    if type(counters) is not dict:
        raise damaged(f"{COUNTERS!r} is {shown(counters)}, not a dict")
    for name in CONTINUED:
        check_count(counters, name, 0)
    if type(payload.get(REPLICAS_EQUAL, True)) is not bool:
        raise damaged(f"{REPLICAS_EQUAL!r} is {shown(payload[REPLICAS_EQUAL])}, not True or False")
    check_count(payload, "step", 0)
    return payload


def check_learned(payload: dict[str, Any]) -> None:
    check_count(payload, "nonfinite_steps", 0)
    world_size = check_world_size(payload)
    scale: Any = payload.get("loss_scale")
    if type(scale) not in (int, float) or not 1 / _LARGEST_LOSS_SCALE < scale < _LARGEST_LOSS_SCALE:
        raise damaged(f"'loss_scale' is {shown(scale)}, not a positive number that float32 holds")
    if type(payload.get("exact")) is not bool:
        raise damaged(f"'exact' is {shown(payload.get('exact'))}, not True or False")
    if type(payload.get(INEXACT_BECAUSE, "")) is not str:
        raise damaged(f"{INEXACT_BECAUSE!r} is {shown(payload[INEXACT_BECAUSE])}, not a text")
    kind, ranks = payload.get("residual"), payload.get("residual_ranks")
    if type(kind) is not str or kind not in ("mean", "per_rank", "none"):
        raise damaged(f"'residual' is {shown(kind)}")
    if type(ranks) is not list or not all(
        type(rank) is int and 0 <= rank < world_size for rank in ranks
    ):
        raise damaged(f"'residual_ranks' is not a list of ranks below {world_size}")
    if len(set(ranks)) != len(ranks):
        raise damaged("'residual_ranks' holds a rank twice")
    for key in ("parameters", "batched_q", *bucket_keys(payload)):
        if type(payload.get(key)) is not dict:
            raise damaged(f"{key!r} is not a dict")
    for name, entry in payload["parameters"].items():
        _check_entry(name, entry, kind, len(ranks))
    for key in ("batched_q", *bucket_keys(payload)):
        for name, tensor in payload[key].items():
            if type(name) is not str or (key == "batched_q" and not name.startswith("batched.")):
                raise damaged(f"{key} has a key {shown(name)}")
            check_tensor(tensor, f"{key}[{shown(name)}]")
            too_large = key == "batched_q" and _largest(tensor) > torch.finfo(torch.float32).max
            if key == "batched_q" and (tensor.dim() != 2 or tensor.shape[0] < 1 or too_large):
                raise damaged(f"batched_q[{shown(name)}] is not a matrix of float32 numbers")


def inexact(payload: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return `payload` marked as inexact. `reason` continues a sentence after "because"."""
    return payload | {"exact": False, INEXACT_BECAUSE: reason}


def why_inexact(payload: dict[str, Any]) -> str:
    """Return the reason in a checked payload, for a message, as printable characters; "" if it has
    none.
    """
    reason = " ".join(payload.get(INEXACT_BECAUSE, "").split())[:_LONGEST_REASON].rstrip(".")
    return "".join(each if each.isprintable() else "?" for each in reason)


def check_range(name: str, entry: dict[str, Any], dtype: torch.dtype, loss_scale: float) -> None:
    """Check that the numbers of a checked entry are small enough for a step in `dtype`: with
    numbers near the largest, the sum of a row or a change of the loss scale yields inf, and no step
    would ever be committed again.
    """
    largest = torch.finfo(dtype).max
    where = f"parameters[{shown(name)}]"
    if entry["q"] is not None and _largest(entry["q"]) > largest:
        raise damaged(f"{where}['q'] holds numbers too large for {dtype}")
    residual = entry["residual"]
    for each in residual if isinstance(residual, list) else [] if residual is None else [residual]:
        if _largest(each) * max(1, 1 / loss_scale) > largest / 2**24:
            raise damaged(
                f"{where}['residual'] with loss_scale {loss_scale} holds numbers too large for"
                f" {dtype}"
            )


def factor_keys(entry: dict[str, Any]) -> list[str]:
    """Return the keys of an entry's replicated tensors: "q", and the fields of other
    compressors.
    """
    return [
        key
        for key, value in entry.items()
        if key not in ("shape", "row_dim", "residual") and value is not None
    ]


def bucket_keys(payload: dict[str, Any]) -> list[str]:
    """Return the keys under which compressors of whole buckets save tensors, without
    "batched_q".
    """
    return sorted(
        key
        for key in payload
        if type(key) is str and key.startswith("batched_") and key != "batched_q"
    )


def check_world_size(payload: dict[str, Any]) -> int:
    return check_count(payload, "world_size", 1, _MOST_RANKS)


def check_count(content: dict[str, Any], key: str, smallest: int, largest: int = _LARGEST) -> int:
    """Check that `content[key]` is an int (not a bool) from `smallest` to `largest`, and return
    it.
    """
    value = content.get(key)
    if type(value) is not int or not smallest <= value <= largest:
        raise damaged(f"{key!r} is {shown(value)}, not a whole number from {smallest} to {largest}")
    return value


def damaged(what: str) -> PayloadError:
    return PayloadError(f"damaged hook state: {what}")


def _is(value: object, expected: object) -> bool:
    """Return whether values and types are equal, which excludes tensors and bools that merely
    compare equal.
    """
    return type(value) is type(expected) and value == expected


def _check_entry(name: object, entry: object, kind: str, copies: int) -> None:
    where = f"parameters[{shown(name)}]"
    if type(name) is not str or type(entry) is not dict:
        raise damaged(f"{where} is not a dict with a name")
    for key in ("shape", "row_dim", "q", "residual"):
        if key not in entry:
            raise damaged(f"{where} has no {key!r}")
    shape, row_dim, residual = entry["shape"], entry["row_dim"], entry["residual"]
    if type(shape) is not list or not all(
        type(size) is int and 0 <= size < _LARGEST for size in shape
    ):
        raise damaged(f"{where}['shape'] is not a list of sizes")
    if type(row_dim) is not int or not 0 <= row_dim < max(len(shape), 1):
        raise damaged(f"{where}['row_dim'] is not a dimension")
    row_of_q = shape[:row_dim] + shape[row_dim + 1 :]
    for key in factor_keys(entry):
        if type(key) is not str:
            raise damaged(f"{where} has a key {shown(key)}")
        factor = entry[key]
        check_tensor(factor, f"{where}[{shown(key)}]")
        if key == "q" and (
            len(shape) < 2 or factor.shape[:1] == (0,) or list(factor.shape[1:]) != row_of_q
        ):
            raise damaged(f"{where}[{key!r}] does not fit the shape")
    if residual is None:
        return
    if isinstance(residual, list) != (kind == "per_rank") or kind == "none":
        raise damaged(f"{where}['residual'] does not go with residual={kind!r}")
    if isinstance(residual, list) and len(residual) != copies:
        raise damaged(f"{where}['residual'] does not hold one tensor per rank")
    for each in residual if isinstance(residual, list) else [residual]:
        check_tensor(each, f"{where}['residual']")
        if list(each.shape) != shape:
            raise damaged(f"{where}['residual'] does not fit the shape")


def check_tensor(value: Any, where: str) -> None:
    """Check that `value` is a tensor of real, finite numbers with enough storage: a hook that
    loaded a non-finite number could never commit a step. `where`: the key, for messages.
    """
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    if not plain or value.layout != torch.strided or value.is_nested or value.device.type == "meta":
        raise damaged(f"{where} is not a tensor with numbers in it")
    if value.dtype not in FLOATS:
        raise damaged(f"{where} has dtype {value.dtype}")
    # Strides of 0 make a tensor of any size from one number. Reading it would take forever.
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise damaged(f"{where} has more elements than there are numbers in it")
    if not math.isfinite(_largest(value)):
        raise damaged(f"{where} holds inf or NaN")


def _largest(value: torch.Tensor) -> float:
    if not value.numel():
        return 0.0
    low, high = torch.aminmax(value.detach())
    return float(torch.maximum(-low, high))


# ---- parts
# --------------------------------------------------------------------------------------------------

PART_FORMAT = "commhooks rank part"


def split(
    saved: dict[str, Any], rank: int, run: int | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Split the result of `state_dict()` into the shared part and the part of this rank (None if it
    is empty). `run`: a number that only the ranks of this run know; see `CommHook.run_number`. If
    each rank has residuals for a share of the parameters only, every rank has a part, and the
    shared part marks the residuals as split.
    """
    saved = saved if run is None else {**saved, "run": f"{run:016x}"}
    shared = {**saved, "fingerprint": save_id(saved)}
    shares = shared.pop("residual_shares", False)
    own: dict[str, torch.Tensor] = {}
    if saved.get("residual") == "per_rank":
        if saved["residual_ranks"] != [rank]:
            raise ValueError(
                f"split: expected the residuals of rank {rank} only, not {saved['residual_ranks']}"
            )
        entries = saved["parameters"]
        own = {
            name: entry["residual"][0]
            for name, entry in entries.items()
            if entry["residual"] is not None
        }
        without = {
            name: entry | {"residual": [] if shares or name in own else None}
            for name, entry in entries.items()
        }
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
        (f"{key} of {name}", each)
        for key in bucket_keys(saved)
        for name, each in sorted(saved[key].items())
    ]
    for name, q in factors:
        digest.update(repr((name, None if q is None else (q.dtype, tuple(q.shape)))).encode())
        if q is not None:
            digest.update(bytes_of(q.detach().cpu()))
    return digest.hexdigest()


def check_shared(shared: object) -> dict[str, Any]:
    checked = check_header(shared)
    if "parameters" in checked:
        check_learned(checked)
    else:
        check_world_size(checked)
    try:
        whole = checked.get("fingerprint") == save_id(checked)
    except (
        Exception
    ):  # not made by `split`, for example options that cannot be sorted or have no repr
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
    if shared.get("hook_state") is not None:
        return [rank] if shared["world_size"] == world_size else []
    if not any(
        isinstance(entry["residual"], list) for entry in shared.get("parameters", {}).values()
    ):
        return []
    return [rank] if shared["world_size"] == world_size else list(range(shared["world_size"]))


def problem_of_part(shared: dict[str, Any], part: object, rank: int) -> str | None:
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
    """Join the parts to the payload that `rank` loads. `parts`: in the order of `ranks_needed`,
    checked by `problem_of_part`; None for a missing part. An iterator is read part by part, so that
    only one model-sized copy is in memory.

    The payload has the rank's own residuals if the world size is unchanged, else the mean of all
    residuals. If a part is missing, it contains no residuals but states that there were some, so
    that all ranks drop theirs.
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
    """Return the end of a message about a file that `torch.load` failed to read (`error`), if the
    file is truncated; "" if it is not, or if it is not on this machine.
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
