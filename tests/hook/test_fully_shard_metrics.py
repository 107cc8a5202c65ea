"""Norms, statistics and the comparison of replicas on shards."""

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist

import commhooks
from tests.support.inside import session_of
from tests.support.sharded import POWERSGD, attached, backward, random_gradients, rows_of

OPTIONS = POWERSGD | {"start_powerSGD_iter": 0}


def _measured() -> dict[str, bool]:
    model, hook = attached(2, 2, hook_options=OPTIONS)
    for step in range(2):
        got = backward(model, random_gradients(step))
    names = [row.name for row in hook.plan().compressed]
    index = dist.get_rank() % 2
    gradient = torch.cat([got[name][rows_of(name, 2, index)].flatten() for name in names])
    residual = torch.cat([session_of(hook).state["residual"][name].flatten() for name in names])
    norms = hook.norms()
    stats = hook.stats()
    local = [parameter.to_local() for parameter in model.parameters()]
    shapes = {row.name: row.shape for row in hook.plan().parameters}
    return {
        "gradient norm": abs(norms["gradient_norm"] - gradient.norm().item()) < 1e-10,
        "residual norm": abs(norms["residual_norm"] - residual.norm().item()) < 1e-10,
        "plan of the shard": shapes["first.weight"] == ((17, 20), (16, 20))[index],
        "bytes of the shard": stats["bytes_uncompressed"]
        == 2 * 8 * sum(shard.numel() for shard in local),
        "clocks": stats["codec_s"] > 0 and stats["waiting_s"] >= 0,
        "repr": repr(hook).endswith(
            f"attached to FSDPPrescribed, rank {dist.get_rank() // 2} of 2>"
        ),
    }


def test_metrics_are_those_of_the_shards(run_ranks: Any) -> None:
    for outcome in run_ranks(_measured, world_size=4):
        assert all(outcome.values()), outcome


def _drifts() -> str:
    """After a pass in which nothing differs, a weight of the last shard changes on rank 3 only."""
    model, _ = attached(2, 2, "allreduce", check_every=1)
    backward(model, random_gradients(0))
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.get_parameter("even.weight").to_local()[-1] += 1e-3
    try:
        backward(model, random_gradients(1))
    except commhooks.HookRunError as error:
        return str(error)
    return ""


def test_replicas_of_a_shard_are_compared(run_ranks: Any) -> None:
    messages = run_ranks(_drifts, world_size=4)
    for rank in (1, 3):
        assert "they differ in parameter even.weight (ranks [1] against rank 0)" in messages[rank]
        assert (
            "ranks that hold other shards of the model have failed: ranks [1]" in messages[rank - 1]
        )


def _deleted() -> dict[str, Any]:
    model, hook = attached(1, 2, hook_options=OPTIONS)
    backward(model, random_gradients(0))
    parameter = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    summary = {
        "repr": repr(hook),
        "step": hook.stats()["step"],
        "rows": len(hook.plan().parameters),
    }
    del hook
    gc.collect()
    return summary | {"freed": parameter() is None}


def test_the_hook_outlives_its_model_and_both_are_freed(run_ranks: Any) -> None:
    for outcome in run_ranks(_deleted, world_size=2):
        assert "its model is gone" in outcome.pop("repr")
        assert outcome == {"step": 1, "rows": 8, "freed": True}
