"""With a GradScaler and random overflows the scale recovers, and nobody drifts."""

import random
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.models import mlp
from tests.support.training import flat

WIDTH, STEPS, OVERFLOWS = 32, 80, 4
SCALE, GROWTH_INTERVAL = 2.0**16, 4
HALF_MAX = 65504.0


class OverflowsLikeFP16(torch.autograd.Function):
    """Do to a gradient what float16 activations do when the scale is too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.where(gradient.abs() > HALF_MAX, float("inf"), gradient)


def _overflows(parameters: int) -> dict[int, tuple[int, int, float]]:
    """Step -> (rank, which parameter, what)."""
    draw = random.Random(0)
    steps = draw.sample(range(STEPS - 20), OVERFLOWS)
    return {
        step: (
            draw.randrange(2),
            draw.randrange(parameters),
            draw.choice([float("inf"), float("-inf"), float("nan")]),
        )
        for step in steps
    }


def _train() -> dict[str, Any]:
    torch.manual_seed(0)
    model = mlp(WIDTH, 3)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWTH_INTERVAL)
    config = commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=5)
    hook = commhooks.attach(ddp, config, wrapper="fp16", loss_scale=scaler.get_scale)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)) / WIDTH**0.5
    generator = torch.Generator().manual_seed(dist.get_rank())
    parameters = list(model.parameters())
    overflows = _overflows(len(parameters))
    poison: list[float | None] = [None] * len(parameters)
    for place, parameter in enumerate(parameters):
        parameter.register_hook(
            lambda g, place=place: g if poison[place] is None else g + poison[place]
        )
    losses = []
    scales = []
    steps = []
    skipped = 0
    at_random = 0
    changed = []
    for step in range(STEPS):
        inputs = torch.randn(16, WIDTH, generator=generator)
        if step in overflows and overflows[step][0] == dist.get_rank():
            poison[overflows[step][1]] = overflows[step][2]
        optimizer.zero_grad()
        loss = (OverflowsLikeFP16.apply(ddp(inputs)) - torch.tanh(inputs @ teacher)).square().mean()
        scaler.scale(loss).backward()
        poison[:] = [None] * len(parameters)
        before = scaler.get_scale()
        weights = flat(parameters)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        skipped += scaler.get_scale() < before
        at_random += step in overflows and scaler.get_scale() < before
        if step in overflows:  # the skipped step left the weights alone
            changed.append(not torch.equal(weights, flat(parameters)))
        steps.append(flat(parameters))
    return {
        "losses": losses,
        "scales": scales,
        "skipped": skipped,
        "at random": at_random,
        "changed by a skipped step": any(changed),
        "weights": torch.stack(steps),
        "stats": hook.stats(),
        "scale of the residuals": hook.state_dict()["loss_scale"],
    }


def test_training_survives_overflows_at_random(run_ranks):
    ranks = run_ranks(_train)
    for outcome in ranks:
        stats, scales = outcome["stats"], outcome["scales"]
        assert outcome["at random"] == OVERFLOWS
        assert outcome["skipped"] >= OVERFLOWS + 2, "the growing scale itself has overflowed"
        assert stats["nonfinite_steps"] == outcome["skipped"]
        assert stats["step"] == STEPS - outcome["skipped"]
        assert stats["compressed_steps"] == stats["step"] - 5
        assert stats["collectives_last_pass"] == 6, "several buckets"
        assert stats["bytes_sent_last_pass"] < stats["bytes_uncompressed"] / STEPS / 2
        assert not outcome["changed by a skipped step"]
        # The scale neither falls for good nor stays down: it comes back to where its own growth
        # makes it overflow.
        assert min(scales) > 1 and max(scales[-20:]) >= max(scales) / 4
        assert outcome["scale of the residuals"] in scales[-2:]
        assert sum(outcome["losses"][-10:]) < 0.75 * sum(outcome["losses"][:10])
        assert torch.isfinite(outcome["weights"]).all()
    assert ranks[0]["scales"] == ranks[1]["scales"]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"]), "at every step"
