"""`benchmarks/local_steps.py`: simulated ranks train as real ranks do, and stored runs are read."""

import json
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.repository import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
from common import setting_from  # noqa: E402
from local_steps import (  # noqa: E402
    Setting,
    cell_of_best,
    optimizers_of,
    row_of,
    train_ranks,
)

STEPS = 8


class Teacher:
    """Learn what another network computes."""

    size = 16

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(self.size, 12, generator=generator)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch), batch[:, :3].sin() * batch[:, 3:6])

    def result(self, model: nn.Module, steps: int) -> dict[str, float]:
        return {}


def _weights_of_real_ranks(words: str, hook: commhooks.DiLoCo) -> torch.Tensor:
    task = Teacher()
    torch.manual_seed(0)
    model = task.model()
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=0.001)  # several buckets
    attached = commhooks.attach(ddp_model, hook)
    # the hook itself multiplies the learning rate
    setting = setting_from(f"{words} inner=1", Setting)
    [(optimizer, schedule)] = optimizers_of(model, setting, STEPS, 2)
    batches = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        part = task.batch(batches).chunk(2)[dist.get_rank()]
        task.loss(ddp_model, part).backward()
        nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        schedule.step()
    attached.synchronize()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("words", "hook"),
    [
        ("every=3 inner=2 wire=int4", commhooks.DiLoCo(sync_every=3, lr_factor=2)),
        (
            "every=4 momentum=0.5 outer_lr=0.7",
            commhooks.DiLoCo(sync_every=4, outer_momentum=0.5, outer_lr=0.7, wire="float32"),
        ),
        (
            "every=3 start=2 wire=int4",
            commhooks.DiLoCo(sync_every=3, start_iter=2, lr_factor=1),
        ),
    ],
)
def test_simulated_ranks_train_as_real_ones(run_ranks, words, hook):
    setting = setting_from(f"task=digits {words}", Setting)
    simulated = train_ranks(setting, Teacher(), seed=0, count=2, steps=STEPS).ranks.models[0]
    expected = torch.cat([p.detach().flatten() for p in simulated.parameters()])
    for weights in run_ranks(_weights_of_real_ranks, f"task=digits {words}", hook):
        assert torch.equal(weights, expected)


def _stored(name: str) -> list[dict[str, Any]]:
    lines = (REPOSITORY / "docs/figures" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", ["local_steps.jsonl", "diloco_ranks.jsonl"])
def test_stored_runs_have_settings_that_exist(name: str) -> None:
    runs = _stored(name)
    assert runs and all(setting_from(run["setting"], Setting) for run in runs)


def test_the_page_prints_what_tuned_runs_have_shown() -> None:
    stored = _stored("diloco_ranks.jsonl")
    settings = {frozenset(run["setting"].split()): run["setting"] for run in stored}
    page = (REPOSITORY / "docs/diloco.md").read_text("utf-8")
    section = page.partition("### A learning rate that was tuned for plain DDP")[2]
    lines = [line for line in section.partition("\n#")[0].splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    printed = 0
    for ranks, steps, setting, *cells in rows:
        runs = [run for run in stored if run["steps"] == int(steps.replace(",", ""))]
        options = setting.partition("`")[2].partition("`")[0].split()
        for every, cell in zip(header[3:], cells, strict=True):
            common = {"task=small", "wire=int4", f"every={every.split()[1]}"}
            if not any(option.startswith("sequences=") for option in options):
                common.add("sequences=8")
            words = settings.get(frozenset({*options, *common}))
            row = row_of(words, int(ranks), runs) if words else None
            assert cell == (cell_of_best(row) if row else "")
            printed += row is not None
    assert printed > 10
