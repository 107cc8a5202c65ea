"""The replicas of each pipeline stage average over a group of their own, with a hook."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import commhooks

WIDTH, SAMPLES, MICRO_BATCHES, STEPS = 24, 8, 2, 8
OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}


def _stages() -> list[nn.Module]:
    torch.manual_seed(5)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
    ]


def _batch(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return tuple(torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def _wrapped(
    module: nn.Module, group: dist.ProcessGroup
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    # In a pipeline DDP must not rebuild its buckets (torch 2.13, with and without a hook).
    ddp = DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=0.001, find_unused_parameters=True
    )
    return ddp, torch.optim.SGD(module.parameters(), lr=0.05)


def _attach(ddp: DistributedDataParallel) -> commhooks.CommHook:
    """Count from the second step: in the first, DDP averages the first micro-batch twice."""
    return commhooks.attach(ddp, "powerSGD", hook_options=OPTIONS)


def _pipelined() -> dict[str, Any]:
    """This rank's stage after some steps. Ranks 0 and 1 are the stages of the first replica, 2 and
    3 of the second.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pipeline"))
    replica, place = mesh.get_coordinate() or (0, 0)
    module = _stages()[place]
    ddp, optimizer = _wrapped(module, mesh.get_group("replicate"))
    stage = PipelineStage(ddp, place, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.MSELoss())
    for step in range(STEPS):
        x, y = _batch(replica, step)
        optimizer.zero_grad()
        if place == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        optimizer.step()
        if step == 0:
            hook = _attach(ddp)
    return {
        "stage": place,
        "weights": [p.detach().clone() for p in module.parameters()],
        "stats": hook.stats(),
    }


def _plain() -> list[list[torch.Tensor]]:
    """Both stages on each of two ranks, one after the other."""
    assert dist.group.WORLD is not None
    made = [_wrapped(module, dist.group.WORLD) for module in _stages()]
    for step in range(STEPS):
        x, y = _batch(dist.get_rank(), step)
        for _, optimizer in made:
            optimizer.zero_grad()
        nn.functional.mse_loss(made[1][0](made[0][0](x)), y).backward()
        for ddp, optimizer in made:
            optimizer.step()
            if step == 0:
                _attach(ddp)
    return [[p.detach().clone() for p in ddp.module.parameters()] for ddp, _ in made]


def test_stages_of_a_pipeline_train_as_the_whole_model(run_ranks: Any) -> None:
    ranks = run_ranks(_pipelined, world_size=4)
    expected = run_ranks(_plain, world_size=2)[0]
    for rank in ranks:
        # Once per step, not once per micro-batch.
        assert (
            rank["stats"]["backward_passes"] == STEPS - 1
            and rank["stats"]["compressed_steps"] == STEPS - 3
        )
        for got, wanted in zip(rank["weights"], expected[rank["stage"]], strict=True):
            assert torch.allclose(got, wanted, rtol=0, atol=1e-6)
    for first, second in ((0, 2), (1, 3)):
        assert all(map(torch.equal, ranks[first]["weights"], ranks[second]["weights"]))
    assert not all(map(torch.equal, ranks[0]["weights"], ranks[1]["weights"]))
