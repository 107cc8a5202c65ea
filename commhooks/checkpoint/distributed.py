"""Converts a payload to the form that `torch.distributed.checkpoint` (DCP) saves, and back.

DCP saves a tensor once for all ranks and a DTensor shard by shard, and loads into existing tensors.
So this form has the same keys on every rank, at every step and for every number of shards:

    {"commhooks": bytes, "residual": {name: tensor, ...}}

`residual` holds the mean over the replicas, with the shape and placement of the parameter, for
every parameter that would have a residual in an unsharded model. Hooks that average weights save
`anchor` and `outer_momentum` in the same form. `commhooks` holds the rest of the payloads of all
shards (`payload.py`) as bytes: it is small and differs between shards, such as Q, or the residual
of a shard that is compressed although the whole parameter would not be.

If the number of shards has changed, a shard gets its piece of the residual from DCP, and continues
with the Q of the saved shard that held its first row, which is a good start. Everything else begins
afresh.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from commhooks.checkpoint.payload import (
    check_count,
    check_header,
    check_learned,
    check_tensor,
    damaged,
    inexact,
    why_inexact,
)
from commhooks.comm.collectives import gather_bytes, gather_rows
from commhooks.errors import PayloadError, shown
from commhooks.gradients.names import by_own_names
from commhooks.gradients.source import Extent, GradientSource

REST = "commhooks"
RESIDUAL = "residual"
_FORMAT = "commhooks distributed"
_VERSION = 1
_WHAT = "the state of all shards (save on every rank, or on none)"


def to_distributed(
    payload: dict[str, Any], kept: Mapping[str, Mapping[str, torch.dtype]], source: GradientSource
) -> dict[str, Any]:
    """Convert a payload to DCP's form. All ranks of the model must call this.

    Args:
        payload: this rank's payload, with the mean of the residuals or without residuals; changed
            in place.
        kept: field -> parameter -> dtype of the tensors that DCP saves; equal on all ranks.
    """
    taken: dict[tuple[str, str], torch.Tensor] = {}
    entries = payload.get("parameters", {})
    for key, dtypes in kept.items():
        for name in entries.keys() & dtypes:
            if entries[name].get(key) is not None:
                taken[key, name] = entries[name][key]
                entries[name][key] = None
    if "residual" in payload and all(entry["residual"] is None for entry in entries.values()):
        payload |= {"residual": "none", "residual_ranks": []}
    shards = [_to_bytes(payload)]
    exact = bool(payload.get("exact", True))
    if source.shard_group is not None:
        flag = torch.tensor([int(exact)], device=source.device)
        exact = bool(gather_rows(flag, source.shard_group, None, _WHAT).all())
        shards = gather_bytes(shards[0], source.shard_group, source.device, _WHAT)
    rest = {"format": _FORMAT, "version": _VERSION, "exact": exact, "shards": shards}
    state: dict[str, Any] = {REST: _to_bytes(rest)}
    parameters = source.names.named_parameters()
    for key, dtypes in kept.items():
        whole: dict[str, torch.Tensor] = {}
        for name, dtype in dtypes.items():
            tensor = taken.get((key, name), torch.zeros(parameters[name].shape, dtype=dtype))
            # DCP looks for the names of the model that loads, which may register the names of a
            # tied parameter in another order.
            whole[source.names.first_in_alphabet(name)] = source.as_whole(name, tensor.to(dtype))
        if whole:
            state[key] = whole
    return state


def from_distributed(state: Mapping[str, Any], source: GradientSource) -> dict[str, Any]:
    """Make the payload of this rank's shard from a state in DCP's form.

    Raises PayloadError if the state is damaged.
    """
    exact, shards = _read_rest(state[REST], source)
    payload = fitted_to_shard(shards, source)
    tensors = {key: value for key, value in state.items() if key != REST}
    if not exact:
        payload = inexact(payload, next(filter(None, map(why_inexact, shards)), ""))
        if "parameters" in payload:
            payload |= {"residual": "none", "residual_ranks": []}
            payload["parameters"] = {
                name: entry | {"residual": None} for name, entry in payload["parameters"].items()
            }
        tensors.pop(RESIDUAL, None)
    if "parameters" not in payload:  # saved by a hook without learned state
        return payload
    if RESIDUAL in tensors:
        payload["residual"] = "mean"
    for key, by_name in tensors.items():
        if type(key) is not str or not isinstance(by_name, Mapping):
            raise damaged(f"{shown(key)} is {shown(by_name)}, not a dict of tensors")
        _put_back(payload["parameters"], key, by_own_names(by_name, source.names))
    return payload


def is_distributed(state: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(state, Mapping) and REST in state


def _read_rest(content: object, source: GradientSource) -> tuple[bool, list[dict[str, Any]]]:
    """Return whether the save was exact on all shards, and the checked payloads of all shards."""
    rest = _from_bytes(content)
    if (
        not isinstance(rest, dict)
        or rest.get("format") != _FORMAT
        or type(rest.get("shards")) is not list
    ):
        raise damaged(f"{REST!r} does not hold the state of a hook")
    if check_count(rest, "version", 1) != _VERSION:
        raise PayloadError(
            f"the distributed hook state has version {rest['version']}: it was saved by a newer"
            " commhooks"
        )
    shards = [check_header(_from_bytes(shard)) for shard in rest["shards"]]
    for payload in shards:
        if "parameters" in payload:
            check_learned(payload)
            payload["parameters"] = by_own_names(payload["parameters"], source.names)
    if not shards:
        raise damaged("'shards' is empty")
    return rest.get("exact") is True, shards


def _put_back(entries: dict[str, Any], key: str, tensors: Mapping[str, Any]) -> None:
    """Put the tensors that DCP has loaded into this rank's payload, under `key` of each entry."""
    for name, entry in entries.items():
        if name not in tensors:
            continue
        tensor = _local(tensors[name], f"{key}[{shown(name)}]")
        if list(tensor.shape) != list(entry["shape"]):
            raise PayloadError(
                f"{key} of {shown(name)} has shape {tuple(tensor.shape)}, and this rank's shard"
                f" {tuple(entry['shape'])}: the state was saved for another sharding. Load it"
                " with torch.distributed.checkpoint, which fits it"
            )
        if bool(tensor.any()):  # a missing entry means zeros
            entry[key] = tensor


# ---- another number of shards


def fitted_to_shard(payloads: Sequence[dict[str, Any]], source: GradientSource) -> dict[str, Any]:
    """Return the payload for this rank's shard, of the payloads of all saved shards."""
    index, count = source.place
    if len(payloads) == count and not _sharded_otherwise(payloads, source):
        return payloads[index]
    with_means = [payload for payload in payloads if payload.get("residual") == "mean"]
    fitted = dict((with_means or payloads)[0])
    if "parameters" not in fitted:
        return fitted
    entries = dict(fitted["parameters"])
    for name in entries.keys() & source.names.named_parameters():
        shards = [payload["parameters"].get(name, entries[name]) for payload in payloads]
        entries[name] = _fitted_entry(shards, source.extent(name))
    fitted["parameters"] = entries
    fitted |= {key: {} for key in fitted if key.startswith("batched_")}
    return fitted


def _sharded_otherwise(payloads: Sequence[dict[str, Any]], source: GradientSource) -> bool:
    """Return whether a parameter was sharded along a different dimension when saved."""
    for name in source.names.named_parameters():
        shapes = [
            payload["parameters"][name]["shape"]
            for payload in payloads
            if name in payload.get("parameters", {})
        ]
        extent = source.extent(name)
        if _sharded_dim(shapes, extent) not in (None, extent.dim):
            return True
    return False


def _fitted_entry(entries: Sequence[dict[str, Any]], extent: Extent) -> dict[str, Any]:
    local = list(extent.shape)
    shapes = [entry["shape"] for entry in entries]
    dim = _sharded_dim(shapes, extent)
    if dim is None:  # another model, which `PayloadReader` reports
        rows = sum(shape[0] for shape in shapes if shape)
        return entries[0] | {"shape": [rows, *shapes[0][1:]] if shapes[0] else []}
    begin = extent.start if dim == extent.dim else 0
    first_row = 0
    held_by = entries[0]
    for entry in entries if local else ():
        if first_row <= begin:
            held_by = entry
        first_row += entry["shape"][dim]
    q = held_by["q"]
    row_dim = held_by["row_dim"]
    rest = local[:row_dim] + local[row_dim + 1 :]
    fits = q is not None and list(q.shape[1:]) == rest and 0 not in local
    residual = _residual(entries, dim, extent)
    return {"shape": local, "row_dim": row_dim, "q": q if fits else None, "residual": residual}


def _sharded_dim(shapes: Sequence[list[int]], extent: Extent) -> int | None:
    """Return the dimension along which shards of these shapes make up the whole parameter.

    Prefers the dimension of `extent`. Returns None if the shards belong to another parameter.
    """
    whole = list(extent.whole)
    for dim in (extent.dim, *range(len(whole))):
        others = whole[:dim] + whole[dim + 1 :]
        fit = all(
            len(shape) == len(whole) and shape[:dim] + shape[dim + 1 :] == others
            for shape in shapes
        )
        if fit and (not whole or sum(shape[dim] for shape in shapes) == whole[dim]):
            return dim
    return None


def _residual(entries: Sequence[dict[str, Any]], dim: int, extent: Extent) -> torch.Tensor | None:
    """Return this shard's piece of the residual that the saved shards hold, None if they do not."""
    like = next((entry["residual"] for entry in entries if entry["residual"] is not None), None)
    if like is None:
        return None
    shards = [
        like.new_zeros(entry["shape"]) if entry["residual"] is None else entry["residual"]
        for entry in entries
    ]
    return torch.cat(shards, dim).narrow(extent.dim, extent.start, extent.shape[extent.dim]).clone()


# ---- tensors and bytes


def _local(saved: Any, where: str) -> torch.Tensor:
    tensor: torch.Tensor = saved.to_local() if isinstance(saved, DTensor) else saved
    check_tensor(tensor, where)
    return tensor.detach().cpu()


def _to_bytes(content: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _from_bytes(content: object) -> Any:
    if not isinstance(content, bytes):
        raise damaged(f"a part of the distributed state is a {type(content).__name__}, not bytes")
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch documents no narrower class
        raise damaged(f"a part of the distributed state cannot be read: {error}") from error
