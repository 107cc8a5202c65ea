"""`with_residual` and `keep_residual`, from which a compressor of one's own gets error feedback.

Twice each: as on the CPU, where the verdict is a bool, and as on an accelerator, where masks decide.
"""

from typing import Any

import pytest
import torch

import commhooks
from commhooks.compressors.base import StepInfo
from commhooks.gradients.layout import Slot
from tests.support.ddp_steps import process_group_of_one
from tests.support.inside import session_of
from tests.support.models import SHAPES, backward, masks, random_gradients, same_bits, wrap

NAN_AT = 3
# By powers of two, so that scaling rounds nothing; another one in the step that is not finite, as a GradScaler has it.
SCALES = [1024.0, 1024.0, 2048.0, 4096.0, 512.0, 512.0, 1.0]


def _train(scales: list[float], masked: bool, nan_at: int | None = NAN_AT) -> list[list[torch.Tensor]]:
    """Gradients of all steps, and the residuals after the last one, as if the loss had not been scaled."""
    found, step = [], 0
    with masks(masked), process_group_of_one():
        ddp = wrap(SHAPES)
        options = {"share": 0.3, "start_iter": 0}
        hook = commhooks.attach(
            ddp, "examples.random_k:RandomKCompressor", hook_options=options, loss_scale=lambda: scales[step]
        )
        for step, scale in enumerate(scales):
            gradients = {name: each * scale for name, each in random_gradients(SHAPES, 0, step).items()}
            if step == nan_at:
                gradients["wide"][0, 0] = float("nan")
            found.append([each / scale for each in backward(ddp, gradients).values()])
        assert hook.stats()["nonfinite_steps"] == (nan_at is not None)
        state = session_of(hook).state
        found.append([residual / scales[-1] for _, residual in sorted(state["residual"].items())])
    return found


@pytest.mark.parametrize("masked", [False, True])
def test_a_changing_loss_scale_changes_no_bit(masked: bool) -> None:
    plain, scaled = _train([1.0] * len(SCALES), masked), _train(SCALES, masked)
    assert len(plain[-1]) > 3 and all(bool(residual.any()) for residual in plain[-1])
    for step, (one, other) in enumerate(zip(plain, scaled, strict=True)):
        assert all(map(same_bits, one, other)), step


def test_both_verdicts_keep_the_same() -> None:
    for one, other in zip(_train(SCALES, False), _train(SCALES, True), strict=True):
        assert all(map(same_bits, one, other))


@pytest.mark.parametrize("good", [True, False, torch.tensor(True), torch.tensor(False)])
@pytest.mark.parametrize("known", [True, False])
def test_a_residual_is_kept_where_the_step_is_good(good: Any, known: bool) -> None:
    slot = Slot("w", torch.zeros(2, 2), 1, 4)
    state = {"residual": {"w": torch.full((4,), 3.0)} if known else {}}
    step = StepInfo(5, 2, residual_factor=0.5)
    flat = torch.arange(6.0)
    delta = commhooks.with_residual(slot, flat, state, step)
    assert torch.equal(delta, torch.arange(1.0, 5.0) + (1.5 if known else 0.0))
    assert torch.equal(flat, torch.arange(6.0)), "the gradient itself stays as it is"
    left = torch.full((4,), 7.0)
    commhooks.keep_residual(slot, left, good, state)
    # The loss scale of a bad step is not taken, so the old residual keeps its own.
    expected = left if bool(good) else torch.full((4,), 3.0 if known else 0.0)
    if not known and good is False:
        assert not state["residual"]
    else:
        assert torch.equal(state["residual"]["w"], expected)
