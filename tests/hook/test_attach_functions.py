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
from tests.support.training import Run, batch, make_model, residuals


def _functions() -> dict[str, Any]:
    found = {}
    for function in (commhooks.allreduce_hook, commhooks.bf16_compress_hook, commhooks.powerSGD_hook):
        run = Run.new(hook=function).train(2)
        found[run.hook.name] = (run.hook.stats()["bytes_sent"], run.weights())
    return found


def test_a_function_of_ours_means_its_config(run_ranks: Any) -> None:
    for found in run_ranks(_functions):
        assert list(found) == ["allreduce", "bf16_compress", "powerSGD"]
        assert found["allreduce"][0] == 2 * found["bf16_compress"][0] > 0


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


def _sub_group(with_state: bool) -> torch.Tensor | None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    ddp = DistributedDataParallel(make_model(), process_group=group)
    if with_state:
        commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=commhooks.PowerSGDState(None, 2, 0))
    else:
        commhooks.attach(ddp, commhooks.allreduce_hook)
    images, labels = batch(0, dist.get_rank())
    torch.nn.functional.cross_entropy(ddp(images), labels).backward()
    return ddp.module[7].bias.grad


def test_the_group_is_the_models_own(run_ranks: Any) -> None:
    """Rank 2 is not in the model's group and never answers."""
    for with_state in (False, True):
        first, second, third = run_ranks(_sub_group, with_state, world_size=3)
        assert torch.equal(first, second)
        assert third is None


def _steps_of_a_simple_hook() -> tuple[int, int]:
    saved = Run.new(hook="bf16").train(3).save()
    resumed = Run.new(hook="bf16").load(saved).train(2)
    return resumed.hook.stats()["step"], resumed.save()["hook"]["step"]


def test_a_simple_hook_counts_on_after_a_resume(run_ranks: Any) -> None:
    assert run_ranks(_steps_of_a_simple_hook) == [(5, 5)] * 2


def _batched_matrices() -> tuple[int, int]:
    run = Run.new(hook="batched_powerSGD", hook_options={"start_powerSGD_iter": 0}).train(1)
    before = len(run.hook.state_dict()["batched_q"])
    return before, len(run.train(2).hook.state_dict()["batched_q"])


def test_batched_powersgd_forgets_the_matrices_of_a_dead_layout(run_ranks: Any) -> None:
    """One bucket in the first pass, several later: what the first one was made of never comes again."""
    for before, after in run_ranks(_batched_matrices):
        assert before == 1
        assert after == len(run_ranks(_buckets)[0])


def _buckets() -> list[str]:
    run = Run.new(hook="batched_powerSGD", hook_options={"start_powerSGD_iter": 0}).train(3)
    return [plan.name for plan in run.hook.plan().parameters if plan.compressed]


def _shared_state() -> str:
    state = commhooks.PowerSGDState(None, 2, 0)
    first = Run.new(hook=commhooks.powerSGD_hook, hook_state=state).train(1)
    try:
        Run.new(hook=commhooks.powerSGD_hook, hook_state=state)
    except commhooks.AttachError as error:
        assert first.hook.stats()["step"] == 1
        return str(error)
    return ""


def test_one_state_for_two_models_is_refused(run_ranks: Any) -> None:
    assert "already serves another model" in run_ranks(_shared_state, world_size=1)[0]


class _StateWithAPath:
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1, "folder": Path("here")}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def _user_hook(state: _StateWithAPath, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return commhooks.allreduce_hook(None, bucket)


def _unsaveable_state() -> tuple[Any, list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commhooks").addHandler(handler)
    try:
        run = Run.new(hook=_user_hook, hook_state=_StateWithAPath()).train(1)
        saved = run.save()["hook"]
        run.load(run.save())
    finally:
        logging.getLogger("commhooks").removeHandler(handler)
    return saved["hook_state"], records


def test_a_state_that_would_spoil_the_checkpoint_is_left_out(run_ranks: Any) -> None:
    for saved, records in run_ranks(_unsaveable_state):
        assert saved is None
        assert "folder" in records[0] and "Path" in records[0]


def test_parameters_on_several_devices_are_refused() -> None:
    check_one_device((torch.device("cpu") for _ in range(3)), "PowerSGD")
    with pytest.raises(HookConfigError, match="this model are on cpu, meta; PowerSGD works where those of one process"):
        check_one_device(map(torch.device, ("meta", "cpu", "cpu")), "PowerSGD")
