"""A DDP model with a hook can be copied and pickled; the copy has no hook."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import commhooks
from commhooks import HookRunError
from tests.support.ddp_steps import (
    backward,
    gradients,
    local_gradients,
    log_lines,
    mean_over_ranks,
    mlp,
    relative,
    wrap,
)

HOOK = commhooks.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=1)


def _saved_and_loaded(model: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": _saved_and_loaded,
    "AveragedModel": lambda ddp: AveragedModel(ddp).module,
}


def _copied(way: str) -> dict[str, Any]:
    ddp = wrap(mlp())
    attached = commhooks.attach(ddp, HOOK)
    backward(ddp, 0)
    with log_lines() as lines:
        twin = WAYS[way](ddp)
    alone = local_gradients(twin, lambda module: backward(module, 1))
    backward(twin, 1)
    means = {name: mean_over_ranks(gradient) for name, gradient in alone.items()}
    error = max(
        relative(gradient - means[name], means[name]) for name, gradient in gradients(twin).items()
    )
    passes = attached.stats()["backward_passes"]
    backward(ddp, 1)
    again = commhooks.attach(twin, HOOK) if way == "torch.save" else None
    if again is not None:
        backward(twin, 2)
    return {
        "lines": [line for line in lines if "copied" in line],
        "error": error,
        "passes": (passes, attached.stats()["backward_passes"]),
        "again": None if again is None else again.stats()["backward_passes"],
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_averages_without_the_hook(run_ranks: Any, way: str) -> None:
    for rank in run_ranks(_copied, way):
        assert rank["error"] < 1e-6
        assert rank["passes"] == (1, 2)  # those of the original only
        assert rank["again"] in (None, 1)
        assert rank["lines"] == [
            "a model with hook 'powerSGD' was copied or loaded whole: the copy has no hook until"
            " one is attached."
        ]


def _alone() -> list[str]:
    """Return the errors of copying a hook alone and of calling DDP's copied function."""
    ddp = wrap(mlp())
    hook = commhooks.attach(ddp, "powerSGD")
    texts = []
    for way in (
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda hook: torch.save(hook, io.BytesIO()),
    ):
        with pytest.raises(HookRunError) as error:
            way(hook)
        texts.append(str(error.value))
    assert ddp._get_ddp_logging_data()["comm_hook"] == "powerSGD"
    registered: list[Any] = []
    other = wrap(mlp())
    other.register_comm_hook = lambda state, hook: registered.append(hook)
    commhooks.attach(other, "allreduce")
    with pytest.raises(
        HookRunError, match="a copy of a model with the hook 'allreduce'.*attach one"
    ):
        pickle.loads(pickle.dumps(registered[0]))(None, None)
    return texts


def test_a_hook_alone_is_neither_copied_nor_pickled(run_ranks: Any) -> None:
    for text in run_ranks(_alone, world_size=1)[0]:
        assert text.startswith("a CommHook cannot be copied or pickled") and "state_dict()" in text
