"""The kinds of `kinds.py` as parameters of tests."""

import pytest

from tests.support.compilers import needs_compiler
from tests.support.kinds import KINDS

COMBINATIONS = (
    "powerSGD, fp16 wrapper",
    "int4, torch",
    "int4, bf16 wrapper",
    "batched, torch",
    "auto, chooses powerSGD",
)
"""Another kind has the same hook, and another one the same wire, kernel or choice."""
ALL = [
    pytest.param(name, marks=[needs_compiler] if name.endswith(", native") else [], id=name)
    for name in KINDS
    if name not in COMBINATIONS
]
IN_32_BITS = [kind for kind in ALL if KINDS[kind.id].learns and KINDS[kind.id].wrapper is None]
SORTS = ("fp16", "powerSGD, bf16 wrapper", "batched", "int8, native")
ONE_OF_EACH = [kind for kind in ALL if kind.id in SORTS]
"""A codec of each sort, and a wrapper."""
