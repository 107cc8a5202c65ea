"""Runs DDP cases of torch's own distributed tests on CPU ranks, with a hook of ours on every model.

    BACKEND=gloo WORLD_SIZE=2 TEMP_DIR=/tmp/empty \\
        python tests/peers/torch_peer.py outcomes.json test_ddp_create_graph

Every case forks its ranks. The JSON file has the outcome and the output of each case afterwards. A
hook that a case brings along is attached with `commhooks.attach`, and the modules with torch's
hooks are those of `commhooks.ddp_comm_hooks`. Without COMMHOOKS_PEERS_HOOK nothing of this happens.
"""

import json
import sys
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
    """DDP that attaches the tried hook at the first forward unless the case registers its own."""

    hooked = False

    def register_comm_hook(self, state: object, hook: Any) -> None:
        if self.hooked:  # `attach` calls this
            super().register_comm_hook(state, hook)
        else:
            self._attach(hook, state)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not self.hooked:
            self._attach(peer_hooks.config(), None)
        return super().forward(*inputs, **named)

    def _attach(self, hook: Any, state: object) -> None:
        self.hooked = True
        peer_hooks.keep(commhooks.attach(self, hook, hook_state=state))


if peer_hooks.NAME:
    torch.nn.parallel.DistributedDataParallel = HookedDDP  # type: ignore[misc]
    peer.DistributedDataParallel = HookedDDP
    peer.default = default_hooks
    peer.powerSGD = powerSGD_hook


class TorchCases(peer.TestDistBackend, peer.DistributedTest._DistTestBase):  # type: ignore[misc]
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def main(file: str, *cases: str) -> None:
    """Run the cases one after the other."""
    outcomes = {}
    for case in cases:
        result = unittest.TextTestRunner().run(TorchCases(case))
        failed = [*result.failures, *result.errors]
        skipped = result.skipped
        outcome = "failed" if failed else "skipped" if skipped else "passed"
        outcomes[case] = outcome, "".join(text for _, text in failed or skipped)
    Path(file).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
