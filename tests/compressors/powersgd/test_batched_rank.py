"""A saved state of batched PowerSGD goes on at another rank, which is found out when its buckets come."""

import pytest
import torch
from torch import nn

import commhooks
from tests.support.ddp_steps import backward, process_group_of_one, wrap
from tests.support.inside import session_of


def _hooked(rank: int) -> tuple[nn.Module, commhooks.CommHook]:
    ddp = wrap(nn.Linear(24, 48), bucket_cap_mb=25)
    options = {"start_powerSGD_iter": 0, "matrix_approximation_rank": rank}
    return ddp, commhooks.attach(ddp, "batched_powerSGD", hook_options=options)


def _not_finite(ddp: nn.Module) -> None:
    ddp.zero_grad()
    ddp(torch.full((2, 24), float("nan"))).sum().backward()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (2, 2)])
def test_the_rows_that_both_ranks_have_are_kept(before: int, after: int) -> None:
    with process_group_of_one():
        ddp, hook = _hooked(before)
        for step in range(3):
            backward(ddp, step)
        saved = hook.state_dict()
        ((name, old),) = saved["batched_q"].items()
        new_ddp, new_hook = _hooked(after)
        backward(new_ddp, 0)
        new_hook.load_state_dict(saved)
        _not_finite(new_ddp)  # which leaves Q as it was fitted
        q = session_of(new_hook).state["q"][name]
        assert q.shape == (after, old.shape[1]) and bool(q.any(dim=1).all())
        rows = min(before, after)
        assert torch.equal(q[:rows], old[:rows])
        backward(new_ddp, 3)
        assert new_hook.stats()["nonfinite_steps"] == 1 and new_hook.stats()["step"] == 4
