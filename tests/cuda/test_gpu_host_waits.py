"""In a compressed step the host never waits for the GPU."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.cuda.places import NCCL, entered
from tests.support.training import SEVERAL_BUCKETS_MB, batch, make_model

pytestmark = pytest.mark.cuda


@contextlib.contextmanager
def host_waits() -> Iterator[list[str]]:
    """The warnings of operations that made the host wait in the body."""
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # `set_sync_debug_mode` itself warns that it does not see all "synchronizing operations".
    waits += [
        str(warning.message) for warning in seen if "called a synchronizing" in str(warning.message)
    ]


def _waits_with_a_scaler(batch_shapes: bool, planted: bool) -> list[str]:
    """Of three backward passes. `planted`: with a hook of a parameter that waits."""
    with entered(NCCL) as here:
        ddp = DistributedDataParallel(
            make_model().cuda(), bucket_cap_mb=SEVERAL_BUCKETS_MB, process_group=here.group
        )
        scaler = torch.amp.GradScaler("cuda")
        one = torch.ones((), device="cuda")
        config = commhooks.PowerSGD(
            matrix_approximation_rank=2,
            start_powerSGD_iter=2,
            batch_tensors_with_same_shape=batch_shapes,
        )
        hook = commhooks.attach(ddp, config, loss_scale=lambda: scaler.scale(one))
        all_waits: list[str] = []
        for step in range(8):
            images, labels = (tensor.cuda() for tensor in batch(step, dist.get_rank()))
            loss = scaler.scale(torch.nn.functional.cross_entropy(ddp(images), labels))
            if planted and step == 7:
                ddp.module[3].weight.register_hook(
                    lambda gradient: gradient * float(gradient.isfinite().all().item())
                )
            with host_waits() if step > 4 else contextlib.nullcontext([]) as waits:
                loss.backward()
            all_waits += waits
        assert hook.stats()["compressed_steps"] == 6
        return all_waits


@pytest.mark.parametrize("batch_shapes", [False, True])
def test_the_host_never_waits(run_ranks: Any, batch_shapes: bool) -> None:
    assert run_ranks(_waits_with_a_scaler, batch_shapes, False, world_size=1) == [[]]


def test_a_planted_wait_is_seen(run_ranks: Any) -> None:
    (waits,) = run_ranks(_waits_with_a_scaler, False, True, world_size=1)
    assert len(waits) >= 1
