"""The state of a hook for `torch.distributed.checkpoint` (DCP).

DCP saves a tensor once for all ranks, a sharded one (DTensor) piece by piece, and loads into tensors that are there
already. So this form has the same keys on every rank, at every step and for every number of shards:

    {"commhooks": bytes, "residual": {name: tensor, ...}}

`residual` holds the mean over the replicas, in the shape and with the placement of the parameter, for every parameter
whose residual could be kept if nothing were sharded. Hooks that average weights have `anchor` and `outer_momentum`
beside it, in the same form. Everything else is small and differs between shards, such as Q and
the residual of a shard that is compressed although the whole parameter would not be: `commhooks` holds the payloads of
all shards without the other residuals (see `payload`), as bytes.
"""

import io
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from commhooks.checkpoint.checks import check_count, check_header, check_learned, check_tensor, damaged
from commhooks.checkpoint.reshard import fitted_to_shard
from commhooks.comm.collective import gather_bytes, gather_rows
from commhooks.errors import PayloadError, shown
from commhooks.gradients.source import GradientSource

REST, RESIDUAL = "commhooks", "residual"
_FORMAT, _VERSION = "commhooks distributed", 1
_WHAT = "the state of all shards (save on every rank, or on none)"


def to_distributed(
    payload: dict[str, Any], kept: Mapping[str, Mapping[str, torch.dtype]], source: GradientSource
) -> dict[str, Any]:
    """The state in DCP's form. All ranks of the model must call this.

    Args:
        payload: of this rank's shard, with the mean of its residuals, or none; is used up.
        kept: see `SavedLearnedState.kept_fields`; equal on all ranks.
        source: the model.
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
    known = source.names.known()
    for key, names in kept.items():
        if names:
            state[key] = {
                name: source.as_whole(name, found.get((key, name), torch.zeros(known[name].shape)).to(dtype))
                for name, dtype in names.items()
            }
    return state


def from_distributed(state: Mapping[str, Any], source: GradientSource) -> dict[str, Any]:
    """The payload of this rank's shard, for `prepare_load`, from a state in DCP's form.

    Raises:
        PayloadError: it is damaged.
    """
    rest = _from_bytes(state[REST])
    if not isinstance(rest, dict) or rest.get("format") != _FORMAT or type(rest.get("shards")) is not list:
        raise damaged(f"{REST!r} does not hold the state of a hook")
    if check_count(rest, "version", 1) != _VERSION:
        raise PayloadError(
            f"the distributed hook state has version {rest['version']}: it was saved by a newer commhooks"
        )
    shards = [check_header(_from_bytes(each)) for each in rest["shards"]]
    for each in shards:
        if "parameters" in each:
            check_learned(each)
    if not shards:
        raise damaged("'shards' is empty")
    payload = fitted_to_shard(shards, source)
    kept = {key: tensors for key, tensors in state.items() if key != REST}
    if rest.get("exact") is not True:
        payload["exact"] = False
        if "parameters" in payload:
            payload |= {"residual": "none", "residual_ranks": []}
            payload["parameters"] = {n: each | {"residual": None} for n, each in payload["parameters"].items()}
        kept.pop(RESIDUAL, None)
    if "parameters" not in payload:  # saved by a hook without memory
        return payload
    if RESIDUAL in kept:
        payload["residual"] = "mean"
    for key, tensors in kept.items():
        if type(key) is not str or not isinstance(tensors, Mapping):
            raise damaged(f"{shown(key)} is {shown(tensors)}, not a dict of tensors")
        for name, entry in payload["parameters"].items():
            own = _local(tensors[name], f"{key}[{shown(name)}]") if name in tensors else None
            if own is not None and list(own.shape) != list(entry["shape"]):
                raise PayloadError(
                    f"{key} of {shown(name)} has shape {tuple(own.shape)}, and this rank's shard "
                    f"{tuple(entry['shape'])}: the state was saved for another sharding. Load it with "
                    "torch.distributed.checkpoint, which fits it"
                )
            if own is not None and bool(own.any()):  # what is absent stands for zeros
                entry[key] = own
    return payload


def is_distributed(state: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether `state` has the form of `to_distributed`."""
    return isinstance(state, Mapping) and REST in state


def _local(saved: Any, where: str) -> torch.Tensor:
    """This rank's part. `where`: its key, for messages."""
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
