"""Fit saved shards to a model with another number of them, or with shards along another dimension.

The residual is sharded like the parameter, so DCP does this for it; here only for those that the payloads hold. What an
algorithm keeps per shard, such as Q, has no such meaning: a new shard continues with the Q of the saved one that held
its first row, which is a good start. Anything else begins afresh.
"""

from collections.abc import Sequence
from typing import Any

import torch

from commhooks.gradients.source import Extent, GradientSource


def fitted_to_shard(payloads: Sequence[dict[str, Any]], source: GradientSource) -> dict[str, Any]:
    """A payload for this rank's shard of the model.

    Args:
        payloads: those of all saved shards, checked.
    """
    index, count = source.place
    if len(payloads) == count and not _turned(payloads, source):
        return payloads[index]
    fitted = dict(next((each for each in payloads if each.get("residual") == "mean"), payloads[0]))
    if "parameters" not in fitted:
        return fitted
    known = source.names.known()
    fitted["parameters"] = {
        name: _fitted_entry([each["parameters"].get(name, entry) for each in payloads], source.extent(name))
        if name in known
        else entry
        for name, entry in fitted["parameters"].items()
    }
    fitted |= {key: {} for key in fitted if key.startswith("batched_")}
    return fitted


def _turned(payloads: Sequence[dict[str, Any]], source: GradientSource) -> bool:
    """Whether some parameter is sharded along another dimension than at the save."""
    for name in source.names.known():
        found = [each["parameters"][name]["shape"] for each in payloads if name in each.get("parameters", {})]
        if _sharded_dim(found, source.extent(name)) not in (None, source.extent(name).dim):
            return True
    return False


def _fitted_entry(entries: Sequence[dict[str, Any]], extent: Extent) -> dict[str, Any]:
    local, shapes = list(extent.shape), [entry["shape"] for entry in entries]
    dim = _sharded_dim(shapes, extent)
    if dim is None:  # of another model: `payload.read` says so
        return entries[0] | {"shape": [sum(each[0] for each in shapes if each), *shapes[0][1:]] if shapes[0] else []}
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
    """The dimension along which shards of these shapes are the whole parameter, that of `extent` if several are; None
    if they are another one."""
    whole = list(extent.whole)
    for dim in (extent.dim, *range(len(whole))):
        others = whole[:dim] + whole[dim + 1 :]
        fit = all(len(each) == len(whole) and each[:dim] + each[dim + 1 :] == others for each in shapes)
        if fit and (not whole or sum(each[dim] for each in shapes) == whole[dim]):
            return dim
    return None


def _residual(entries: Sequence[dict[str, Any]], dim: int, extent: Extent) -> torch.Tensor | None:
    """This shard of what the entries hold; None if none of them has a residual, which stands for zeros."""
    found = next((entry["residual"] for entry in entries if entry["residual"] is not None), None)
    if found is None:
        return None
    pieces = [entry["residual"] for entry in entries]
    pieces = [found.new_zeros(e["shape"]) if x is None else x for e, x in zip(entries, pieces, strict=True)]
    return torch.cat(pieces, dim).narrow(extent.dim, extent.start, extent.shape[extent.dim]).clone()
