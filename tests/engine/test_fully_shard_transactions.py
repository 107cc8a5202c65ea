"""A non-finite number on any rank changes nothing on all ranks, whatever their shards."""

from typing import Any

import pytest
import torch.distributed as dist

from commhooks import HookRunError
from tests.support.inside import session_of
from tests.support.models import bits_equal
from tests.support.sharded import POWERSGD, attached, backward, learned, random_gradients

STEPS = 4
BAD = {
    1: (0, "even.weight", 0, float("nan")),  # in the first shard
    2: (3, "even.weight", -1, float("inf")),  # in the last one
    3: (1, "tiny.bias", 0, float("-inf")),  # the second shard of it is empty
}
"""Step -> the rank, parameter and element of a number in a bad step before it."""


def _run() -> dict[str, Any]:
    """A clean run, and one with bad steps in between."""
    (clean_model, clean_hook), (model, hook) = (
        attached(2, 2, "powerSGD", hook_options=POWERSGD) for _ in range(2)
    )
    kept, told, same = [], [], []
    for step in range(STEPS):
        if step in BAD:
            rank, name, element, number = BAD[step]
            gradients = random_gradients(1000)
            if dist.get_rank() == rank:
                gradients[name].view(-1)[element] = number
            before = learned(hook)
            bad = backward(model, gradients)
            after = learned(hook)
            assert (after.pop("nonfinite") - before.pop("nonfinite")).item() == 1
            kept.append(bits_equal(before, after))
            told.append(not all(bool(gradient.isfinite().all()) for gradient in bad.values()))
        same.append(
            bits_equal(
                backward(model, random_gradients(step)),
                backward(clean_model, random_gradients(step)),
            )
        )
    clean, mine = learned(clean_hook), learned(hook)
    assert clean.pop("nonfinite") == 0 and mine.pop("nonfinite") == len(BAD)
    stats = hook.stats()
    assert stats["compressed_steps"] == STEPS - 1 and stats["nonfinite_steps"] == len(BAD)
    assert any(key.startswith("residual") for key in mine)
    return {"kept": kept, "told": told, "as if skipped": [*same, bits_equal(clean, mine)]}


def test_a_bad_step_changes_nothing_anywhere(run_ranks: Any) -> None:
    for outcome in run_ranks(_run, world_size=4):
        assert all(map(all, outcome.values())), outcome


def _different_steps() -> str:
    """Let the step differ between shards but not between the ranks that average."""
    model, hook = attached(2, 2, hook_options=POWERSGD)
    session_of(hook).state.step = dist.get_rank() % 2
    with pytest.raises(HookRunError) as error:
        backward(model, random_gradients(0))
    return str(error.value)


def test_ranks_with_different_shards_are_at_one_step(run_ranks: Any) -> None:
    for message in run_ranks(_different_steps, world_size=4):
        assert message.startswith("the ranks are at different steps of the hook: ")
        assert "rank 0: 0, rank 1: 1 of the sharding group. Load" in message


def _one_replica_group_disagrees() -> str:
    """Ranks 0 and 2 average the first shards: they disagree. The others learn of it."""
    model, hook = attached(2, 2, hook_options=POWERSGD)
    session_of(hook).state.step = int(dist.get_rank() == 2)
    with pytest.raises(HookRunError) as error:
        backward(model, random_gradients(0))
    return str(error.value)


def test_a_disagreement_of_some_is_an_error_on_all(run_ranks: Any) -> None:
    messages = run_ranks(_one_replica_group_disagrees, world_size=4)
    for rank, message in enumerate(messages):
        if rank % 2 == 0:
            assert "different steps of the hook" in message
        else:
            assert "ranks that hold other shards of the model have failed: ranks [0]" in message


def _loss_scale() -> list[float]:
    """The residual follows the scale: gradients and scale doubled give the doubled result."""
    scale = [1.0]
    options = POWERSGD | {"start_powerSGD_iter": 0}
    model, _ = attached(2, 2, hook_options=options, loss_scale=lambda: scale[0])
    plain, _ = attached(2, 2, hook_options=options)
    errors = []
    for step in range(3):
        scale[0] = 4.0 if step >= 1 else 1.0
        scaled = {name: scale[0] * gradient for name, gradient in random_gradients(step).items()}
        got, expected = backward(model, scaled), backward(plain, random_gradients(step))
        errors += [float((got[name] / scale[0] - expected[name]).abs().max()) for name in got]
    return errors


def test_residuals_follow_the_loss_scale(run_ranks: Any) -> None:
    assert max(max(errors) for errors in run_ranks(_loss_scale, world_size=4)) < 1e-12
