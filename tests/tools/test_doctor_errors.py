"""What the doctor refuses, on all ranks."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import DoctorError
from tests.support.ddp_steps import backward, batch, descend, mlp, process_group_of_one, wrap
from tests.support.doctor_models import loss_of
from tests.support.workers import RanksFailed


def _wrong(case: str) -> None:
    ddp = wrap(mlp())
    backward(ddp, 0)
    before = [p.grad.clone() for p in ddp.parameters()]
    inputs = batch(1)

    def raises(model: nn.Module) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise KeyError("no such column")
        return model(inputs).mean()

    other = nn.Linear(24, 1)
    functions: dict[str, Any] = {
        "no argument": lambda: inputs.mean(),
        "dict": lambda model: {"loss": model(inputs).mean()},
        "shape": lambda model: model(inputs),
        "detached": lambda model: model(inputs).mean().detach(),
        "original": lambda model: ddp(inputs).mean(),
        "module": lambda model: ddp.module(inputs).mean(),
        "other model": lambda model: other(inputs).mean(),
        "raises": raises,
    }
    try:
        commhooks.doctor(ddp, functions[case], steps=1)
    finally:
        assert all(torch.equal(b, p.grad) for b, p in zip(before, ddp.parameters(), strict=True))
        backward(ddp, 1)  # goes on
        descend(ddp)


@pytest.mark.parametrize(
    "case, sentence",
    [
        ("no argument", "batch_fn cannot be called with one argument (too many positional arguments)"),
        ("dict", "batch_fn returned a dict. batch_fn(model) makes a batch, calls the model that it is given"),
        ("shape", "batch_fn returned a tensor of shape (8, 24)"),
        ("detached", "batch_fn returned a tensor without a gradient"),
        ("original", "batch_fn called your own model instead of the copy"),
        ("module", "batch_fn called your own model instead of the copy"),
        ("other model", "does not depend on the parameters of the model that it was given"),
    ],
)
def test_a_batch_fn_that_does_not_work(case: str, sentence: str, run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_wrong, case)
    assert sorted(failed.value.errors) == [0, 1]
    for error in failed.value.errors.values():
        assert error.type_name == "DoctorError" and sentence in error.message


def test_where_it_fails_on_one_rank_all_of_them_end(run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_wrong, "raises", timeout_s=20)
    texts = {rank: error.message for rank, error in failed.value.errors.items()}
    assert "raised KeyError: 'no such column' (" in texts[1] and "test_doctor_errors.py, line " in texts[1]
    assert texts[0].startswith("rank 1 cannot go on: batch_fn or the backward pass")


def test_what_cannot_be_measured() -> None:
    with process_group_of_one():
        ddp = wrap(mlp())
        with pytest.raises(DoctorError, match="one rank only: there is nothing to exchange"):
            commhooks.doctor(ddp, loss_of)
        with pytest.raises(
            DoctorError, match="expected a torch.nn.parallel.DistributedDataParallel model, got a torch"
        ):
            commhooks.doctor(mlp(), loss_of)  # type: ignore[arg-type]
    with pytest.raises(DoctorError, match="no process group: the doctor measures on the ranks"):
        commhooks.doctor(ddp, loss_of)


def _bad_arguments() -> None:
    ddp = wrap(mlp())
    for arguments, error, text in (
        ({"steps": 0}, DoctorError, "steps=0; expected a number of steps, 1 or more"),
        ({"steps": True}, DoctorError, "steps=True"),
        ({"seconds": 0}, DoctorError, "seconds=0; expected a positive number"),
        ({"powersgd_ranks": [0]}, commhooks.HookConfigError, "matrix_approximation_rank=0; expected at least 1"),
        ({"powersgd_options": {"exclud": []}}, commhooks.HookConfigError, "did you mean 'exclude'"),
        ({"powersgd_options": {"start_powerSGD_iter": 3}}, DoctorError, "is the doctor's own"),
    ):
        with pytest.raises(error) as raised:
            commhooks.doctor(ddp, loss_of, **arguments)  # type: ignore[arg-type]
        assert text in str(raised.value)
    half = DistributedDataParallel(mlp())
    half.mixed_precision = object()  # type: ignore[assignment]
    with pytest.raises(DoctorError, match="occupies the communication hook"):
        commhooks.doctor(half, loss_of)
    frozen = wrap(mlp())
    frozen.module.requires_grad_(False)
    with pytest.raises(DoctorError, match="every parameter of this model is frozen"):
        commhooks.doctor(frozen, loss_of)
    locked = wrap(mlp())
    locked.module.lock = open(os.devnull)  # noqa: SIM115
    with pytest.raises(DoctorError, match="the model cannot be copied.*TypeError"):
        commhooks.doctor(locked, loss_of)
    locked.module.lock.close()


def test_bad_arguments(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_bad_arguments)
