"""`save_state` and `load_state` with several hooked models, and with models that go."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import commhooks
from tests.support.accelerate_checkpoints import BOTH, truncate
from tests.support.accelerators import OPTIONS, WRONG, hook_files, launched, new_accelerator, power_sgd
from tests.support.features import ddp_models_stay_as_they_are
from tests.support.training import batch, flat, make_model, residuals


class Pair:
    """Two models of one shape with different gradients, and an evaluation-mode model that is prepared before them."""

    def __init__(self, options: Any = OPTIONS) -> None:
        self.handler = power_sgd(options)
        self.accelerator = new_accelerator(self.handler)
        self.accelerator.prepare_model(make_model(), evaluation_mode=True)
        self.first = self.accelerator.prepare(make_model())
        self.first_hook = self.handler.attached
        self.second = self.accelerator.prepare(make_model())
        self.second_hook = self.handler.attached

    def train(self, start: int, steps: int) -> "Pair":
        for step in range(start, start + steps):
            for factor, model in ((1, self.first), (3, self.second)):
                images, labels = batch(step, self.accelerator.process_index)
                self.accelerator.backward(torch.nn.functional.cross_entropy(model(factor * images), labels))
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.05 * parameter.grad
                        parameter.grad = None
        return self

    def memory(self) -> list[torch.Tensor]:
        hooks = (self.first_hook, self.second_hook)
        return [residuals(hook)["5.weight"] for hook in hooks] + [flat(self.second.parameters())]


@launched
def _two_models(folder: str) -> list[list[torch.Tensor]]:
    pair = Pair().train(0, 5)
    assert len(pair.handler.attached_hooks) == 2
    pair.accelerator.save_state(folder)
    pair.accelerator.wait_for_everyone()
    resumed = Pair(WRONG)
    resumed.accelerator.load_state(folder)
    at_load = [each.memory()[:2] for each in (pair, resumed)]
    return [*at_load, pair.train(5, 2).memory(), resumed.train(5, 2).memory()]


def test_two_models_have_a_state_each(run_ranks: Any, tmp_path: Path) -> None:
    for saved, resumed, through, again in run_ranks(_two_models, str(tmp_path)):
        assert not torch.equal(saved[0], saved[1])
        assert torch.equal(saved[0], resumed[0]) and torch.equal(saved[1], resumed[1])
        assert all(torch.equal(a, b) for a, b in zip(through, again, strict=True))
    assert hook_files(tmp_path) == sorted([*BOTH, *(name.replace("hook", "hook_1") for name in BOTH)])


@launched
def _second_file_damaged(folder: str) -> None:
    pair = Pair().train(0, 4)
    before = pair.memory()
    with pytest.raises(commhooks.PayloadError, match="comm_hook_1.pt"):
        pair.accelerator.load_state(folder)
    assert all(torch.equal(a, b) for a, b in zip(before, pair.memory(), strict=True))
    assert pair.first_hook.stats()["step"] == 4


def test_an_error_in_the_second_file_leaves_the_first_model_alone(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_two_models, str(tmp_path))
    truncate(tmp_path / "comm_hook_1.pt")
    run_ranks(_second_file_damaged, str(tmp_path))


@launched
def _freed_and_gone(folder: str) -> dict[str, Any]:
    pair = Pair().train(0, 5)
    second = residuals(pair.second_hook)["5.weight"]
    pair.first = pair.first_hook = None
    gc.collect()
    assert pair.handler.attached_hooks == [pair.second_hook]
    pair.accelerator.save_state(folder + "/gone")
    pair.accelerator.wait_for_everyone()
    part = torch.load(f"{folder}/gone/comm_hook_1_rank{pair.accelerator.process_index}.pt", weights_only=True)
    kept_its_number = torch.equal(part["residuals"]["5.weight"].flatten(), second)

    stale = pair.second  # a variable that `free_memory` knows nothing of
    pair.accelerator.free_memory()
    pair.second = pair.accelerator.prepare(make_model())
    hook = pair.handler.attached
    fresh = hook.stats()["step"] == 0 and not residuals(hook)
    pair.accelerator.save_state(folder + "/freed")
    pair.accelerator.wait_for_everyone()
    step = torch.load(folder + "/freed/comm_hook.pt", weights_only=True)["step"]

    pair.first = pair.accelerator.prepare(make_model())
    pair.accelerator.free_memory()
    again = pair.accelerator.prepare(pair.first.module)  # the second of two, now alone
    pair.accelerator.save_state(folder + "/again")
    pair.accelerator.wait_for_everyone()
    assert pair.handler.is_attached(again)
    return {"kept its number": kept_its_number, "fresh": fresh, "step": step, "stale": pair.handler.is_attached(stale)}


def test_models_that_go_and_free_memory(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_freed_and_gone, str(tmp_path)):
        assert result == {"kept its number": True, "fresh": True, "step": 0, "stale": True}
    assert hook_files(tmp_path / "gone") == [name.replace("hook", "hook_1") for name in BOTH]
    assert hook_files(tmp_path / "freed") == hook_files(tmp_path / "again") == BOTH[:1]


@launched
def _prepared_twice(folder: str) -> dict[str, Any]:
    handler = power_sgd()
    accelerator = new_accelerator(handler)
    module, other = make_model(), make_model()
    first, second = accelerator.prepare(module, other)
    third = accelerator.prepare(module)  # a DDP model of its own around the same module
    hooks = handler.attached_hooks
    accelerator.backward(third(torch.ones(2, 1, 8, 8)).sum())
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    steps = [torch.load(f"{folder}/comm_hook{n}.pt", weights_only=True)["step"] for n in ("", "_1")]
    again = accelerator.prepare(third)
    return {"hooks": len(hooks), "steps": steps, "same": again is third, "latest": handler.attached is hooks[2]}


@ddp_models_stay_as_they_are
def test_a_module_that_is_prepared_twice_keeps_its_number(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_prepared_twice, str(tmp_path)):
        assert result == {"hooks": 3, "steps": [1, 0], "same": True, "latest": True}
    assert hook_files(tmp_path) == ["comm_hook.pt", "comm_hook_1.pt"]
