"""Runs Accelerate's tests of saving and loading on two CPU ranks, with a hook in every Accelerator.

The tests expect one process: a folder for temporary files is the same on all ranks here.
"""

import os
import sys
import types
from pathlib import Path
from typing import Any

import accelerate_peer
import peer_hooks
import torch
from accelerate import Accelerator
from suites import SOURCE, SUITES
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(os.environ[SOURCE], "tests")))


def parameterized_class(
    names: "tuple[str, ...]", rows: "list[list[Any]]", class_name_func: Any
) -> Any:
    """What the tests use of the package parameterized, which they need for nothing else."""

    left_out = dict.fromkeys(SUITES["accelerate_state"].left_out)

    def classes(case: type) -> None:
        for number, row in enumerate(rows):
            values = dict(zip(names, row, strict=True))
            name = class_name_func(case, number, values)
            globals()[name] = type(name, (case,), {**values, **left_out, "__module__": __name__})

    return classes


class TransparentDDP(DistributedDataParallel):
    """Gives the parameters `a` and `b` of the model that it wraps: the tests read them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name) if name in ("a", "b") else super().__getattr__(name)


class WaitingAccelerator(accelerate_peer.HookedAccelerator if peer_hooks.NAME else Accelerator):  # type: ignore[misc]
    """The tests load at once what all ranks have saved."""

    def save_state(self, *args: Any, **options: Any) -> Any:
        result = super().save_state(*args, **options)
        self.wait_for_everyone()
        return result


parameterized: Any = types.ModuleType("parameterized")
parameterized.parameterized_class = parameterized_class
sys.modules[parameterized.__name__] = parameterized

import test_state_checkpointing as peer  # type: ignore[import-not-found]  # noqa: E402

torch.nn.parallel.DistributedDataParallel = TransparentDDP  # type: ignore[misc]
peer.tempfile = types.SimpleNamespace(TemporaryDirectory=peer_hooks.SharedFolder)
peer.Accelerator = WaitingAccelerator
