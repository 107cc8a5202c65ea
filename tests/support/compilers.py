"""Whether this machine has a C compiler, which the native kernel needs."""

import os
import shutil

import pytest

HAS_COMPILER = shutil.which(os.environ.get("CC", "cc")) is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler")
