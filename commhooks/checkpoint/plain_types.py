"""Find values that `torch.load(..., weights_only=True)` rejects: a single one makes the whole checkpoint unreadable."""

import collections
from typing import Any

import torch

_SCALARS = (str, int, float, bool, type(None), complex, bytes, torch.dtype, torch.device, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SEQUENCES = (list, tuple, set)
_MAPPINGS = (dict, collections.OrderedDict)


def plain_types_problem(value: Any) -> str | None:
    """Path and type of the first value in `value` that `weights_only=True` would reject; None if there is none.

    Types must match exactly: `numpy.float64` is a subclass of float, but its pickle is rejected.
    """
    return _problem(value, "", set())


def _problem(value: Any, path: str, above: set[int]) -> str | None:
    kind = type(value)
    if kind in _SCALARS or kind in _TENSORS:
        return None
    if kind not in _SEQUENCES and kind not in _MAPPINGS:
        return f"{path or 'the value itself'} is a {kind.__module__}.{kind.__qualname__}"
    if id(value) in above:
        return f"{path} contains itself"
    above = above | {id(value)}
    if kind in _MAPPINGS:
        for key, item in value.items():
            found = _problem(key, f"the key {key!r} of {path or 'the value itself'}", above)
            found = found or _problem(item, f"{path}[{key!r}]", above)
            if found is not None:
                return found
        return None
    for place, item in enumerate(value):
        found = _problem(item, f"{path}[{place}]" if kind is not set else f"an element of {path}", above)
        if found is not None:
            return found
    return None
