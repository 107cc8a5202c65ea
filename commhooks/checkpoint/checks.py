"""Validate a payload completely before any of it is used: a checkpoint may be damaged or come from an untrusted source.

Every defect raises a `PayloadError` that names the key.
"""

import math
from typing import Any

import torch

from commhooks.comm.counters import CONTINUED
from commhooks.errors import PayloadError, shown

VERSION = 1
COUNTERS = "counters"
"""The key of what the rank that saved has counted so far."""
REPLICAS_EQUAL = "replicas_equal"
"""A key that only payloads of hooks that average nothing have, with False."""
_LARGEST = 2**62  # the largest counter; ranks exchange counters as int64
_MOST_RANKS = 2**20
_LARGEST_LOSS_SCALE = float(2**127)  # a GradScaler's scale and its inverse are normal float32 numbers
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_header(payload: object) -> dict[str, Any]:
    """Check the keys that the payloads of all hooks have. Returns the payload."""
    if not isinstance(payload, dict) or not _is(payload.get("format"), "commhooks"):
        raise PayloadError(
            f"this is not the state of a commhooks hook (a {type(payload).__name__} without format='commhooks'); "
            "expected what a hook's state_dict returned. To begin with fresh memory, leave out this load"
        )
    if not _is(payload.get("version"), VERSION):
        raise PayloadError(
            f"the saved hook state has format version {shown(payload.get('version'))}; this commhooks reads version "
            f"{VERSION}: load it with the commhooks that saved it"
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
    """Check the further keys of a payload with learned state."""
    check_count(payload, "nonfinite_steps", 0)
    world_size = check_world_size(payload)
    scale: Any = payload.get("loss_scale")
    if type(scale) not in (int, float) or not 1 / _LARGEST_LOSS_SCALE < scale < _LARGEST_LOSS_SCALE:
        raise damaged(f"'loss_scale' is {shown(scale)}, not a positive number that float32 holds")
    if type(payload.get("exact")) is not bool:
        raise damaged(f"'exact' is {shown(payload.get('exact'))}, not True or False")
    kind, ranks = payload.get("residual"), payload.get("residual_ranks")
    if type(kind) is not str or kind not in ("mean", "per_rank", "none"):
        raise damaged(f"'residual' is {shown(kind)}")
    if type(ranks) is not list or not all(type(rank) is int and 0 <= rank < world_size for rank in ranks):
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


def check_range(name: str, entry: dict[str, Any], dtype: torch.dtype, loss_scale: float) -> None:
    """Check that the numbers of a checked entry, of all ranks, are small enough for a step in `dtype`.

    Finite is not enough: the sum of a row of the largest numbers, or a change of the loss scale, would yield inf. A
    non-finite step is never committed, so no later step could be committed either.
    """
    largest = torch.finfo(dtype).max
    where = f"parameters[{shown(name)}]"
    if entry["q"] is not None and _largest(entry["q"]) > largest:
        raise damaged(f"{where}['q'] holds numbers too large for {dtype}")
    residual = entry["residual"]
    for each in residual if isinstance(residual, list) else [] if residual is None else [residual]:
        if _largest(each) * max(1, 1 / loss_scale) > largest / 2**24:
            raise damaged(f"{where}['residual'] with loss_scale {loss_scale} holds numbers too large for {dtype}")


def factor_keys(entry: dict[str, Any]) -> list[str]:
    """The keys of an entry's replicated tensors: "q", and those of other compressors."""
    return [key for key, value in entry.items() if key not in ("shape", "row_dim", "residual") and value is not None]


def bucket_keys(payload: dict[str, Any]) -> list[str]:
    """The keys other than "batched_q" under which compressors of whole buckets save tensors."""
    return sorted(key for key in payload if type(key) is str and key.startswith("batched_") and key != "batched_q")


def check_world_size(payload: dict[str, Any]) -> int:
    return check_count(payload, "world_size", 1, _MOST_RANKS)


def check_count(content: dict[str, Any], key: str, smallest: int, largest: int = _LARGEST) -> int:
    """Check that `content[key]` is an int (not a bool) between `smallest` and `largest`; returns it."""
    value = content.get(key)
    if type(value) is not int or not smallest <= value <= largest:
        raise damaged(f"{key!r} is {shown(value)}, not a whole number from {smallest} to {largest}")
    return value


def damaged(what: str) -> PayloadError:
    return PayloadError(f"damaged hook state: {what}")


def _is(value: object, expected: object) -> bool:
    """Equality that also requires equal types, so that tensors and bools cannot pass."""
    return type(value) is type(expected) and value == expected


def _check_entry(name: object, entry: object, kind: str, copies: int) -> None:
    where = f"parameters[{shown(name)}]"
    if type(name) is not str or type(entry) is not dict:
        raise damaged(f"{where} is not a dict with a name")
    for key in ("shape", "row_dim", "q", "residual"):
        if key not in entry:
            raise damaged(f"{where} has no {key!r}")
    shape, row_dim, residual = entry["shape"], entry["row_dim"], entry["residual"]
    if type(shape) is not list or not all(type(size) is int and 0 <= size < _LARGEST for size in shape):
        raise damaged(f"{where}['shape'] is not a list of sizes")
    if type(row_dim) is not int or not 0 <= row_dim < max(len(shape), 1):
        raise damaged(f"{where}['row_dim'] is not a dimension")
    row_of_q = shape[:row_dim] + shape[row_dim + 1 :]
    for key in factor_keys(entry):
        if type(key) is not str:
            raise damaged(f"{where} has a key {shown(key)}")
        factor = entry[key]
        check_tensor(factor, f"{where}[{shown(key)}]")
        if key == "q" and (len(shape) < 2 or factor.shape[:1] == (0,) or list(factor.shape[1:]) != row_of_q):
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
    """Check that `value` is a tensor of real, finite numbers with enough storage. `where`: its key, for messages.

    Non-finite numbers are rejected: a non-finite step is never committed, so no hook saves such numbers, and a hook
    that loaded one could never commit a step.
    """
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    if not plain or value.layout != torch.strided or value.is_nested or value.device.type == "meta":
        raise damaged(f"{where} is not a tensor with numbers in it")
    if value.dtype not in FLOATS:
        raise damaged(f"{where} has dtype {value.dtype}")
    # Strides of 0 make a tensor of any size from one number: reading it would take forever.
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise damaged(f"{where} has more elements than there are numbers in it")
    if not math.isfinite(_largest(value)):
        raise damaged(f"{where} holds inf or NaN")


def _largest(value: torch.Tensor) -> float:
    """The largest absolute value; NaN if `value` contains one."""
    if not value.numel():
        return 0.0
    low, high = torch.aminmax(value.detach())
    return float(torch.maximum(-low, high))
