"""Runs Lightning's tests of DDP's communication hooks on two CPU ranks, with `CommHookDDP`.

Lightning runs them on GPUs, and registers no hook on CPUs: without us the tests that look for one
fail. In place of torch's hooks there are those of `commhooks.ddp_comm_hooks`, which DDP's log calls
by other names.
"""

import os
import sys
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peer_hooks
import pytest
from lightning.pytorch import strategies
from suites import SOURCE

from commhooks import LocalSGD
from commhooks.ddp_comm_hooks import default_hooks, powerSGD_hook
from lightning_commhooks import CommHookDDP

sys.path.insert(0, str(Path(os.environ[SOURCE], "tests")))
# Its helper imports private names of one version of Lightning, and skips all tests here.
helper: Any = types.ModuleType("tests_pytorch.helpers.runif")
helper.RunIf = lambda **_: lambda test: test
sys.modules[helper.__name__] = helper


NAMES = {
    "fp16_compress_hook": "fp16_compress",
    "powerSGD_hook": "powerSGD",
    "float16_wire_powerSGD_hook": "powerSGD",
    "post_localSGD_hook": "local_sgd",
}
TORCHRUN = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
}
"""What torchrun tells its processes."""


class HookedDDP(CommHookDDP):
    """Takes the arguments of Lightning's `DDPStrategy`."""

    def __init__(
        self,
        ddp_comm_hook: Any = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        **options: Any,
    ) -> None:
        if model_averaging_period is not None:
            start_iter = ddp_comm_state.start_localSGD_iter
            ddp_comm_hook = LocalSGD(sync_every=model_averaging_period, start_iter=start_iter)
            ddp_comm_state = None
        wrapper = {None: None, default_hooks.fp16_compress_wrapper: "fp16"}[ddp_comm_wrapper]
        super().__init__(ddp_comm_hook, hook_state=ddp_comm_state, wrapper=wrapper, **options)
        expected = getattr(self, "expected_ddp_comm_hook_name", None)  # the tests compare it
        self.expected_ddp_comm_hook_name = NAMES.get(str(expected), expected)

    def teardown(self) -> None:
        if self.comm_hook is not None:
            peer_hooks.keep(self.comm_hook)
        super().teardown()


if peer_hooks.NAME:
    strategies.DDPStrategy = HookedDDP  # type: ignore[misc]

from tests_pytorch.strategies import test_ddp_integration_comm_hook as peer  # noqa: E402


class CPUTrainer(pl.Trainer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "accelerator": "cpu"})


peer.Trainer = CPUTrainer  # type: ignore[misc]
if peer_hooks.NAME:
    peer.default = default_hooks
    peer.powerSGD = powerSGD_hook
globals().update({name: test for name, test in vars(peer).items() if name.startswith("test_")})


def test_ddp_spawn_fp16_compress_comm_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts its ranks itself: from the first of ours, which is none of torchrun for it."""
    if os.environ["RANK"] != "0":
        pytest.skip("the first rank runs it")
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith("TORCHELASTIC_"):
            monkeypatch.delenv(name)
    peer.test_ddp_spawn_fp16_compress_comm_hook(tmp_path)
