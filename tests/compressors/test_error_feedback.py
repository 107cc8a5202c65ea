"""`with_residual` and `keep_residual`, from which a compressor of one's own gets error feedback:
with a bool for the verdict, as on the CPU, and with a tensor, as on an accelerator. And residuals
as views of one tensor.
"""

from typing import Any

import pytest
import torch

import commhooks
from commhooks.compressors.base import StepInfo
from commhooks.compressors.error_feedback import NamedViews
from commhooks.gradients.layout import Slot


@pytest.mark.parametrize("good", [True, False, torch.tensor(True), torch.tensor(False)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_a_residual_is_kept_where_the_step_is_good(good: Any, has_residual: bool) -> None:
    slot = Slot("w", torch.zeros(2, 2), 1, 4)
    state = {"residual": {"w": torch.full((4,), 3.0)} if has_residual else {}}
    step = StepInfo(5, 2, residual_factor=0.5)
    flat = torch.arange(6.0)
    delta = commhooks.with_residual(slot, flat, state, step)
    assert torch.equal(delta, torch.arange(1.0, 5.0) + (1.5 if has_residual else 0.0))
    assert torch.equal(flat, torch.arange(6.0)), "the gradient itself stays as it is"
    left = torch.full((4,), 7.0)
    commhooks.keep_residual(slot, left, good, state)
    # The loss scale of a bad step is not taken, so the old residual keeps its own.
    expected = left if bool(good) else torch.full((4,), 3.0 if has_residual else 0.0)
    if not has_residual and good is False:
        assert not state["residual"]
    else:
        assert torch.equal(state["residual"]["w"], expected)


def test_views_follow_a_dict() -> None:
    slices = NamedViews([("a", 0, (2,)), ("b", 2, (1, 2))], torch.zeros(4))
    entries = {"a": torch.tensor([1.0, 2.0]), "other": torch.zeros(3)}
    residual = entries["a"]
    assert slices.gather(entries).tolist() == [1, 2, 0, 0] and entries["a"] is residual
    whole = slices.bind(entries)
    assert sorted(entries) == ["a", "b", "other"] and entries["a"] is not residual
    whole[2:] = 7
    assert entries["b"].tolist() == [[7, 7]]
    entries["b"] = torch.tensor([[8.0, 9.0]])  # as a load does
    del entries["a"]  # as losing it does
    assert slices.gather(entries).tolist() == [0, 0, 8, 9]
