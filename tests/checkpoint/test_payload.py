"""What a saved state may be and what it may not: every refusal names what is wrong, and nothing has
changed then.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import commhooks
from tests.support.ddp_steps import process_group_of_one
from tests.support.models import same
from tests.support.training import Run, residuals

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


def _saved_by(hook: str = "powerSGD") -> dict[str, Any]:
    options = OPTIONS if hook.endswith("powerSGD") else None
    return Run.new(hook=hook, hook_options=options).train(4).save()["hook"]


@pytest.fixture
def saved_and_running() -> Iterator[tuple[dict[str, Any], Run]]:
    """A payload of one rank, and a run of the same hook that has learned something else."""
    with process_group_of_one():
        yield _saved_by(), Run.new(hook_options=OPTIONS).train(3)


def _top(**changes: Any) -> Any:
    return lambda payload: payload.update(changes)


def _entry(**changes: Any) -> Any:
    return lambda payload: payload["parameters"]["5.weight"].update(changes)


NUMBERS = torch.zeros(24, 24)
RESIDUAL = ["'5.weight'", "['residual']"]
# Other versions: test_golden_payloads.py; other hooks and models: test_change.py.
REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], object], list[str]]] = {
    "not a payload": (
        dict.clear,
        ["not the state of a commhooks hook", "To begin with fresh memory, leave out this load"],
    ),
    "no step": (lambda p: p.pop("step"), ["'step'"]),
    "negative step": (_top(step=-1), ["'step'", "-1"]),
    "step too large": (_top(step=2**63), ["'step'"]),
    "no rank": (_top(world_size=0), ["'world_size'"]),
    "too many ranks": (_top(world_size=2**20 + 1), ["'world_size'"]),
    "kind of residual": (_top(residual="mean"), ["residual='mean'"]),
    "ranks": (_top(residual_ranks=[]), ["one tensor per rank"]),
    "a rank that there was not": (_top(residual_ranks=[1]), ["'residual_ranks'"]),
    "version of another type": (_top(version=True), ["version True"]),
    "loss scale 0": (_top(loss_scale=0), ["'loss_scale'"]),
    "loss scale NaN": (_top(loss_scale=float("nan")), ["'loss_scale'"]),
    "loss scale beyond float": (_top(loss_scale=10**400), ["'loss_scale'"]),
    "no q": (lambda p: p["parameters"]["5.weight"].pop("q"), ["'5.weight'", "'q'"]),
    "q of another shape": (_entry(q=torch.zeros(2, 3)), ["'5.weight'", "['q']"]),
    "residual sparse": (_entry(residual=[NUMBERS.to_sparse()]), RESIDUAL),
    "residual far below 0": (_entry(residual=[NUMBERS - 1e38]), [*RESIDUAL, "too large"]),
    "residual nan": (_entry(residual=[NUMBERS + float("nan")]), RESIDUAL),
    "batched_q of a name": (_top(batched_q={"5.weight": torch.ones(2, 24)}), ["batched_q"]),
    "batched_q a vector": (_top(batched_q={"batched.1": torch.ones(2)}), ["batched.1"]),
    "start": (lambda p: p["options"].update(start_powerSGD_iter="x"), ["start_powerSGD_iter"]),
}


def test_refusals_name_what_is_wrong_and_change_nothing(saved_and_running: Any) -> None:
    """Damage at random: test_hostile_payloads.py."""
    run = saved_and_running[1]
    before = residuals(run.hook)
    for name, (edit, texts) in REFUSALS.items():
        saved = copy.deepcopy(saved_and_running[0])
        edit(saved)
        with pytest.raises(commhooks.PayloadError) as caught:
            run.hook.load_state_dict(saved)
        assert same(before, residuals(run.hook)) and run.hook.stats()["step"] == 3, name
        assert all(expected in str(caught.value) for expected in texts), (name, str(caught.value))


def _plain_types(value: Any, path: str = "payload") -> list[str]:
    if isinstance(value, dict):
        return [
            x for key, each in value.items() for x in _plain_types(each, f"{path}[{key!r}]")
        ] + ([] if all(type(key) is str for key in value) else [path])
    if isinstance(value, list):
        return [x for i, each in enumerate(value) for x in _plain_types(each, f"{path}[{i}]")]
    return (
        []
        if value is None or type(value) in (torch.Tensor, str, int, float, bool)
        else [f"{path}: {type(value)}"]
    )


@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD", "fp16_compress", "noop"])
def test_plain_types_only(run_ranks: Any, hook: str) -> None:
    for saved in run_ranks(_saved_by, hook):
        assert _plain_types(saved) == []


def _is_independent(hook: str) -> bool:
    """What was saved is not changed by the training that goes on."""
    run = Run.new(hook=hook, hook_options=OPTIONS).train(4)
    saved = run.hook.state_dict()
    before = copy.deepcopy(saved)
    run.train(2)
    return same(saved, before)


@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD"])
def test_a_saved_state_does_not_change_afterwards(run_ranks: Any, hook: str) -> None:
    assert run_ranks(_is_independent, hook) == [True, True]


def test_a_scalar_is_saved_and_loads(saved_and_running: Any) -> None:
    module = torch.nn.ParameterDict({"scale": torch.ones(())})
    hook = commhooks.attach(
        torch.nn.parallel.DistributedDataParallel(module), "powerSGD", hook_options=OPTIONS
    )
    saved = hook.state_dict()
    assert saved["parameters"]["scale"]["shape"] == []
    hook.load_state_dict(saved)


def test_state_dict_of_an_unknown_kind(saved_and_running: Any) -> None:
    with pytest.raises(commhooks.HookConfigError, match="'average'"):
        saved_and_running[1].hook.state_dict(residual="average")
