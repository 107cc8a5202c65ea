"""The kernel with which hooks compute on the CPU."""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def computing_with(kernel: str) -> Iterator[None]:
    """Hooks that are attached in the body compute with this kernel: "native", if the machine can compile it, or
    "torch"."""
    with mock.patch.dict(os.environ, {"COMMHOOKS_NATIVE": {"native": "1", "torch": "0"}[kernel]}):
        yield
