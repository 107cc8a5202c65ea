"""How DDP packs gradients into buckets changes no bit of the result (on two ranks, where a sum has one order only)."""

import itertools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import HookCallbacks
from tests.support.models import bits_equal, mlp

STEPS = 5
# 0.65 MB in ten matrices: 10 or 11 buckets at 0.05 MB, 3 at 0.25 MB, 1 at 25 MB.
WIDTH, LAYERS = 128, 10


def _train(options: dict[str, Any], ddp_options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Final weights, and the number of buckets of each backward pass."""
    torch.manual_seed(5)
    ddp = DistributedDataParallel(mlp(WIDTH, LAYERS), **ddp_options)
    hook = commhooks.attach(ddp, "powerSGD", hook_options=options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    buckets = []
    original = HookCallbacks.reduce

    def counting(self: HookCallbacks, bucket: Bucket) -> Any:
        if bucket.index == 0:
            buckets.append(0)
        buckets[-1] += 1
        return original(self, bucket)

    with mock.patch.object(HookCallbacks, "reduce", counting):
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            inputs, targets = torch.randn(2, 4, WIDTH, generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
    stats = hook.stats()
    assert stats["compressed_steps"] == STEPS - options["start_powerSGD_iter"]
    assert stats["bytes_sent_last_pass"] < stats["bytes_uncompressed"] / STEPS / 10
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}, buckets


VARIANTS: dict[str, dict[str, Any]] = {
    "cap 0.05": {"bucket_cap_mb": 0.05},
    "cap 0.25": {"bucket_cap_mb": 0.25},
    "cap 25": {"bucket_cap_mb": 25},
    "default": {},
    "view": {"bucket_cap_mb": 0.25, "gradient_as_bucket_view": True},
    "static graph": {"bucket_cap_mb": 0.25, "static_graph": True},
    "find unused": {"bucket_cap_mb": 0.25, "find_unused_parameters": True},
    "view, static graph": {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": True, "static_graph": True},
}


def _all() -> dict[str, Any]:
    options = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 1}
    return {name: _train(options, ddp_options) for name, ddp_options in VARIANTS.items()}


def test_same_bits_for_every_layout(run_ranks):
    ranks = run_ranks(_all)
    expected, _ = ranks[0]["cap 25"]
    for results, (name, _) in itertools.product(ranks, VARIANTS.items()):
        assert bits_equal(results[name][0], expected), name
    counts = {name: buckets[-1] for name, (_, buckets) in ranks[0].items()}
    assert counts["cap 0.05"] >= LAYERS > counts["cap 0.25"] > 1 == counts["cap 25"], counts
    # DDP packs the first backward pass otherwise than those after it: a rebuild has taken place.
    _, buckets = ranks[0]["cap 0.05"]
    assert buckets[0] != buckets[1]
