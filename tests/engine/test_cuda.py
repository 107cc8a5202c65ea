"""The CUDA path, where there is a GPU: one rank on NCCL, two ranks on gloo with CUDA tensors on one GPU."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import SEVERAL_BUCKETS_MB, batch, flat, make_model

import commhooks

pytestmark = pytest.mark.cuda
OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}


def _train(
    device: str, wrapper: str | None = None, poison_at: int | None = None, batch_shapes: bool = False
) -> dict[str, Any]:
    model = make_model().to(device)
    ids = None if device == "cpu" else [0]
    ddp = DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=SEVERAL_BUCKETS_MB)
    options = {**OPTIONS, "batch_tensors_with_same_shape": batch_shapes}
    hook = commhooks.attach(ddp, "powerSGD", hook_options=options, wrapper=wrapper)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(8):
        images, labels = (each.to(device) for each in batch(step, dist.get_rank()))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(images), labels)
        (loss * float("inf") if step == poison_at and dist.get_rank() == 0 else loss).backward()
        if step != poison_at:
            optimizer.step()
    return {"weights": flat(ddp.parameters()).cpu(), "stats": hook.stats(), "saved": hook.state_dict()}


def _nccl_alone() -> dict[str, Any]:
    group = dist.new_group(backend="nccl")
    ddp = DistributedDataParallel(make_model().cuda(), device_ids=[0], bucket_cap_mb=0.001, process_group=group)
    hook = commhooks.attach(ddp, "powerSGD", hook_options=OPTIONS)
    for step in range(8):
        images, labels = (each.cuda() for each in batch(step, 0))
        torch.nn.functional.cross_entropy(ddp(images), labels).backward()
    return hook.stats()


@pytest.mark.parametrize("batch_shapes", [False, True])
@pytest.mark.parametrize("wrapper", [None, "fp16", "bf16"])
def test_gloo_with_cuda_tensors_equals_cpu(run_ranks: Any, wrapper: str | None, batch_shapes: bool) -> None:
    on_cpu, on_gpu = run_ranks(_train, "cpu", wrapper), run_ranks(_train, "cuda", wrapper, None, batch_shapes)
    assert torch.equal(on_gpu[0]["weights"], on_gpu[1]["weights"])
    assert on_gpu[0]["stats"]["compressed_steps"] == 6
    assert (on_gpu[0]["weights"] - on_cpu[0]["weights"]).abs().max() < (1e-4 if wrapper is None else 1e-2)


def test_a_nonfinite_step_is_not_committed(run_ranks: Any) -> None:
    results = run_ranks(_train, "cuda", None, 5)
    for result in results:
        assert result["stats"]["nonfinite_steps"] == 1
        assert result["stats"]["step"] == 7
        assert result["weights"].isfinite().all()
        assert torch.equal(result["weights"], results[0]["weights"])


def test_one_rank_on_nccl(run_ranks: Any) -> None:
    assert run_ranks(_nccl_alone, world_size=1)[0]["compressed_steps"] == 6


def _waits_with_a_scaler(batch_shapes: bool) -> int:
    """Operations that made the host wait in a compressed backward pass."""
    group = dist.new_group(backend="nccl")
    ddp = DistributedDataParallel(make_model().cuda(), device_ids=[0], bucket_cap_mb=0.001, process_group=group)
    scaler = torch.amp.GradScaler("cuda")
    options = {**OPTIONS, "batch_tensors_with_same_shape": batch_shapes}
    one = torch.ones((), device="cuda")
    hook = commhooks.attach(ddp, "powerSGD", hook_options=options, loss_scale=lambda: scaler.scale(one))
    waits = 0
    for step in range(8):
        images, labels = (each.cuda() for each in batch(step, 0))
        loss = scaler.scale(torch.nn.functional.cross_entropy(ddp(images), labels))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if step > 4 else "default")
            loss.backward()
            torch.cuda.set_sync_debug_mode("default")
        waits += sum("synchronizing" in str(warning.message) for warning in seen)
    assert hook.stats()["compressed_steps"] == 6
    return waits


@pytest.mark.parametrize("batch_shapes", [False, True])
def test_the_host_never_waits(run_ranks: Any, batch_shapes: bool) -> None:
    assert run_ranks(_waits_with_a_scaler, batch_shapes, world_size=1) == [0]
