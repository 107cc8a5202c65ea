"""`attach` given one of our own hook functions: as its config class, or with the state that the user made."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import HookConfigError
from commhooks.gradients.precision import check_one_device
from tests.support.ddp_steps import log_lines, process_group_of_one
from tests.support.training import Run, batch, make_model, residuals


def _functions() -> dict[str, int]:
    found = {}
    for function in (commhooks.allreduce_hook, commhooks.bf16_compress_hook, commhooks.powerSGD_hook):
        run = Run.new(hook=function).train(2)
        found[run.hook.name] = run.hook.stats()["bytes_sent"]
    return found


def test_a_function_of_ours_means_its_config(run_ranks: Any) -> None:
    for found in run_ranks(_functions):
        assert list(found) == ["allreduce", "bf16_compress", "powerSGD"]
        assert found["allreduce"] == 2 * found["bf16_compress"] > 0


def _state_of_the_user() -> tuple[bool, str, dict[str, torch.Tensor]]:
    state = commhooks.PowerSGDState(None, 2, 1)
    made = Run.new(hook=commhooks.powerSGD_hook, hook_state=state).train(4)
    named = Run.new(hook_options={"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}).train(4)
    resumed = Run.new(hook_options={"matrix_approximation_rank": 2}).load(made.save())
    return torch.equal(made.weights(), named.weights()), made.hook.name, residuals(resumed.hook)


def test_a_state_of_the_user_is_ours_too(run_ranks: Any) -> None:
    """Known by the model's names, saved under the hook's own name: it resumes a hook that was asked for by name."""
    for equal, name, resumed in run_ranks(_state_of_the_user):
        assert equal
        assert name == "powerSGD"
        assert "5.weight" in resumed


def _sub_group() -> torch.Tensor | None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    ddp = DistributedDataParallel(make_model(), process_group=group)
    commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=commhooks.PowerSGDState(None, 2, 0))
    images, labels = batch(0, dist.get_rank())
    torch.nn.functional.cross_entropy(ddp(images), labels).backward()
    return ddp.module[7].bias.grad


def test_the_group_of_a_state_is_the_models_own(run_ranks: Any) -> None:
    """Rank 2 is not in the model's group and never answers."""
    first, second, third = run_ranks(_sub_group, world_size=3)
    assert torch.equal(first, second)
    assert third is None


def _batched_matrices() -> tuple[int, int, int]:
    run = Run.new(hook="batched_powerSGD", hook_options={"start_powerSGD_iter": 0}).train(1)
    before = len(run.hook.state_dict()["batched_q"])
    after = len(run.train(2).hook.state_dict()["batched_q"])
    return before, after, len(run.hook.plan().compressed)


def test_batched_powersgd_forgets_the_matrices_of_a_dead_layout(run_ranks: Any) -> None:
    """One bucket in the first pass, several later: what the first one was made of never comes again."""
    for before, after, buckets in run_ranks(_batched_matrices):
        assert before == 1 < after == buckets


def test_one_state_for_two_models_is_refused() -> None:
    state = commhooks.PowerSGDState(None, 2, 0)
    with process_group_of_one():
        first = Run.new(hook=commhooks.powerSGD_hook, hook_state=state).train(1)
        with pytest.raises(commhooks.AttachError, match="already serves another model"):
            Run.new(hook=commhooks.powerSGD_hook, hook_state=state)
        assert first.hook.stats()["step"] == 1


class _StateWithAPath:
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1, "folder": Path("here")}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def _user_hook(state: _StateWithAPath, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return commhooks.allreduce_hook(None, bucket)


def _unsaveable_state() -> tuple[Any, list[str]]:
    with log_lines("commhooks", logging.WARNING) as records:
        run = Run.new(hook=_user_hook, hook_state=_StateWithAPath()).train(1)
        saved = run.save()["hook"]
        run.load(run.save())
    return saved["hook_state"], records


def test_a_state_that_would_spoil_the_checkpoint_is_left_out(run_ranks: Any) -> None:
    for saved, records in run_ranks(_unsaveable_state):
        assert saved is None
        assert "folder" in records[0] and "Path" in records[0]


def test_parameters_on_several_devices_are_refused() -> None:
    check_one_device((torch.device("cpu") for _ in range(3)), "PowerSGD")
    with pytest.raises(HookConfigError, match="this model are on cpu, meta; PowerSGD works where those of one process"):
        check_one_device(map(torch.device, ("meta", "cpu", "cpu")), "PowerSGD")
