"""Whether this machine has a C compiler, which the native kernel needs."""

import os
import shutil

import pytest

needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CC", "cc")), reason="needs a C compiler")
