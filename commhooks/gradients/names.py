"""Define stable parameter names, the keys of saved state, and match the globs of `exclude`.

`attach` uses the names of the model. With a plain `register_comm_hook(state, hook)` the name of a
parameter is its position among the parameters of its dtype and device type, counted from the last
registered one. The first backward pass reduces parameters in this order for every `bucket_cap_mb`,
also after a restart.
"""

import difflib
import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch

from commhooks.errors import HookRunError, listed, logger_of
from commhooks.gradients.precision import dtype_name

logger = logger_of(__name__)
Value = TypeVar("Value")


def matching(names: Sequence[str], patterns: Sequence[str]) -> str | None:
    """Return the first of `patterns` that matches one of a parameter's `names`, or None.

    Patterns are those of `fnmatch`, case-sensitive.
    """
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            return pattern
    return None


def own_name(name: str) -> str:
    """Return `name` without the prefix of `torch.compile`, so that checkpoints fit either way."""
    return name.replace("_orig_mod.", "")


def all_names(module: torch.nn.Module) -> dict[int, list[str]]:
    """Map the id of each parameter to its `own_name`s, in the order of registration."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(own_name(name))
    return names


def warn_if_unmatched(patterns: Sequence[str], module: torch.nn.Module) -> None:
    names = [name for aliases in all_names(module).values() for name in aliases]
    unmatched = []
    for pattern in patterns:
        if matching(names, [pattern]) is None:
            near = difflib.get_close_matches(pattern.strip("*?"), names, n=1, cutoff=0.0)
            closest = f" (the closest name is {near[0]!r})" if near else ""
            unmatched.append(f"{pattern!r}{closest}")
    if unmatched:
        logger.warning(
            "exclude: no parameter of the model matches %s. Patterns are compared with whole names,"
            " case matters, and * stands for anything.",
            ", ".join(unmatched),
        )


class ParameterNames(Protocol):
    def of_bucket(self, parameters: list[torch.Tensor], first: bool) -> list[str]:
        """Return the names of a bucket's parameters.

        `first`: whether it is the first bucket of a backward pass.
        """

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Return {name: parameter} for all parameters known so far."""

    def first_match(self, name: str, patterns: Sequence[str]) -> str | None:
        """Return the first of `patterns` that matches the parameter, or None; see `matching`."""

    def key_of(self, name: str) -> str:
        """Return the key in `named_parameters()` of the parameter that has this name.

        A tied parameter has several names. If no parameter has it, return `name`.
        """


def by_own_names(entries: Mapping[str, Value], names: ParameterNames) -> dict[str, Value]:
    """Rename saved entries of parameters to the keys of `names`.

    A tied parameter is saved under the name that was registered first, which may be another one in
    this model. If several entries are of one parameter, because it was not tied then, one of them
    is renamed.
    """
    renamed: dict[str, Value] = {}
    for name, entry in entries.items():
        key = names.key_of(name)
        taken = key in renamed or (key != name and key in entries)
        renamed[name if taken else key] = entry
    return renamed


class ModelNames:
    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        all_names: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self._parameters = dict(named_parameters)
        self._all_names = {
            name: list(all_names.get(id(parameter), [name]))
            for name, parameter in self._parameters.items()
        }
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._keys = {name: key for key, names in self._all_names.items() for name in names}

    def of_bucket(self, parameters: list[torch.Tensor], first: bool) -> list[str]:
        try:
            return [self._names[id(parameter)] for parameter in parameters]
        except KeyError:
            shapes = [tuple(p.shape) for p in parameters if id(p) not in self._names]
            raise HookRunError(
                f"DDP reduces parameters of shapes {listed(shapes)} that the model did not have"
                " when the hook was attached, or that were frozen then: wrap the model in"
                " DistributedDataParallel again after adding or freezing parameters, and attach"
                " again"
            ) from None

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return self._parameters

    def all_names(self, name: str) -> list[str]:
        return self._all_names[name]

    def first_match(self, name: str, patterns: Sequence[str]) -> str | None:
        return matching(self._all_names[name], patterns)

    def key_of(self, name: str) -> str:
        return self._keys.get(name, name)

    def first_in_alphabet(self, name: str) -> str:
        """Return one of the parameter's names, whichever of them is registered first."""
        return min(self._all_names[name])


class PositionalNames:
    """Names parameters by position.

    `float32.cpu.0` is the last registered float32 parameter on the CPU.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[torch.Tensor, str]] = {}
        self._counts: Counter[str] = Counter()

    def of_bucket(self, parameters: list[torch.Tensor], first: bool) -> list[str]:
        if first and not any(id(parameter) in self._parameters for parameter in parameters):
            # The parameters belong to another model: clear the names. Its first bucket holds the
            # parameters registered last.
            self._parameters.clear()
            self._counts.clear()
        for parameter in reversed(parameters):
            if id(parameter) not in self._parameters:
                kind = f"{dtype_name(parameter.dtype)}.{parameter.device.type}"
                self._parameters[id(parameter)] = (parameter, f"{kind}.{self._counts[kind]}")
                self._counts[kind] += 1
        return [self._parameters[id(parameter)][1] for parameter in parameters]

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter for parameter, name in self._parameters.values()}

    def first_match(self, name: str, patterns: Sequence[str]) -> str | None:
        # `PowerSGDState`, the only state of a bare register_comm_hook, has no option `exclude`
        return None

    def key_of(self, name: str) -> str:
        return name
