"""Is a payload whole? Everything is looked at before anything is used: a checkpoint may be damaged, or made by others.

Whatever is wrong ends in a `PayloadError` that names the key.
"""

import math
from typing import Any

import torch

from commhooks.errors import PayloadError

VERSION = 1
_LARGEST = 2**62  # what a counter can be; it travels as int64
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_header(payload: object) -> dict[str, Any]:
    """The parts that every payload has, whatever the hook.

    Raises:
        PayloadError: not a payload, or of a version that this one does not know.
    """
    if not isinstance(payload, dict) or not _is(payload.get("format"), "commhooks"):
        raise PayloadError(
            f"this is not the state of a commhooks hook (a {type(payload).__name__} without format='commhooks'); "
            "give load_state_dict what state_dict returned"
        )
    if not _is(payload.get("version"), VERSION):
        version = payload.get("version")
        if type(version) is int and version > VERSION:
            raise PayloadError(
                f"the saved hook state has version {version}: it was saved by a newer commhooks, this one reads up to "
                f"version {VERSION}. Load it with the version of commhooks that wrote it, or a newer one"
            )
        raise PayloadError(
            f"the saved hook state has version {version!r}, this commhooks reads version {VERSION}: "
            "it is damaged, or was not written by commhooks"
        )
    if type(payload.get("hook")) is not str or type(payload.get("options")) is not dict:
        raise damaged("'hook' is not a name or 'options' not a dict")
    check_count(payload, "step", 0)
    return payload


def check_low_rank(payload: dict[str, Any]) -> None:
    """All that the payload of a PowerSGD hook has besides.

    Raises:
        PayloadError: a key is missing, or holds something else than the format says.
    """
    check_count(payload, "nonfinite_steps", 0)
    world_size = check_count(payload, "world_size", 1)
    scale: Any = payload.get("loss_scale")
    if type(scale) not in (int, float) or not 0 < scale < torch.finfo(torch.float64).max:
        raise damaged(f"'loss_scale' is {scale!r}, not a positive number")
    kind, ranks = payload.get("residual"), payload.get("residual_ranks")
    if type(kind) is not str or kind not in ("mean", "per_rank", "none"):
        raise damaged(f"'residual' is {kind!r}")
    if type(ranks) is not list or not all(type(rank) is int and 0 <= rank < world_size for rank in ranks):
        raise damaged(f"'residual_ranks' is not a list of ranks below {world_size}")
    if len(set(ranks)) != len(ranks):
        raise damaged("'residual_ranks' holds a rank twice")
    for key in ("parameters", "batched_q"):
        if type(payload.get(key)) is not dict:
            raise damaged(f"{key!r} is not a dict")
    for name, entry in payload["parameters"].items():
        _check_entry(name, entry, kind, len(ranks))
    for name, q in payload["batched_q"].items():
        if type(name) is not str or not name.startswith("batched."):
            raise damaged(f"batched_q has a key {name!r}")
        _check_tensor(q, f"batched_q[{name!r}]")
        if q.dim() != 2 or q.shape[0] < 1:
            raise damaged(f"batched_q[{name!r}] is not a matrix")


def check_count(content: dict[str, Any], key: str, smallest: int) -> int:
    """An int within bounds, and no bool."""
    value = content.get(key)
    if type(value) is not int or not smallest <= value < _LARGEST:
        raise damaged(f"{key!r} is {value!r}, not a whole number from {smallest} on")
    return value


def damaged(what: str) -> PayloadError:
    return PayloadError(f"damaged hook state: {what}")


def _is(value: object, expected: object) -> bool:
    """Equality that no tensor and no bool can confuse."""
    return type(value) is type(expected) and value == expected


def _check_entry(name: object, entry: object, kind: str, copies: int) -> None:
    where = f"parameters[{name!r}]"
    if type(name) is not str or type(entry) is not dict:
        raise damaged(f"{where} is not a dict with a name")
    for key in ("shape", "row_dim", "q", "residual"):
        if key not in entry:
            raise damaged(f"{where} has no {key!r}")
    shape, row_dim, q, residual = entry["shape"], entry["row_dim"], entry["q"], entry["residual"]
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise damaged(f"{where}['shape'] is not a list of sizes")
    if type(row_dim) is not int or not 0 <= row_dim < max(len(shape), 1):
        raise damaged(f"{where}['row_dim'] is not a dimension")
    if q is not None:
        _check_tensor(q, f"{where}['q']")
        rest = shape[:row_dim] + shape[row_dim + 1 :]
        if len(shape) < 2 or q.dim() < 2 or q.shape[0] < 1 or list(q.shape[1:]) != rest:
            raise damaged(f"{where}['q'] does not fit the shape")
    if residual is None:
        return
    if isinstance(residual, list) != (kind == "per_rank") or kind == "none":
        raise damaged(f"{where}['residual'] does not go with residual={kind!r}")
    if isinstance(residual, list) and len(residual) != copies:
        raise damaged(f"{where}['residual'] does not hold one tensor per rank")
    for each in residual if isinstance(residual, list) else [residual]:
        _check_tensor(each, f"{where}['residual']")
        if list(each.shape) != shape:
            raise damaged(f"{where}['residual'] does not fit the shape")


def _check_tensor(value: object, where: str) -> None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type == "meta":
        raise damaged(f"{where} is not a tensor with numbers in it")
    if value.dtype not in _FLOATS:
        raise damaged(f"{where} has dtype {value.dtype}")
    if value.numel() and not math.isfinite(torch.linalg.vector_norm(value.detach(), float("inf")).item()):
        raise damaged(f"{where} holds inf or NaN")
