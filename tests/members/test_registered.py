"""What a machine takes over from the one that has done most steps, beside the weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import commhooks
from commhooks.local_steps.common_state import CommonState
from commhooks.members.registered import Registered


class _Training:
    """A model of one weight with a scheduler, whose learning rate depends on the rate before."""

    def __init__(self, steps: int) -> None:
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.1)
        self.registered = Registered()
        self.registered.add("scheduler", self.scheduler.state_dict, self.scheduler.load_state_dict)
        self.registered.add("object", object, lambda value: None)  # which cannot be sent
        events: Any = SimpleNamespace(known=lambda: [self.optimizer])
        self.registered.bind(CommonState(None, events, None, None))  # type: ignore[arg-type]
        for _ in range(steps):
            self.step()

    def step(self) -> float:
        self.optimizer.step()
        self.scheduler.step()
        return self.scheduler.get_last_lr()[0]


def test_a_machine_takes_over_progress_with_the_learning_rate() -> None:
    """The slow machine has skipped the step at which the learning rate falls."""
    slow, fast = _Training(1), _Training(4)
    slow.registered.take_progress(fast.registered.progress())
    assert slow.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    rates = [(slow.step(), fast.step()) for _ in range(3)]
    assert all(rate == expected for rate, expected in rates)
    assert rates[-1][0] == pytest.approx(0.01)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(commhooks.HookConfigError, match="the name is registered already"):
        _Training(0).registered.add("scheduler", dict, print)
