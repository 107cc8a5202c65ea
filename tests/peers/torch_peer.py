"""The DDP cases of torch's own distributed tests that CPU ranks with gloo can run, with a hook of ours on every model.

    BACKEND=gloo WORLD_SIZE=2 TEMP_DIR=/tmp/empty python tests/peers/torch_peer.py outcomes.json test_ddp_create_graph

Every case forks its ranks. What became of the cases is in the JSON file afterwards. A hook that a case brings along is
attached with `commhooks.attach`, and the modules with torch's hooks are those of `commhooks.ddp_comm_hooks`. Without
COMMHOOKS_PEERS_HOOK nothing of this happens.
"""

import json
import sys
import time
import unittest
from pathlib import Path
from typing import Any

import peer_hooks
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import distributed_test as peer

import commhooks
from commhooks.ddp_comm_hooks import default_hooks, powerSGD_hook


class HookedDDP(DistributedDataParallel):
    """DDP with the hook that is tried, attached at the first forward unless the case registers one of its own."""

    hooked = False

    def register_comm_hook(self, state: object, hook: Any) -> None:
        if self.hooked:  # `attach` calls this
            super().register_comm_hook(state, hook)
        else:
            self._attach(hook, state)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not self.hooked:
            self._attach(peer_hooks.CONFIGS[peer_hooks.NAME], None)
        return super().forward(*inputs, **named)

    def _attach(self, hook: Any, state: object) -> None:
        self.hooked = True
        peer_hooks.keep(commhooks.attach(self, hook, hook_state=state))


if peer_hooks.NAME:
    torch.nn.parallel.DistributedDataParallel = HookedDDP  # type: ignore[misc]
    peer.DistributedDataParallel = HookedDDP
    peer.default, peer.powerSGD = default_hooks, powerSGD_hook


class TorchCases(peer.TestDistBackend, peer.DistributedTest._DistTestBase):  # type: ignore[misc]
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **options: Any) -> None:
        peer_hooks.begin_case(test_name)
        super()._run(rank, test_name, file_name, pipe, **options)


class Outcomes(unittest.TextTestResult):
    """Writes a row per case: outcome, its reason, seconds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: dict[str, dict[str, Any]] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        failed = [text for known, text in [*self.failures, *self.errors] if known is test]
        skipped = [text for known, text in self.skipped if known is test]
        self.rows[test._testMethodName] = {
            "outcome": "failed" if failed else "skipped" if skipped else "passed",
            "output": "".join(failed or skipped),
            "seconds": time.monotonic() - self._began,
        }


def main(file: str, *cases: str) -> None:
    """Run the cases one after the other."""
    result = unittest.TextTestRunner(resultclass=Outcomes).run(unittest.TestSuite(map(TorchCases, cases)))
    assert isinstance(result, Outcomes)
    Path(file).write_text(json.dumps(result.rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
