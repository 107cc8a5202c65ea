"""Resumed in the middle of an epoch, a loop as users write it ends bit for bit as the one that was not interrupted.

Batches in random order, two of them accumulated per step, a scheduler, several buckets. New processes are part of the
demo (tests/project/test_accelerate_demo.py).
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from tests.support.accelerators import WRONG, launched, new_accelerator, power_sgd
from tests.support.training import flat, make_model, residuals

STEPS, STEPS_PER_EPOCH, SAVE_AT, ACCUMULATED = 13, 6, 8, 2


@launched
def _train(folder: Path, resume: bool) -> dict[str, Any]:
    set_seed(5)
    handler = power_sgd(WRONG) if resume else power_sgd()
    # Without a seedable sampler the order of batches in the middle of an epoch does not come back, hook or not.
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = new_accelerator(handler, gradient_accumulation_steps=ACCUMULATED, dataloader_config=loading)
    images = torch.randn(STEPS_PER_EPOCH * ACCUMULATED * 2 * 4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(images, images.mean(dim=(1, 2, 3)).mul(40).long() % 10)
    optimizer = torch.optim.SGD((net := make_model()).parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    model, optimizer, scheduler, loader = accelerator.prepare(
        net, optimizer, scheduler, DataLoader(data, batch_size=4, shuffle=True)
    )
    step = 0
    if resume:
        accelerator.load_state(str(folder))
        step = SAVE_AT
    losses = []
    while step < STEPS:
        epoch, done = divmod(step, STEPS_PER_EPOCH)
        loader.set_epoch(epoch)
        for images, labels in accelerator.skip_first_batches(loader, done * ACCUMULATED):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                step += 1
                if step == SAVE_AT and not resume:
                    accelerator.save_state(str(folder))
            if step == STEPS:
                break
    memory, stats = residuals(handler.attached), handler.attached.stats()
    return {"losses": losses, "weights": flat(model.parameters()), "residuals": memory, "stats": stats}


def test_resume_in_the_middle_of_an_epoch(run_ranks: Any, tmp_path: Path) -> None:
    through = run_ranks(_train, tmp_path, False)
    resumed = run_ranks(_train, tmp_path, True)
    for run, again in zip(through, resumed, strict=True):
        assert torch.equal(run["weights"], again["weights"]) and torch.equal(run["weights"], through[0]["weights"])
        assert again["losses"] == run["losses"][-(STEPS - SAVE_AT) * ACCUMULATED :]
        assert all(torch.equal(run["residuals"][name], again["residuals"][name]) for name in run["residuals"])
        assert all(residual.norm() > 0 for residual in run["residuals"].values()) and run["residuals"]
        assert again["stats"]["step"] == STEPS and again["stats"]["compressed_steps"] == STEPS - SAVE_AT
    assert through[0]["losses"] != through[1]["losses"]  # each rank has data of its own
