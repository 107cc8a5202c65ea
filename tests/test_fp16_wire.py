"""fp16 on the wire under a GradScaler's first scale: clamped and fed back, never an overflow of the hook's own."""

from typing import Any

import torch
import torch.distributed as dist
from models import all_finite, mlp
from torch.nn.parallel import DistributedDataParallel

import commhooks

SCALE, STEPS, FP16_MAX = 65536.0, 500, 65504.0


def _train(bucket_cap_mb: float) -> dict[str, Any]:
    torch.manual_seed(0)
    # Without biases: those travel uncompressed, and beyond fp16's range they overflow as in plain fp16 compression.
    ddp = DistributedDataParallel(mlp(32, 3, bias=False), bucket_cap_mb=bucket_cap_mb)
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0}
    hook = commhooks.attach(ddp, "powerSGD", hook_options=options, wrapper="fp16")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(dist.get_rank())
    teacher = torch.randn(32, 32, generator=torch.Generator().manual_seed(99))
    losses, largest, finite = [], 0.0, True
    for _ in range(STEPS):
        inputs = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(inputs) - torch.tanh(inputs @ teacher)).square().sum() / 16
        (loss * SCALE).backward()
        finite &= all_finite(p.grad for p in ddp.parameters())
        largest = max(largest, max(float(p.grad.norm()) for p in ddp.parameters()))
        for p in ddp.parameters():
            p.grad.div_(SCALE)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "largest": largest, "finite": finite, "stats": hook.stats()}


def test_scaled_gradients_stay_finite_and_train(run_ranks):
    for each in run_ranks(_train, 0.001):
        assert each["finite"]
        assert each["stats"]["nonfinite_steps"] == 0
        assert each["stats"]["compressed_steps"] == STEPS
        assert each["largest"] > 4 * FP16_MAX, "the case is about numbers that fp16 cannot hold"
        assert each["stats"]["bytes_sent"] < each["stats"]["bytes_uncompressed"] / 6
        assert sum(each["losses"][-20:]) < 0.7 * sum(each["losses"][:20])
