"""State such as that of an optimizer, described as plain types and tensors, and made anew from the description.

A tree has dicts, lists, tuples, numbers, texts and tensors. What is none of these, such as an object of the user's, is
not described: each rank keeps its own.
"""

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class CannotBeMade(Exception):
    """A rank has nothing that what was described could be made of."""


@dataclass(frozen=True)
class Leaf:
    """A tensor.

    Attributes:
        number: its place in the list of all tensors.
        device_type: "cpu", or that of an accelerator.
    """

    number: int
    shape: tuple[int, ...]
    dtype_name: str
    device_type: str

    @property
    def form(self) -> tuple[Any, ...]:
        return self.shape, self.dtype_name

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Tree = list[Any]
"""A description `[kind, inner]` of plain types. Kinds: "dict", "list", "tuple", "tensor" (inner: a `Leaf` as a list),
"shard" (of a DTensor), "parts" (of a tensor that consists of several), "value", and "own" for what each rank keeps."""


def described(value: Any, tensors: list[torch.Tensor]) -> Tree:
    """The description of `value`, whose tensors are appended to `tensors`."""
    if isinstance(value, DTensor):
        return ["shard", described(value.to_local(), tensors)]
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return ["parts", {name: described(getattr(value, name), tensors) for name in names}]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value.detach())
        name = str(value.dtype).removeprefix("torch.")
        return ["tensor", [len(tensors) - 1, tuple(value.shape), name, value.device.type]]
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return ["dict", {key: described(each, tensors) for key, each in value.items()}]
    if type(value) in (list, tuple):
        return [type(value).__name__, [described(each, tensors) for each in value]]
    if value is None or type(value) in (bool, int, float, str):
        return ["value", value]
    return ["own", None]


def leaves(trees: Mapping[Any, Tree], path: str = "") -> Iterator[tuple[str, Leaf]]:
    """All tensors, by paths that two ranks have in common."""
    for key, (kind, inner) in trees.items():
        here = f"{path}/{key}"
        if kind == "tensor":
            yield here, Leaf(*inner)
        elif kind in ("dict", "parts"):
            yield from leaves(inner, here)
        elif kind in ("list", "tuple"):
            yield from leaves(dict(enumerate(inner)), here)
        elif kind == "shard":
            yield from leaves({kind: inner}, here)


def rebuilt(own: Any, tree: Tree, arrived: Mapping[int, torch.Tensor], like: torch.Tensor | None = None) -> Any:
    """What `tree` describes, made of `own` in place as far as that fits.

    Args:
        arrived: tensors by their numbers; of the others `own` has the values.
        like: the parameter that the state belongs to.

    Raises:
        CannotBeMade: a tensor of a kind of its own is described, and `own` is none.
    """
    kind, inner = tree
    if kind == "own":
        return own
    if kind == "value":
        return inner
    if kind == "tensor":
        return _rebuilt_tensor(own, Leaf(*inner), arrived, like)
    if kind == "shard":
        local = own.to_local() if isinstance(own, DTensor) else None
        made = rebuilt(local, inner, arrived, like)
        if local is not None and made is local:
            return own
        if not isinstance(like, DTensor):
            raise CannotBeMade
        mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
        return DTensor.from_local(made, mesh, placements, run_check=False, shape=shape, stride=stride)
    if kind == "parts":
        for name, each in inner.items():
            part = getattr(own, name, None)
            if part is None or rebuilt(part, each, arrived) is not part:
                raise CannotBeMade
        return own
    if kind == "dict":
        found = own if isinstance(own, dict) else {}
        for key in [key for key in found if key not in inner]:
            del found[key]
        for key, each in inner.items():
            found[key] = rebuilt(found.get(key), each, arrived, like)
        return found
    fits = isinstance(own, (list, tuple)) and len(own) == len(inner)
    items = [rebuilt(own[place] if fits else None, each, arrived, like) for place, each in enumerate(inner)]
    if kind == "list" and isinstance(own, list):
        own[:] = items
        return own
    return items if kind == "list" else tuple(items)


def _rebuilt_tensor(
    own: Any, leaf: Leaf, arrived: Mapping[int, torch.Tensor], like: torch.Tensor | None
) -> torch.Tensor:
    new = arrived.get(leaf.number)
    if isinstance(own, torch.Tensor) and (own.shape, own.dtype) == (torch.Size(leaf.shape), leaf.dtype):
        if new is not None:
            own.detach().copy_(new)
        return own
    if new is None:
        raise CannotBeMade
    device = torch.device("cpu") if leaf.device_type == "cpu" else new.device
    return new.to(like.device if like is not None and leaf.device_type == like.device.type else device, copy=True)


def to_bytes(trees: Mapping[str, Tree]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(trees), file)
    return file.getvalue()


def from_bytes(content: bytes) -> dict[str, Tree]:
    """What `to_bytes` was given. Nothing in `content` is run."""
    trees: dict[str, Tree] = torch.load(io.BytesIO(content), weights_only=True)
    return trees
