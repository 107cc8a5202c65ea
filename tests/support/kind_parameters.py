"""The kinds of `kinds.py` as parameters of tests."""

import pytest

from tests.support.compilers import needs_compiler
from tests.support.kinds import KINDS

ALL = [pytest.param(name, marks=[needs_compiler] if name.endswith(", native") else [], id=name) for name in KINDS]
LEARNING = [each for each in ALL if KINDS[each.id].learns]
IN_32_BITS = [each for each in LEARNING if KINDS[each.id].wrapper not in ("fp16", "bf16")]
SORTS = ("fp16", "powerSGD, bf16 wrapper", "batched", "int8, native", "int4, no error feedback", "random_k")
ONE_OF_EACH = [each for each in ALL if each.id in SORTS]
"""A codec and a wrapper of each sort."""
