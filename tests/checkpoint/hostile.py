"""Makes damaged and hostile payloads: random changes of good ones, equal for equal seeds."""

import copy
import functools
import io
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch

from commhooks.errors import shown

TIMES = int(os.environ.get("HOSTILE_TIMES", "1"))
"""By how much to multiply the number of cases; `make hostile` sets it."""

Path = tuple[Any, ...]
"""The keys and indices that lead to a value."""


def places(value: Any, path: Path = ()) -> list[Path]:
    """Return the paths of everything inside `value`, no deeper than payloads are."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    paths: list[Path] = []
    if len(path) < 6:
        for key, item in items:
            paths += [(*path, key), *places(item, (*path, key))]
    return paths


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: Path, new: Any) -> None:
    at(value, path[:-1])[path[-1]] = new


def _deep() -> list[Any]:
    """Make a list nested deeper than any recursion goes; a file can hold it."""
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def _in_itself() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


def _same(value: Any) -> Any:
    return value


_CONSTANTS: list[Any] = [
    *(None, True, False),
    *(0, 1, 2, -1, 7, 2**31, 2**61, 2**62, 2**63, 2**70, -(2**70), 10**400, 10**5000),
    *(0.0, 0.5, 1.0, -1.0, float("nan"), float("inf"), float("-inf")),
    *(5e-324, 1e-30, 1e-38, 1e30, 1e38, 1e308),
    *("", "powerSGD", "mean", "per_rank", "none", "1"),
    *("\ud800", "z\u0308\u202e", "x" * 100_000, b"mean", "né".encode("utf-16")),
    *(1j, torch.float16, torch.device("cpu"), torch.Size([2, 3]), (), (1, 2)),
]
VALUES: list[Callable[[], Any]] = [functools.partial(_same, value) for value in _CONSTANTS] + [
    list,
    dict,
    set,
    lambda: [None],
    lambda: [0, 0],
    lambda: [2**70],
    lambda: {"": 0},
    lambda: {3: [1]},
]
VALUES += [_deep, _in_itself]


def _one_is(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t.view(-1)[-1:] = value
        return t

    return change


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float16": torch.Tensor.half,
    "bfloat16": torch.Tensor.bfloat16,
    "float64": torch.Tensor.double,
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "int64": torch.Tensor.long,
    "uint8": lambda t: t.to(torch.uint8),
    "bool": torch.Tensor.bool,
    "complex": lambda t: t.to(torch.complex64),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "fewer rows": lambda t: t[:-1],
    "more rows": lambda t: torch.cat([t, t]),
    "many rows": lambda t: t[:1].expand(500, *t.shape[1:]).contiguous(),
    "fewer columns": lambda t: t[..., :-1].contiguous(),
    "one more dimension": lambda t: t.unsqueeze(0),
    "flat": torch.Tensor.flatten,
    "0-dim": lambda t: t.sum(),
    "empty": lambda t: t[:0],
    "nothing": lambda t: torch.empty(0),
    "transposed": lambda t: t.mT,
    "not contiguous": lambda t: t.mT.contiguous().mT,
    "every second number": lambda t: torch.stack([t, t], -1)[..., 0],
    "NaN": _one_is(float("nan")),
    "inf": _one_is(float("inf")),
    "-inf": _one_is(float("-inf")),
    "1e300": lambda t: t.double() + 1e300,
    "one 1e300": lambda t: _one_is(1e300)(t.double()),
    "largest": lambda t: torch.full_like(t, torch.finfo(t.dtype).max),
    "one largest": lambda t: _one_is(torch.finfo(t.dtype).max)(t),
    "1e36": lambda t: t + 1e36,
    "1e30": lambda t: t + 1e30,
    "smallest": lambda t: torch.full_like(t, 1e-45),
    "zeros": torch.zeros_like,
    "sparse": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([t, t[:1]]),
    "requires grad": lambda t: t.clone().requires_grad_(),
    "Parameter": torch.nn.Parameter,
    "computed": lambda t: t.clone().requires_grad_() * 2,
    "negative view": lambda t: torch._neg_view(t),
    "one number, expanded": lambda t: torch.ones(1).expand(t.shape),
    "one number, expanded to 2^40": lambda t: torch.ones(1).expand(2**40),
    "one row, expanded to 2^40": lambda t: t[:1].expand(2**40, *t.shape[1:]),
    "overlapping": lambda t: t.flatten().as_strided(t.shape, (1,) * t.dim()),
}


def _replace(payload: Any, path: Path, rng: random.Random) -> str:
    old = at(payload, path)
    if isinstance(old, torch.Tensor) and old.dim() and rng.random() < 0.8:
        return _change_tensor(payload, path, rng)
    put(payload, path, rng.choice(VALUES)())
    return "replaced"


def _change_tensor(payload: Any, path: Path, rng: random.Random) -> str:
    old = at(payload, path)
    if not isinstance(old, torch.Tensor) or not old.dim():
        return _replace(payload, path, rng)
    name = rng.choice(list(TENSORS))
    try:
        put(payload, path, TENSORS[name](old))
    except (RuntimeError, IndexError):  # this tensor cannot be changed like this
        put(payload, path, None)
    return name


def _delete(payload: Any, path: Path, rng: random.Random) -> str:
    del at(payload, path[:-1])[path[-1]]
    return "deleted"


def _rename(payload: Any, path: Path, rng: random.Random) -> str:
    inside = at(payload, path[:-1])
    item = inside.pop(path[-1])
    names = [f"{path[-1]}x", str(path[-1]).upper(), "", "\ud800", "a\0b"]
    key = rng.choice([*names, 0, None, b"step", (1,), 10**5000])
    if isinstance(inside, dict):
        inside[key] = item
    return f"renamed to {type(key).__name__}"


def _add(payload: Any, path: Path, rng: random.Random) -> str:
    inside = at(payload, path[:-1])
    value = rng.choice([*VALUES, lambda: copy.deepcopy(at(payload, path))])()
    if isinstance(inside, list):
        inside.append(value)
    else:
        inside[rng.choice(["more", "step ", 0, None, "batched.1", f"{shown(path[-1])}.1"])] = value
    return "added to"


def _exchange(payload: Any, path: Path, rng: random.Random) -> str:
    """Exchange the values at two places."""
    others = [
        other
        for other in places(payload)
        if other[: len(path)] != path and path[: len(other)] != other
    ]
    if others:
        other = rng.choice(others)
        value = at(payload, path)
        put(payload, path, at(payload, other))
        put(payload, other, value)
    return "exchanged"


CHANGES = [*[_replace] * 3, *[_change_tensor] * 2, _delete, _rename, _add, _exchange]


def changed(payload: Any, donor: Any, rng: random.Random) -> tuple[Any, str]:
    """Return a changed copy of `payload` and what was done. Values may come from `donor`."""
    payload = copy.deepcopy(payload)
    changes = []
    for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
        paths = places(payload)
        if not paths:
            break
        # Most places hold tensors; the keys of the upper levels must be chosen as often.
        depth = rng.choice(sorted({len(path) for path in paths}))
        path = rng.choice([path for path in paths if len(path) == depth])
        if rng.random() < 0.1:
            others = [other for other in places(donor) if len(other) == depth]
            other = rng.choice(others or [()])
            put(payload, path, copy.deepcopy(at(donor, other)))
            change = f"taken from {shown(other)} of another payload"
        else:
            change = rng.choice(CHANGES)(payload, path, rng)
        changes.append(f"{change}: {shown(path)}")
    return payload, "; ".join(changes)


def damaged_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return the content of a file that was cut off or in which bits have changed, and how."""
    kind = rng.choice(["cut", "bits", "bits", "bits", "zeros", "doubled"])
    data = bytearray(content)
    place = rng.randrange(len(data))
    if kind == "cut":
        del data[place:]
    elif kind == "bits":
        for _ in range(rng.choice([1, 1, 3, 30])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        data[place : place + 64] = bytes(len(data[place : place + 64]))
    else:
        data[place:place] = data[place : place + 100]
    return bytes(data), f"{kind} at {place}"


def as_file(content: Any) -> bytes:
    """Return what `torch.save` writes, or nothing if it cannot write the content."""
    file = io.BytesIO()
    try:
        torch.save(content, file)
    except Exception:
        return b""
    return file.getvalue()


def changed_distributed(state: Any, donor: Any, rng: random.Random) -> tuple[Any, str]:
    """Change a state for `torch.distributed.checkpoint`, also inside its bytes, as `changed`."""
    if rng.random() < 0.4:
        return changed(state, donor, rng)
    state = dict(state)
    rest = torch.load(io.BytesIO(state["commhooks"]), weights_only=True)
    where = rng.choice(["bytes", "rest", "shard", "shard"])
    if where == "bytes":
        state["commhooks"], what = damaged_bytes(state["commhooks"], rng)
        return state, what
    if where == "rest":
        rest, what = changed(rest, rest, rng)
    else:
        payload = torch.load(io.BytesIO(rest["shards"][0]), weights_only=True)
        payload, what = changed(payload, payload, rng)
        rest["shards"] = [as_file(payload)]
    state["commhooks"] = as_file(rest)
    return state, f"{where}: {what}"
