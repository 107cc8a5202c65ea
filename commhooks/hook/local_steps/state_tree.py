"""State such as that of an optimizer, described as plain types and tensors, and made anew from the description.

A tree has dicts, lists, tuples, numbers, texts and tensors. What is none of these, such as an object of the user's, is
not described: each rank keeps its own.
"""

import dataclasses
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


@dataclass(frozen=True)
class Tree:
    """A description.

    Attributes:
        kind: "dict", "list", "tuple", "tensor", "shard" (of a DTensor), "parts" (of a tensor that consists of several),
            "value", or "own" for what each rank keeps.
        inner: the descriptions inside, by key or in order; a `Leaf`; or the value.
    """

    kind: str
    inner: Any = None


def described(value: Any, tensors: list[torch.Tensor]) -> Tree:
    """The description of `value`, whose tensors are appended to `tensors`."""
    if isinstance(value, DTensor):
        return Tree("shard", described(value.to_local(), tensors))
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return Tree("parts", {name: described(getattr(value, name), tensors) for name in names})
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value.detach())
        name = str(value.dtype).removeprefix("torch.")
        return Tree("tensor", Leaf(len(tensors) - 1, tuple(value.shape), name, value.device.type))
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return Tree("dict", {key: described(each, tensors) for key, each in value.items()})
    if type(value) in (list, tuple):
        return Tree(type(value).__name__, [described(each, tensors) for each in value])
    if value is None or type(value) in (bool, int, float, str):
        return Tree("value", value)
    return Tree("own")


def leaves(trees: Mapping[Any, Tree], path: str = "") -> Iterator[tuple[str, Leaf]]:
    """All tensors, by paths that two ranks have in common."""
    for key, tree in trees.items():
        here = f"{path}/{key}"
        if tree.kind == "tensor":
            yield here, tree.inner
        elif tree.kind in ("dict", "parts"):
            yield from leaves(tree.inner, here)
        elif tree.kind in ("list", "tuple"):
            yield from leaves(dict(enumerate(tree.inner)), here)
        elif tree.kind == "shard":
            yield from leaves({"shard": tree.inner}, here)


def rebuilt(own: Any, tree: Tree, arrived: Mapping[int, torch.Tensor], like: torch.Tensor | None = None) -> Any:
    """What `tree` describes, made of `own` in place as far as that fits.

    Args:
        arrived: tensors by their numbers; of the others `own` has the values.
        like: the parameter that the state belongs to.

    Raises:
        CannotBeMade: a tensor of a kind of its own is described, and `own` is none.
    """
    if tree.kind == "own":
        return own
    if tree.kind == "value":
        return tree.inner
    if tree.kind == "tensor":
        return _rebuilt_tensor(own, tree.inner, arrived, like)
    if tree.kind == "shard":
        if isinstance(own, DTensor):
            local = own.to_local()
            if rebuilt(local, tree.inner, arrived) is local:
                return own
        if not isinstance(like, DTensor):
            raise CannotBeMade
        local = rebuilt(None, tree.inner, arrived, like)
        shape, stride = like.shape, like.stride()
        return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
    if tree.kind == "parts":
        if not hasattr(own, "__tensor_flatten__"):
            raise CannotBeMade
        for name, inner in tree.inner.items():
            part = getattr(own, name)
            if rebuilt(part, inner, arrived) is not part:
                raise CannotBeMade
        return own
    if tree.kind == "dict":
        made = own if isinstance(own, dict) else {}
        for key in [key for key in made if key not in tree.inner]:
            del made[key]
        for key, inner in tree.inner.items():
            made[key] = rebuilt(made.get(key), inner, arrived, like)
        return made
    fits = isinstance(own, (list, tuple)) and len(own) == len(tree.inner)
    items = [rebuilt(own[i] if fits else None, inner, arrived, like) for i, inner in enumerate(tree.inner)]
    if tree.kind == "list" and isinstance(own, list):
        own[:] = items
        return own
    return items if tree.kind == "list" else tuple(items)


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
    torch.save({label: _plain(tree) for label, tree in trees.items()}, file)
    return file.getvalue()


def from_bytes(content: bytes) -> dict[str, Tree]:
    """What `to_bytes` was given. Nothing in `content` is run."""
    trees = torch.load(io.BytesIO(content), weights_only=True)
    return {label: _restored(*each) for label, each in trees.items()}


def _plain(tree: Tree) -> list[Any]:
    inner = tree.inner
    if tree.kind == "tensor":
        inner = list(dataclasses.astuple(inner))
    elif tree.kind == "shard":
        inner = _plain(inner)
    elif tree.kind in ("dict", "parts"):
        inner = {key: _plain(each) for key, each in inner.items()}
    elif tree.kind in ("list", "tuple"):
        inner = [_plain(each) for each in inner]
    return [tree.kind, inner]


def _restored(kind: str, inner: Any) -> Tree:
    if kind == "tensor":
        number, shape, *others = inner
        inner = Leaf(number, tuple(shape), *others)
    elif kind == "shard":
        inner = _restored(*inner)
    elif kind in ("dict", "parts"):
        inner = {key: _restored(*each) for key, each in inner.items()}
    elif kind in ("list", "tuple"):
        inner = [_restored(*each) for each in inner]
    return Tree(kind, inner)
