"""What a resume takes over and what it leaves out. That it is bit-equal: test_every_compressor.py, with every hook."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.training import Run

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}


def _sizes(save_residual: str) -> tuple[int, int, str]:
    """Bytes of the residuals that this rank saves, and what the plan says of all."""
    run = Run.new(hook_options=OPTIONS, save_residual=save_residual).train(3)
    residuals = [entry["residual"] for entry in run.save()["hook"]["parameters"].values()]
    tensors = [each[0] if isinstance(each, list) else each for each in residuals if each is not None]
    plan = run.hook.plan()
    with mock.patch("commhooks.plan.NAMED_SAVE_BYTES", 1):
        return sum(each.nbytes for each in tensors), plan.saved_residuals, f"{plan}{plan.summary()}"


@pytest.mark.parametrize("save_residual", ["per_rank", "mean", "drop"])
def test_the_plan_names_the_bytes_of_residuals_in_a_checkpoint(run_ranks: Any, save_residual: str) -> None:
    ranks = run_ranks(_sizes, save_residual)
    written = sum(size for size, *_ in ranks) if save_residual == "per_rank" else ranks[0][0]
    for _, planned, text in ranks:
        assert planned == written and bool(written) == (save_residual != "drop")
        assert ("Residuals in a checkpoint of all ranks: " in text) == bool(written)
        assert ("0.0 GB of residuals in a checkpoint of all ranks" in text) == bool(written)


def _one_file_of_rank_0() -> dict[str, Any]:
    saved = Run.new(hook_options=OPTIONS).train(4).save()
    box = [saved]
    dist.broadcast_object_list(box, 0)
    run = Run.new(hook_options=OPTIONS).load(box[0])
    step = run.hook.stats()["step"]
    return {"weights": run.train(2).weights(), "step": step, "started_from": box[0]["hook"]["residual_ranks"]}


def test_the_residual_of_another_rank_is_never_used(run_ranks: Any) -> None:
    """Only rank 0 has saved: all ranks start from residuals of zero, and replicas stay equal."""
    results = run_ranks(_one_file_of_rank_0)
    assert results[0]["started_from"] == [0]
    assert results[0]["step"] == results[1]["step"] == 4
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    dropped = run_ranks(_without_residuals)
    assert torch.equal(results[0]["weights"], dropped[0])


def _without_residuals() -> torch.Tensor:
    saved = Run.new(hook_options=OPTIONS).train(4).save(residual="drop")
    return Run.new(hook_options=OPTIONS).load(saved).train(2).weights()


def _rewind() -> tuple[torch.Tensor, torch.Tensor, int]:
    """A state loaded into a hook that has run already, as the learning-rate finder does."""
    saved = Run.new(hook_options=OPTIONS).train(4).save()
    other = Run.new(hook_options=OPTIONS | {"start_powerSGD_iter": 900}).train(2)
    handshakes = other.hook.stats()["handshakes"]
    other.load(saved).train(2)
    straight = Run.new(hook_options=OPTIONS).train(6)
    return other.weights(), straight.weights(), other.hook.stats()["handshakes"] - handshakes


def test_loading_into_a_running_hook(run_ranks: Any) -> None:
    for rewound, straight, handshakes in run_ranks(_rewind):
        assert torch.equal(rewound, straight)
        assert handshakes == 1
