"""A resumed run meets the same batches if Accelerate is told what these tests show."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from accelerate_commhooks import CommHookKwargs
from tests.support.accelerators import launched

EPOCHS = 3
SKIPPED = 2
"""Batches of the second epoch before the save in its middle."""


@launched
def _weights(
    hook: str | None, seedable: bool, sets_epoch: bool, folder: str, middle: bool, resumes: bool
) -> Any:
    """Train three epochs and save in the second, or resume from what was saved."""
    set_seed(0)
    order = DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = Accelerator(kwargs_handlers=[CommHookKwargs(hook=hook)], dataloader_config=order)
    numbers = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(64, 16, generator=numbers), torch.randn(64, 4, generator=numbers)
    )
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumes:
        accelerator.load_state(folder)
    for epoch in range(int(resumes), EPOCHS):
        skipped = SKIPPED if epoch == 1 and middle and resumes else 0
        batches: Any = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        if sets_epoch:
            batches.set_epoch(epoch)
        if epoch == 1 and not resumes and not middle:
            accelerator.save_state(folder)
        for number, (inputs, targets) in enumerate(batches, start=skipped + 1):
            optimizer.zero_grad()
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.step()
            if epoch == 1 and middle and not resumes and number == SKIPPED:
                accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("hook", [None, "int8_compress"])
@pytest.mark.parametrize("middle", [False, True])
def test_a_resumed_run_is_bit_equal_with_a_seedable_sampler_and_set_epoch(
    run_ranks: Any, tmp_path: Path, hook: str | None, middle: bool
) -> None:
    """At the end of an epoch, too, and without a hook: otherwise Accelerate shuffles the next epoch
    differently. Should it restore the order by itself some day, docs/accelerate.md and
    docs/resume.md may ask for less.
    """
    for seedable, sets_epoch in ((True, True), (True, False), (False, True)):
        folder = str(tmp_path / f"{seedable}{sets_epoch}")
        arguments = (hook, seedable, sets_epoch, folder, middle)
        whole = run_ranks(_weights, *arguments, False)[0]
        resumed = run_ranks(_weights, *arguments, True)[0]
        equal = all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
        assert equal is (seedable and sets_epoch), f"seedable {seedable}, set_epoch {sets_epoch}"
