"""Fit saved shards to a model with another number of them.

The residual is sharded like the parameter, so DCP does this for it. What an algorithm keeps per shard, such as Q, has
no such meaning: a new shard continues with the Q of the saved one that held its first row, which is a good start.
Anything else begins afresh.
"""

from collections.abc import Sequence
from typing import Any

from commhooks.gradients.source import Extent, GradientSource


def fitted_to_shard(payloads: Sequence[dict[str, Any]], source: GradientSource) -> dict[str, Any]:
    """A payload for this rank's shard of the model, without residuals.

    Args:
        payloads: those of all saved shards, without residuals, checked.
    """
    fitted = dict(payloads[0])
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


def _fitted_entry(entries: Sequence[dict[str, Any]], extent: Extent) -> dict[str, Any]:
    dim, local = extent.dim, list(extent.shape)
    whole = list(entries[0]["shape"])
    if whole:
        whole[dim] = sum(entry["shape"][dim] for entry in entries)
    if whole != list(extent.whole):  # of another model: `payload.read` says so
        return entries[0] | {"shape": whole}
    first_row, held_by = 0, entries[0]
    for entry in entries:
        if first_row <= extent.start:
            held_by = entry
        first_row += entry["shape"][dim] if whole else 0
    q, row_dim = held_by["q"], held_by["row_dim"]
    rest = local[:row_dim] + local[row_dim + 1 :]
    fits = q is not None and list(q.shape[1:]) == rest and 0 not in local
    return {"shape": local, "row_dim": row_dim, "q": q if fits else None, "residual": None}
