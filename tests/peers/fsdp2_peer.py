"""Runs torch's tests of FSDP2's communication and training on CPU ranks over gloo, with `shards`.

`exact` sends all weights and gradients as they are, but through our collectives; `int8` compresses
both, and numbers may differ by `TOLERANCE`. Each model gets its hook at its first forward pass.
torchrun starts the ranks, in place of the test, so that one start is enough for all cases.
"""

import datetime
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import peer_hooks
import torch
from suites import FSDP2, SOURCE
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal import common_distributed, common_fsdp, common_utils

import commhooks

RANKS = int(os.environ.get("WORLD_SIZE", 1))
SHARDS = {"exact": commhooks.Shards(exclude=["*"]), "int8": commhooks.Shards()}
TOLERANCE = 0.05
"""Of the larger of both norms, or of 1."""

# The tests ask for GPUs, and skip themselves where torch counts none.
common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
torch.cpu.device_count = lambda: RANKS
torch.accelerator.device_count = lambda: RANKS
sys.path.insert(0, str(Path(os.environ[SOURCE], FSDP2)))

import test_fully_shard_comm  # type: ignore[import-not-found]  # noqa: E402
import test_fully_shard_training  # type: ignore[import-not-found]  # noqa: E402

_with_hook: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


def hooked_fully_shard(module: Any, *arguments: Any, **options: Any) -> Any:
    sharded = fully_shard(module, *arguments, **options)
    for part in module if isinstance(module, list | tuple) else [module]:
        part.register_forward_pre_hook(_attach, prepend=True)
    return sharded


def _attach(module: torch.nn.Module, _: Any) -> None:
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if any(unit in _with_hook for unit in units):
        return
    _with_hook.update(units)  # type: ignore[arg-type]
    peer_hooks.keep(commhooks.attach(module, None, shards=SHARDS[peer_hooks.NAME]))


class _OnThisRank:
    """Runs a case here, as one of the ranks, in place of processes that it would start."""

    world_size = RANKS

    def setUp(self) -> None:
        common_utils.TestCase.setUp(self)  # type: ignore[arg-type]
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        self.rank = dist.get_rank()

    def tearDown(self) -> None:
        common_utils.TestCase.tearDown(self)  # type: ignore[arg-type]


class _Tolerant:
    """Of int8, for `assertEqual`."""

    def assertEqual(self, x: Any, y: Any, *more: Any, **options: Any) -> None:  # noqa: N802
        if not all(isinstance(value, torch.Tensor) for value in (x, y)):
            super().assertEqual(x, y, *more, **options)  # type: ignore[misc]
            return
        x, y = (value.full_tensor() if hasattr(value, "full_tensor") else value for value in (x, y))
        error = (x - y).norm() / max(x.norm(), y.norm()).clamp(min=1.0)
        assert error < TOLERANCE, f"they differ by {error:.3f} of their norm: {x} and {y}"


def classes_of(module: Any) -> "dict[str, type]":
    found = {}
    for name, case in vars(module).items():
        own = isinstance(case, type) and case.__module__ == module.__name__
        if own and issubclass(case, common_fsdp.FSDPTest):
            tolerant = (_Tolerant,) if peer_hooks.NAME == "int8" else ()
            found[name] = type(name, (_OnThisRank, *tolerant, case), {"__module__": __name__})
    return found


for peer in (test_fully_shard_comm, test_fully_shard_training):
    if peer_hooks.NAME:
        peer.fully_shard = hooked_fully_shard
    globals().update(classes_of(peer))
