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


def fitted_to_shard(payloads: Sequence[dict[str, Any]], source: GradientSource) -> dict[str, Any]:
    index, count = source.place
    if len(payloads) == count and not _turned(payloads, source):
        return payloads[index]
    fitted = dict(next((each for each in payloads if each.get("residual") == "mean"), payloads[0]))
    if "parameters" not in fitted:
        return fitted
    known = source.names.named_parameters()
    fitted["parameters"] = {
        name: (
            _fitted_entry(
                [each["parameters"].get(name, entry) for each in payloads], source.extent(name)
            )
            if name in known
            else entry
        )
        for name, entry in fitted["parameters"].items()
    }
    fitted |= {key: {} for key in fitted if key.startswith("batched_")}
    return fitted


def _turned(payloads: Sequence[dict[str, Any]], source: GradientSource) -> bool:
    for name in source.names.named_parameters():
        found = [
            each["parameters"][name]["shape"]
            for each in payloads
            if name in each.get("parameters", {})
        ]
        if _sharded_dim(found, source.extent(name)) not in (None, source.extent(name).dim):
            return True
    return False


def _fitted_entry(entries: Sequence[dict[str, Any]], extent: Extent) -> dict[str, Any]:
    local, shapes = list(extent.shape), [entry["shape"] for entry in entries]
    dim = _sharded_dim(shapes, extent)
    if dim is None:  # another model, which `LearnedStateCheckpointer.prepare_load` reports
        return entries[0] | {
            "shape": [sum(each[0] for each in shapes if each), *shapes[0][1:]] if shapes[0] else []
        }
    begin = extent.start if dim == extent.dim else 0
    first_row, held_by = 0, entries[0]
    for entry in entries if local else ():
        if first_row <= begin:
            held_by = entry
        first_row += entry["shape"][dim]
    q, row_dim = held_by["q"], held_by["row_dim"]
    rest = local[:row_dim] + local[row_dim + 1 :]
    fits = q is not None and list(q.shape[1:]) == rest and 0 not in local
    residual = _residual(entries, dim, extent)
    return {"shape": local, "row_dim": row_dim, "q": q if fits else None, "residual": residual}


def _sharded_dim(shapes: Sequence[list[int]], extent: Extent) -> int | None:
    """Return the dimension along which shards of these shapes make up the whole parameter,
    preferably the dimension of `extent`; None if they belong to another parameter.
    """
    whole = list(extent.whole)
    for dim in (extent.dim, *range(len(whole))):
        others = whole[:dim] + whole[dim + 1 :]
        fit = all(
            len(each) == len(whole) and each[:dim] + each[dim + 1 :] == others for each in shapes
        )
        if fit and (not whole or sum(each[dim] for each in shapes) == whole[dim]):
            return dim
    return None


def _residual(entries: Sequence[dict[str, Any]], dim: int, extent: Extent) -> torch.Tensor | None:
    found = next((entry["residual"] for entry in entries if entry["residual"] is not None), None)
    if found is None:
        return None
    pieces = [entry["residual"] for entry in entries]
    pieces = [
        found.new_zeros(e["shape"]) if x is None else x
        for e, x in zip(entries, pieces, strict=True)
    ]
    return torch.cat(pieces, dim).narrow(extent.dim, extent.start, extent.shape[extent.dim]).clone()


REST, RESIDUAL = "commhooks", "residual"
_FORMAT, _VERSION = "commhooks distributed", 1
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
    found: dict[tuple[str, str], torch.Tensor] = {}
    entries = payload.get("parameters", {})
    for key, names in kept.items():
        for name in entries.keys() & names:
            if entries[name].get(key) is not None:
                found[key, name], entries[name][key] = entries[name][key], None
    if "residual" in payload and all(entry["residual"] is None for entry in entries.values()):
        payload |= {"residual": "none", "residual_ranks": []}
    payloads, exact = [_to_bytes(payload)], bool(payload.get("exact", True))
    if source.shard_group is not None:
        own = torch.tensor([int(exact)], device=source.device)
        exact = bool(gather_rows(own, source.shard_group, None, _WHAT).all())
        payloads = gather_bytes(payloads[0], source.shard_group, source.device, _WHAT)
    rest = {"format": _FORMAT, "version": _VERSION, "exact": exact, "shards": payloads}
    state: dict[str, Any] = {REST: _to_bytes(rest)}
    known = source.names.named_parameters()
    for key, names in kept.items():
        if names:
            # DCP looks for the names of the model that loads, which may register the names of a
            # tied parameter in another order.
            state[key] = {
                source.names.first_in_alphabet(name): source.as_whole(
                    name,
                    found.get((key, name), torch.zeros(known[name].shape, dtype=dtype)).to(dtype),
                )
                for name, dtype in names.items()
            }
    return state


def from_distributed(state: Mapping[str, Any], source: GradientSource) -> dict[str, Any]:
    """Make the payload of this rank's shard from a state in DCP's form. Raises PayloadError if the
    state is damaged.
    """
    rest = _from_bytes(state[REST])
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
    shards = [check_header(_from_bytes(each)) for each in rest["shards"]]
    for each in shards:
        if "parameters" in each:
            check_learned(each)
            each["parameters"] = by_own_names(each["parameters"], source.names)
    if not shards:
        raise damaged("'shards' is empty")
    payload = fitted_to_shard(shards, source)
    kept = {key: tensors for key, tensors in state.items() if key != REST}
    if rest.get("exact") is not True:
        payload = inexact(payload, next(filter(None, map(why_inexact, shards)), ""))
        if "parameters" in payload:
            payload |= {"residual": "none", "residual_ranks": []}
            payload["parameters"] = {
                n: each | {"residual": None} for n, each in payload["parameters"].items()
            }
        kept.pop(RESIDUAL, None)
    if "parameters" not in payload:  # saved by a hook without learned state
        return payload
    if RESIDUAL in kept:
        payload["residual"] = "mean"
    for key, tensors in kept.items():
        if type(key) is not str or not isinstance(tensors, Mapping):
            raise damaged(f"{shown(key)} is {shown(tensors)}, not a dict of tensors")
        tensors = by_own_names(tensors, source.names)
        for name, entry in payload["parameters"].items():
            own = _local(tensors[name], f"{key}[{shown(name)}]") if name in tensors else None
            if own is not None and list(own.shape) != list(entry["shape"]):
                raise PayloadError(
                    f"{key} of {shown(name)} has shape {tuple(own.shape)}, and this rank's shard"
                    f" {tuple(entry['shape'])}: the state was saved for another sharding. Load it"
                    " with torch.distributed.checkpoint, which fits it"
                )
            if own is not None and bool(own.any()):  # a missing entry means zeros
                entry[key] = own
    return payload


def is_distributed(state: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(state, Mapping) and REST in state


def _local(saved: Any, where: str) -> torch.Tensor:
    own: torch.Tensor = saved.to_local() if isinstance(saved, DTensor) else saved
    check_tensor(own, where)
    return own.detach().cpu()


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
