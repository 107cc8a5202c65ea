"""The doctor on a GPU: what it measures, and that it leaves everything as it was."""

import inspect
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.ddp_steps import wrap
from tests.support.doctor_models import Net

GRADIENT_BYTES = 4 * sum(parameter.numel() for parameter in Net().parameters())


def _loss(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.randn(8, 24, device="cuda")).square().mean()


def _allocated() -> int:
    """Bytes of tensors. cuBLAS keeps up to 32 MiB of its own per stream, which would hide a copy of the model."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # private, torch 2.11 to 2.13: there is no public one
    return torch.cuda.memory_allocated()


def _consulted() -> dict[str, Any]:
    ddp = wrap(Net().cuda())
    _loss(ddp).backward()
    torch.cuda.synchronize()

    def everything() -> list[torch.Tensor]:
        gradients = [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        return [torch.get_rng_state(), torch.cuda.get_rng_state(), *gradients]

    before, memory = everything(), _allocated()
    report = commhooks.doctor(ddp, _loss, steps=3)
    grown = _allocated() - memory
    return {
        "unchanged": all(map(torch.equal, before, everything())),
        "grown": grown,
        "report": report.as_dict(),
        "text": str(report),
    }


@pytest.mark.cuda
def test_the_doctor_on_a_gpu(run_ranks: Any) -> None:
    pytest.importorskip("omegaconf", reason="the doctor checks its options with it")
    pytest.importorskip("rich", reason="the doctor prints its table with it")
    if "batched_grad_copy" not in inspect.signature(DistributedDataParallel).parameters:
        pytest.skip("the doctor copies a model with all of DDP's arguments, of which torch before 2.13 lacks some")
    ranks = run_ranks(_consulted)
    assert ranks[0]["report"] == ranks[1]["report"] and ranks[0]["text"] == ranks[1]["text"]
    for rank in ranks:
        assert rank["unchanged"]
        assert rank["grown"] <= GRADIENT_BYTES + 2**16  # nothing of the copies, whatever the allocator rounds
        for label, each in rank["report"]["candidates"].items():
            assert len(each["step_ms"]) == 3, label
        assert 0 < rank["report"]["candidates"]["powerSGD rank 1"]["error"] < 1
