"""Saving and resuming `diloco` and `local_sgd`, in the middle of a round, too."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import commhooks
from commhooks.local_steps import fragments
from tests.support.training import Run, batch, flat, plain

SEVERAL = 1000  # bytes in a bucket of weights, so that there are several


@mock.patch.object(fragments, "BUFFER_BYTES", SEVERAL)
def _with_saves(config: commhooks.HookConfig, steps: int, saves: list[int], how: dict[str, Any]) -> Any:
    """Weights at the end of a run that saves after these steps, and of one that also resumes there each time."""
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
            contents.append((content["hook"], plain(content["hook"])))
            resumed = Run.new(hook=config).load(content)
    for content, as_saved in contents:
        assert plain(content) == as_saved, "training has changed what was loaded"
    return whole.weights(), resumed.weights(), whole.gradients[-1], resumed.gradients[-1]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("residual", ["per_rank", "mean"])
@pytest.mark.parametrize(
    "config",
    [
        commhooks.DiLoCo(sync_every=3, outer_lr=0.7, outer_momentum=0.5),
        commhooks.DiLoCo(sync_every=4, start_iter=2, wire="int8"),
        commhooks.LocalSGD(sync_every=3),
        # One save is with the second part on its way.
        commhooks.DiLoCo(sync_every=6, fragments=2, delay=2, outer_momentum=0.5),
    ],
    ids=["int4", "late", "local_sgd", "streaming"],
)
def test_a_run_that_resumes_in_mid_round_goes_on_as_the_other(run_ranks, config, residual, world_size):
    found = run_ranks(_with_saves, config, 14, [2, 7, 9], {"residual": residual}, world_size=world_size)
    for whole, resumed, gradient, same in found:
        assert torch.equal(whole, resumed) and torch.equal(gradient, same)
    assert any(not torch.equal(each[0], found[0][0]) for each in found[1:])  # in mid-round


def _loss(run: Run) -> float:
    """On the same batch in all runs."""
    images, labels = batch(0, 0)
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(run.ddp.module(images), labels))


def _save_some(config: commhooks.HookConfig, steps: int) -> tuple[dict[str, Any], torch.Tensor, list[float]]:
    run = Run.new(hook=config).train(steps)
    content, at_save = run.save(residual="mean"), run.weights()
    losses = [_loss(run)] + [_loss(run.train(1)) for _ in range(4)]
    return content, at_save, losses


def _go_on(config: commhooks.HookConfig, content: dict[str, Any], steps: int) -> Any:
    run = Run.new(hook=config).load(content)
    run.hook.synchronize()
    before = run.weights()
    losses = [_loss(run)] + [_loss(run.train(1)) for _ in range(steps)]
    run.hook.synchronize()
    return before, run.weights(), losses


@pytest.mark.parametrize(("ranks", "later"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_goes_on(run_ranks, ranks, later):
    """With the same weights, and a loss that falls as that of the run that was saved."""
    config = commhooks.DiLoCo(sync_every=3, outer_momentum=0.3)
    saved, weights, expected = run_ranks(_save_some, config, 7, world_size=ranks)[0]
    found = run_ranks(_go_on, config, saved, 4, world_size=later)
    for before, after, losses in found:
        assert torch.equal(before, weights) and torch.equal(after, found[0][1])
        assert not torch.equal(after, weights)
        assert losses[0] == expected[0] and losses == pytest.approx(expected, rel=0.1), (losses, expected)


def _from_another_hook() -> tuple[str, int]:
    saved = Run.new(hook="int8_compress").train(2).save()
    with pytest.raises(commhooks.PayloadError) as error:
        Run.new(hook="diloco").load(saved)
    run = Run.new(hook="diloco").load(saved, strict=False).train(5)
    return str(error.value), run.hook.stats()["step"]


def test_the_state_of_another_hook_is_refused_or_left_out(run_ranks):
    for said, rounds in run_ranks(_from_another_hook):
        assert "the saved state is of hook 'int8_compress', this one is 'diloco'. Attach the saved hook" in said
        assert rounds == 1


def _alone(every: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    run = Run.new(hook="diloco", hook_options={"sync_every": every}).train(every)
    anchor = run.weights()
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


def _with_averages(config: commhooks.HookConfig) -> Any:
    """Two runs with a schedule of the learning rate and an average of the weights over time; the second one resumes."""
    runs = [Run.new(hook=config) for _ in range(2)]
    averages = [AveragedModel(run.ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for run in runs]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9) for run in runs]
    whole, resumed = zip(runs, averages, schedules, strict=True)

    def train(run: Run, average: AveragedModel, schedule: Any, steps: int) -> None:
        for _ in range(steps):
            run.train(1)
            average.update_parameters(run.ddp.module)
            schedule.step()

    train(*whole, 4)
    content = [runs[0].save(residual="mean"), averages[0].state_dict(), schedules[0].state_dict()]
    dist.broadcast_object_list(content)
    runs[1].load(content[0])
    averages[1].load_state_dict(content[1])
    schedules[1].load_state_dict(content[2])
    for each in (whole, resumed):
        train(*each, 5)
        each[0].hook.synchronize()
    found = [[run.weights(), flat(average.module.parameters())] for run, average, _ in (whole, resumed)]
    return *found, schedules[0].get_last_lr() == schedules[1].get_last_lr()


def test_schedules_and_averages_over_time_resume(run_ranks):
    """An average over time is each rank's own, as the weights are in a round; that of rank 0 is saved."""
    found = run_ranks(_with_averages, commhooks.DiLoCo(sync_every=3))
    for rank, (whole, resumed, same_rate) in enumerate(found):
        assert torch.equal(whole[0], resumed[0]) and same_rate
        assert torch.equal(whole[1], resumed[1]) == (rank == 0)


def _several_optimizers(steps: int) -> tuple[Any, Any]:
    """What this rank's optimizers have before a synchronisation and after it: several that step the same parameters,
    and one whose moments have other shapes than those."""
    run = Run.new(hook="local_sgd")
    parameters = list(run.ddp.parameters())
    optimizers = [torch.optim.SGD(parameters, lr=0.01 * (each + 1), momentum=0.1 * each + 0.2) for each in range(5)]
    optimizers.append(torch.optim.Adafactor(parameters))
    optimizers[0].param_groups[0]["lr"] *= 1 + dist.get_rank()
    for step in range(steps + dist.get_rank()):  # so that counts differ, too
        images, labels = batch(step, dist.get_rank())
        for each in optimizers:
            each.zero_grad()
            if step < steps:
                torch.nn.functional.cross_entropy(run.ddp(images), labels).backward()
            each.step()
    before = [plain(each.state_dict()) for each in optimizers]
    run.hook.synchronize(optimizers=True)
    return before, [plain(each.state_dict()) for each in optimizers]


def test_the_state_of_all_optimizers_is_rank_0s(run_ranks):
    (mine, mine_now), (other, other_now) = run_ranks(_several_optimizers, 3)
    assert mine_now == other_now == mine and mine != other


class _EightBits(torch.optim.Optimizer):
    """SGD with a momentum of integers and their scale."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = 0.9 * state["codes"] * state["scale"] + parameter.grad if state else parameter.grad
            state["scale"] = momentum.abs().max()[None] / 127
            state["codes"] = (momentum / state["scale"]).round().to(torch.int8)
            parameter.sub_(0.01 * momentum)


def _saves_codes() -> tuple[Any, Any]:
    run = Run.new(hook=commhooks.LocalSGD(sync_every=3))
    run.optimizer = _EightBits(run.ddp.parameters(), {})
    run.train(2)
    before = plain(run.optimizer.state_dict())
    run.hook.synchronize(optimizers=True)
    return before, plain(run.optimizer.state_dict())


def test_codes_and_their_scales_are_those_of_one_rank(run_ranks):
    (mine, mine_now), (other, other_now) = run_ranks(_saves_codes)
    assert mine_now == other_now == mine and mine != other
