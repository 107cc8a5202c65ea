"""The types that a checkpoint may hold: `plain_types_problem` says what `weights_only=True`
says.
"""

import collections
import io
import pickle
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from commhooks.checkpoint.user_state import plain_types_problem

PLAIN: dict[str, Any] = {
    "scalars": ["a", 1, 10**30, 1.5, True, None, 1j, b"bytes"],
    "torch": [
        torch.ones(2),
        torch.nn.Parameter(torch.ones(2)),
        torch.float16,
        torch.device("cpu"),
        torch.Size([1]),
    ],
    "nested": {
        "a": {1: [torch.ones(1, dtype=torch.bfloat16), ("b", {2.5: set("c")})]},
        (1, "x"): {},
        None: [],
    },
    "ordered": collections.OrderedDict(a=[]),
}

PROBLEMS: dict[str, tuple[Any, str]] = {
    "path": ({"a": [1, PurePosixPath("x")]}, "['a'][1] is a pathlib.PurePosixPath"),
    "numpy scalar": ({"decay": np.float32(1)}, "['decay'] is a numpy.float32"),
    "a float by its class": (
        {"decay": {3: (0, np.float64(1))}},
        "['decay'][3][1] is a numpy.float64",
    ),
    "numpy array": ([np.zeros(2)], "[0] is a numpy.ndarray"),
    "defaultdict": ({"a": collections.defaultdict(int)}, "['a'] is a collections.defaultdict"),
    "deque": ({"a": collections.deque()}, "['a'] is a collections.deque"),
    "frozenset": (frozenset(), "the value itself is a builtins.frozenset"),
    "key": ({"a": {frozenset(): 1}}, "the key frozenset() of ['a'] is a builtins.frozenset"),
    "first of two": ({"a": range(3), "b": slice(1)}, "['a'] is a builtins.range"),
}


def loads(value: Any) -> bool:
    file = io.BytesIO()
    torch.save({"state": value}, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name):
    assert plain_types_problem(PLAIN[name]) is None
    assert loads(PLAIN[name])


@pytest.mark.parametrize("name", PROBLEMS)
def test_not_plain(name):
    value, problem = PROBLEMS[name]
    assert plain_types_problem(value) == problem
    assert not loads(value)


def test_what_contains_itself_is_no_endless_loop():
    value: dict[str, Any] = {"a": []}
    value["a"].append(value)
    assert plain_types_problem(value) == "['a'][0] contains itself"
    twice = [1]
    assert plain_types_problem([twice, twice]) is None
