"""Saving and resuming `diloco` and `local_sgd`, in the middle of a round, too."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.local_steps import flat_weights
from tests.support.training import Run, batch, plain

SEVERAL = 1000  # bytes in a bucket of weights, so that there are several


@mock.patch.object(flat_weights, "BUFFER_BYTES", SEVERAL)
def _with_saves(
    config: commhooks.HookConfig, steps: int, saves: list[int], how: dict[str, Any]
) -> Any:
    """Weights at the end of a run that saves after these steps, and of one that also resumes there
    each time.
    """
    whole = Run.new(hook=config)
    resumed = Run.new(hook=config)
    contents = []
    for begin, end in zip([0, *saves], [*saves, steps], strict=True):
        whole.train(end - begin)
        resumed.train(end - begin)
        if end in saves:
            whole.save(**how)
            content = resumed.save(**how)
            of_rank_0 = [content]
            dist.broadcast_object_list(of_rank_0)
            content = of_rank_0[0] | {"hook": content["hook"]}  # as the frameworks save
            assert content["hook"]["loss_scale"] == 1.0, (
                "residuals of weights do not scale with the loss"
            )
            contents.append((content["hook"], plain(content["hook"])))
            resumed = Run.new(hook=config).load(content)
    for content, as_saved in contents:
        assert plain(content) == as_saved, "training has changed what was loaded"
    return whole.weights(), resumed.weights(), whole.gradients[-1], resumed.gradients[-1]


@pytest.mark.parametrize(
    ("config", "residual", "world_size"),
    [
        (commhooks.DiLoCo(sync_every=3, outer_lr=0.7, outer_momentum=0.5), "per_rank", 2),
        (commhooks.DiLoCo(sync_every=4, start_iter=2, wire="int8"), "mean", 3),
        (commhooks.LocalSGD(sync_every=3), "per_rank", 2),
        # One save is with the second fragment in flight.
        (commhooks.DiLoCo(sync_every=6, fragments=2, delay=2, outer_momentum=0.5), "mean", 2),
        (commhooks.DiLoCo(sync_every=6, fragments=2, delay=2, outer_momentum=0.5), "per_rank", 3),
    ],
    ids=["int4", "late", "local_sgd", "streaming", "streaming on 3"],
)
def test_a_run_that_resumes_in_mid_round_is_bit_equal(run_ranks, config, residual, world_size):
    found = run_ranks(
        _with_saves, config, 14, [2, 7, 9], {"residual": residual}, world_size=world_size
    )
    for whole, resumed, gradient, same in found:
        assert torch.equal(whole, resumed) and torch.equal(gradient, same)
    assert any(not torch.equal(each[0], found[0][0]) for each in found[1:])  # in mid-round


def _save_some(config: commhooks.HookConfig, steps: int) -> tuple[dict[str, Any], torch.Tensor]:
    run = Run.new(hook=config).train(steps)
    return run.save(residual="mean"), run.weights()


def _go_on(config: commhooks.HookConfig, content: dict[str, Any], steps: int) -> Any:
    """The weights before and after, and the loss on one batch before each step."""
    run = Run.new(hook=config).load(content)
    run.hook.synchronize()
    before, losses = run.weights(), []
    for _ in range(steps):
        images, labels = batch(0, 0)
        with torch.no_grad():
            losses.append(float(torch.nn.functional.cross_entropy(run.ddp.module(images), labels)))
        run.train(1)
    run.hook.synchronize()
    return before, run.weights(), losses


@pytest.mark.parametrize(("ranks", "later"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_resumes(run_ranks, ranks, later):
    """With the same weights, and a loss that falls as with the same number of ranks."""
    config = commhooks.DiLoCo(sync_every=3, outer_momentum=0.3)
    saved, weights = run_ranks(_save_some, config, 7, world_size=ranks)[0]
    expected = run_ranks(_go_on, config, saved, 4, world_size=ranks)[0][2]
    found = run_ranks(_go_on, config, saved, 4, world_size=later)
    for before, after, losses in found:
        assert torch.equal(before, weights) and torch.equal(after, found[0][1])
        assert not torch.equal(after, weights)
        assert losses[0] == expected[0] and losses == pytest.approx(expected, rel=0.1), (
            losses,
            expected,
        )


def _from_another_hook() -> tuple[str, int]:
    saved = Run.new(hook="int8_compress").train(2).save()
    with pytest.raises(commhooks.PayloadError) as error:
        Run.new(hook="diloco").load(saved)
    run = Run.new(hook="diloco").load(saved, strict=False).train(5)
    return str(error.value), run.hook.stats()["step"]


def test_the_state_of_another_hook_is_refused_or_left_out(run_ranks):
    for said, rounds in run_ranks(_from_another_hook):
        assert (
            "the saved state is of hook 'int8_compress', but this hook is 'diloco'. Attach the"
            " saved hook" in said
        )
        assert rounds == 1


def _alone(every: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    run = Run.new(hook="diloco", hook_options={"sync_every": every}).train(every)
    anchor = run.weights()
    run.hook.synchronize(optimizers=True)
    assert run.hook.state_dict(joint=False)["exact"] is True, (
        "nothing has been trained since all ranks were equal"
    )
    run.train(1)
    content = {"model": run.ddp.module.state_dict(), "hook": run.hook.state_dict(joint=False)}
    assert content["hook"]["exact"] is False
    resumed = Run.new(hook="diloco", hook_options={"sync_every": every})
    resumed.ddp.module.load_state_dict(content["model"])
    resumed.hook.load_state_dict(content["hook"])
    resumed.ddp(batch(0, 0)[0])
    return anchor, run.weights(), resumed.weights()


def test_a_save_on_one_rank_alone_holds_the_anchor(run_ranks):
    for anchor, own, resumed in run_ranks(_alone, 3):
        assert torch.equal(resumed, anchor) and not torch.equal(own, anchor)


def _saved_after_the_end(config: commhooks.HookConfig) -> tuple[bool, torch.Tensor]:
    run = Run.new(hook=config).train(5)
    run.hook.close()
    return run.hook.state_dict("mean")["exact"], run.weights()


@pytest.mark.parametrize("delay", [0, 3])
def test_a_save_after_the_end_ends_the_round(run_ranks, delay):
    """What was in flight at the end is dropped, and its steps are exchanged by the save."""
    found = run_ranks(_saved_after_the_end, commhooks.DiLoCo(sync_every=4, delay=delay))
    for exact, weights in found:
        assert exact and torch.equal(weights, found[0][1])
