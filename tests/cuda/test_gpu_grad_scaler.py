"""A real GradScaler skips an overflow and changes its scale, and the residuals follow it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from tests.cuda.late_answers import late_answers
from tests.cuda.places import MASKED, ON_CUDA, entered, world_size
from tests.support.training import SEVERAL_BUCKETS_MB, batch, flat, make_model

STEPS, OVERFLOW_AT, START, SCALE, GROWTH_INTERVAL = 10, 5, 2, 2.0**10, 3


def _train(place: str) -> dict[str, Any]:
    with entered(place) as here, late_answers():
        model = make_model().to(here.device)
        ddp = torch.nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=SEVERAL_BUCKETS_MB, process_group=here.group
        )
        scaler = torch.amp.GradScaler(
            here.device.type, init_scale=SCALE, growth_interval=GROWTH_INTERVAL
        )
        one = torch.ones((), device=here.device)
        config = commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=START)
        hook = commhooks.attach(ddp, config, loss_scale=lambda: scaler.scale(one))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        scales, moved = [], []
        for step in range(STEPS):
            images, labels = (tensor.to(here.device) for tensor in batch(step, dist.get_rank()))
            before = flat(model.parameters())
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(images), labels)
            if step == OVERFLOW_AT and dist.get_rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(not torch.equal(before, flat(model.parameters())))
        return {
            "scales": scales,
            "moved": moved,
            "weights": flat(model.parameters()).cpu(),
            "stats": hook.stats(),
            "scale of the residuals": hook.state_dict("per_rank")["loss_scale"],
        }


@pytest.mark.parametrize("place", [MASKED, *ON_CUDA])
def test_an_overflow_is_skipped_and_the_scale_recovers(run_ranks: Any, place: str) -> None:
    results = run_ranks(_train, place, world_size=world_size(place))
    for result in results:
        # Up after three good steps, down after the bad one.
        assert result["scales"] == [SCALE * factor for factor in (1, 1, 2, 2, 2, 1, 1, 1, 2, 2)]
        assert result["moved"] == [step != OVERFLOW_AT for step in range(STEPS)]
        assert result["stats"]["nonfinite_steps"] == 1
        assert result["stats"]["compressed_steps"] == STEPS - START - 1
        assert result["scale of the residuals"] == result["scales"][-2]
        assert result["weights"].isfinite().all()
        assert torch.equal(result["weights"], results[0]["weights"])
