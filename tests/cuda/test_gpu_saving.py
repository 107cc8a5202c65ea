"""A GPU's state is saved and loaded whole, also from another thread, with late answers."""

import threading
import time
from typing import Any

import pytest
import torch

from commhooks import PowerSGD
from tests.cuda.late_answers import late_answers
from tests.cuda.places import MASKED, ON_CUDA, entered, same, world_size
from tests.support.training import Run, make_model

CONFIG = PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=2)
# so that loading must do the work
WRONG = PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=900)
STEPS = 8


def _new(here: Any, config: PowerSGD = CONFIG) -> Run:
    return Run.new(make_model().to(here.device), hook=config, ddp={"process_group": here.group})


def _resumed(place: str, residual: str) -> dict[str, Any]:
    with entered(place) as here, late_answers():
        straight = _new(here).train(5)
        saved = straight.save(residual=residual)
        straight.train(3)
        again = _new(here, WRONG).train(1).load(saved).train(3)
        return {
            "straight": straight.weights().cpu(),
            "again": again.weights().cpu(),
            "on CPU": not _learned(saved["hook"]).is_cuda,
            "stats": again.hook.stats(),
        }


@pytest.mark.parametrize("residual", ["per_rank", "mean"])
@pytest.mark.parametrize("place", [MASKED, *ON_CUDA])
def test_a_resume_is_bit_equal(run_ranks: Any, place: str, residual: str) -> None:
    for result in run_ranks(_resumed, place, residual, world_size=world_size(place)):
        assert result["on CPU"] and result["stats"]["step"] == STEPS
        assert same(place, result["again"], result["straight"])


def _learned(payload: dict[str, Any]) -> torch.Tensor:
    """Everything learned that a payload holds, as one vector."""
    entries = payload["parameters"].values()
    # nothing before compression begins
    tensors = [
        torch.zeros(0),
        *(entry["q"] for entry in entries),
    ]
    tensors += [
        entry["residual"][0] if isinstance(entry["residual"], list) else entry["residual"]
        for entry in entries
    ]
    return torch.cat([tensor.double().flatten() for tensor in tensors if tensor is not None])


def _saving_thread(place: str) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return the steps that a thread saved during training, beside those of a run without it."""
    with entered(place) as here, late_answers():
        plain = _new(here)
        expected = []
        for _ in range(STEPS):
            expected.append(_learned(plain.train(1).hook.state_dict("per_rank")))
        run = _new(here).train(3)
        saved = []
        over = threading.Event()

        def save() -> None:
            while not over.is_set():
                saved.append(run.hook.state_dict("per_rank"))

        saver = threading.Thread(target=save)
        saver.start()
        try:
            for _ in range(STEPS - 3):
                run.train(1)
                begun = len(saved)
                # one that has begun after this step
                while len(saved) < begun + 2 and saver.is_alive():
                    time.sleep(0.001)
        finally:
            over.set()
            saver.join()
        return [
            (payload["step"], _learned(payload), expected[payload["step"] - 1]) for payload in saved
        ]


@pytest.mark.parametrize("place", ON_CUDA)
def test_a_thread_that_saves_never_mixes_two_steps(run_ranks: Any, place: str) -> None:
    for comparisons in run_ranks(_saving_thread, place, world_size=world_size(place)):
        assert {step for step, _, _ in comparisons} >= set(range(4, STEPS + 1))
        for step, saved, expected in comparisons:
            assert saved.numel() and same(place, saved, expected), step
