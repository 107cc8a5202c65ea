"""Checks checkpoint payloads, whose form docs/checkpoint_format.md documents.

A payload has plain types and tensors only, so that `torch.load(weights_only=True)` reads it. It may
come from an untrusted source, so everything is checked before any of it is used, and every defect
is a `PayloadError` with the key.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from commhooks.comm.counters import CONTINUED
from commhooks.errors import PayloadError, shown

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
            " state, leave out this load"
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
    kind = payload.get("residual")
    if type(kind) is not str or kind not in ("mean", "per_rank", "none"):
        raise damaged(f"'residual' is {shown(kind)}")
    ranks = payload.get("residual_ranks")
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
    """Return the reason in a checked payload, in printable characters; "" if it has none."""
    reason = " ".join(payload.get(INEXACT_BECAUSE, "").split())[:_LONGEST_REASON].rstrip(".")
    return "".join(character if character.isprintable() else "?" for character in reason)


def check_range(name: str, entry: Mapping[str, Any], dtype: torch.dtype, loss_scale: float) -> None:
    """Check that the numbers of a checked entry are small enough for a step in `dtype`.

    With numbers near the largest, the sum of a row or a change of the loss scale yields inf, and no
    step would ever be committed again.
    """
    largest = torch.finfo(dtype).max
    where = f"parameters[{shown(name)}]"
    if entry["q"] is not None and _largest(entry["q"]) > largest:
        raise damaged(f"{where}['q'] holds numbers too large for {dtype}")
    for residual in residuals_in(entry):
        if _largest(residual) * max(1, 1 / loss_scale) > largest / 2**24:
            raise damaged(
                f"{where}['residual'] with loss_scale {loss_scale} holds numbers too large for"
                f" {dtype}"
            )


def residuals_in(entry: Mapping[str, Any]) -> list[Any]:
    """Return the residuals of an entry: none, one, or one of each rank that saved."""
    residual = entry["residual"]
    if residual is None:
        return []
    return residual if isinstance(residual, list) else [residual]


def factor_keys(entry: dict[str, Any]) -> list[str]:
    """Return the keys of an entry's tensors that are equal on all ranks, such as "q"."""
    return [
        key
        for key, value in entry.items()
        if key not in ("shape", "row_dim", "residual") and value is not None
    ]


def bucket_keys(payload: dict[str, Any]) -> list[str]:
    """Return the keys of tensors that compressors of whole buckets save, without "batched_q"."""
    return sorted(
        key
        for key in payload
        if type(key) is str and key.startswith("batched_") and key != "batched_q"
    )


def check_world_size(payload: dict[str, Any]) -> int:
    return check_count(payload, "world_size", 1, _MOST_RANKS)


def check_count(content: dict[str, Any], key: str, smallest: int, largest: int = _LARGEST) -> int:
    """Return `content[key]`, which must be an int (not a bool) from `smallest` to `largest`."""
    value = content.get(key)
    if type(value) is not int or not smallest <= value <= largest:
        raise damaged(f"{key!r} is {shown(value)}, not a whole number from {smallest} to {largest}")
    return value


def damaged(what: str) -> PayloadError:
    return PayloadError(f"damaged hook state: {what}")


def _is(value: object, expected: object) -> bool:
    """Return whether value and type are equal; a tensor or a bool may merely compare equal."""
    return type(value) is type(expected) and value == expected


def _check_entry(name: object, entry: object, kind: str, copies: int) -> None:
    where = f"parameters[{shown(name)}]"
    if type(name) is not str or type(entry) is not dict:
        raise damaged(f"{where} is not a dict with a name")
    for key in ("shape", "row_dim", "q", "residual"):
        if key not in entry:
            raise damaged(f"{where} has no {key!r}")
    shape = entry["shape"]
    row_dim = entry["row_dim"]
    residual = entry["residual"]
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
    for tensor in residuals_in(entry):
        check_tensor(tensor, f"{where}['residual']")
        if list(tensor.shape) != shape:
            raise damaged(f"{where}['residual'] does not fit the shape")


def check_tensor(value: Any, where: str) -> None:
    """Check that `value` is a tensor of real, finite numbers with enough storage.

    A hook that loaded a non-finite number could never commit a step. `where`: the key, for
    messages.
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
