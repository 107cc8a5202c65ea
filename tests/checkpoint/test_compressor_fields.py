"""The fields of a compressor of your own are saved, resumed, refitted and checked as Q is."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import registry
from commhooks.checkpoint import parts
from tests.support.ddp_steps import process_group_of_one
from tests.support.inside import session_of
from tests.support.models import (
    EVERY_PARAMETER,
    SHAPES,
    Prescribed,
    backward,
    bits_equal,
    random_gradients,
    wrap,
)
from tests.support.scaled import Scaled, ScaledCompressor

STEPS = 3


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with mock.patch.dict(registry.COMPRESSORS), process_group_of_one():
        yield


def _hooked(**options: Any) -> tuple[Any, commhooks.CommHook]:
    commhooks.register_compressor(ScaledCompressor)
    ddp = wrap(SHAPES)
    return ddp, commhooks.attach(ddp, Scaled(**options))


def _train(ddp: Any, steps: range) -> list[dict[str, torch.Tensor]]:
    results = []
    for step in steps:
        # Every gradient is four times as large as the one before, so that it is clipped by what
        # the compressor remembers of that.
        gradients = random_gradients(SHAPES, 0, step)
        scaled = {name: gradient * 4.0**step for name, gradient in gradients.items()}
        results.append(backward(ddp, scaled))
    return results


def _saved(**options: Any) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    """Return the state after some steps, and the gradients of the steps that follow."""
    ddp, hook = _hooked(**options)
    _train(ddp, range(STEPS))
    saved = hook.state_dict("per_rank")
    return saved, _train(ddp, range(STEPS, 2 * STEPS))


def test_a_run_with_a_further_field_resumes_to_the_bit() -> None:
    saved, after = _saved()
    assert {tuple(entry["largest"].shape) for entry in saved["parameters"].values()} == {(3,)}
    ddp, hook = _hooked()
    hook.load_state_dict(saved)
    assert all(map(bits_equal, _train(ddp, range(STEPS, 2 * STEPS)), after))
    for entry in saved["parameters"].values():
        del entry["largest"]
    ddp, hook = _hooked()
    hook.load_state_dict(saved)
    assert not bits_equal(_train(ddp, range(STEPS, STEPS + 1))[0], after[0]), (
        "the field matters in this test"
    )


def test_the_parts_of_two_saves_that_differ_in_a_field_are_told_apart() -> None:
    saved, after = _saved()
    shared, part = parts.split(saved, 0)
    assert part is not None and parts.problem_of_part(parts.check_shared(shared), part, 0) is None
    merged = parts.merge(shared, [part], 0, 1)
    ddp, hook = _hooked()
    hook.load_state_dict(merged)
    assert all(map(bits_equal, _train(ddp, range(STEPS, 2 * STEPS)), after))
    # Only the further field differs.
    entry = saved["parameters"]["wide"]
    saved["parameters"]["wide"] = entry | {"largest": entry["largest"] * 2}
    assert (
        parts.problem_of_part(parts.split(saved, 0)[0], part, 0)
        == "is of another save than the shared file in its folder"
    )
    shared["parameters"]["wide"]["largest"] *= 2
    with pytest.raises(commhooks.PayloadError, match="fingerprint"):
        parts.check_shared(shared)


@pytest.mark.parametrize("remembered", [1, 2, 5])
def test_a_field_is_refitted_when_an_option_has_changed(remembered: int) -> None:
    saved, _ = _saved()
    ddp, hook = _hooked(remembered=remembered)
    hook.load_state_dict(saved)
    for name, largest in session_of(hook).state["largest"].items():
        old = saved["parameters"][name]["largest"]
        assert torch.equal(largest, torch.cat([old, old[-1:], old[-1:]])[:remembered])
    _train(ddp, range(STEPS, STEPS + 1))
    for largest in session_of(hook).state["largest"].values():
        assert largest.shape == (remembered,)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (torch.full((3,), float("nan")), r"parameters\['wide'\]\['largest'\]"),
        ("text", r"parameters\['wide'\]\['largest'\]"),
        (torch.ones(3, dtype=torch.int64), r"parameters\['wide'\]\['largest'\]"),
        ([1.0], r"parameters\['wide'\]\['largest'\]"),
        (torch.ones(3, 1), r"a largest of shape \(3, 1\)"),
    ],
)
def test_a_damaged_field_is_refused_by_name(damage: Any, text: str) -> None:
    saved, _ = _saved()
    saved["parameters"]["wide"]["largest"] = damage
    _, hook = _hooked()
    with pytest.raises(commhooks.PayloadError, match=text):
        hook.load_state_dict(saved)
    assert not session_of(hook).state["largest"], "nothing has changed"


def test_the_memory_of_a_field_is_planned() -> None:
    ddp, hook = _hooked(remembered=5)
    _train(ddp, range(1))
    state = session_of(hook).state
    memory = hook.plan().memory
    assert memory.factors == sum(largest.nbytes for largest in state["largest"].values()) > 0
    assert memory.residual == sum(residual.nbytes for residual in state["residual"].values()) > 0


# ---- fields of whole buckets


@dataclass(frozen=True, kw_only=True)
class Averaged(commhooks.HookConfig):
    """Adds to each bucket what was there before."""

    hook_name: ClassVar[str] = "averaged"


class AveragedCompressor(commhooks.Compressor[Averaged]):
    Config = Averaged
    state_fields = (commhooks.StateField("average", per="bucket"),)

    def plan(self, parameters: Sequence[commhooks.ParameterInfo]) -> list[commhooks.UnitPlan]:
        # The key names this sequence of parameters: another bucket has another average.
        numel = sum(info.numel for info in parameters)
        name = "bucket of " + ", ".join(info.name for info in parameters)
        dtype = parameters[0].parameter.dtype
        return [
            commhooks.UnitPlan(
                name, (numel,), numel, dtype, True, numel_compressed=numel, state_name=name
            )
        ]

    def exchange(
        self, flat: torch.Tensor, work: Any, state: Any, step: commhooks.StepInfo
    ) -> commhooks.Exchange:
        _, (plan,) = work
        mean = yield commhooks.Send(flat / step.world_size, last=True)
        good = yield commhooks.Verdict(mean.isfinite().all())
        before = state["average"].get(plan.key, torch.zeros_like(mean))
        flat.copy_(mean + before)
        if bool(good):
            state["average"][plan.key] = (mean + before) / 2
        return None


def _averaged() -> tuple[Any, commhooks.CommHook]:
    commhooks.register_compressor(AveragedCompressor)
    # With find_unused_parameters each parameter has its own bucket from the first pass on.
    ddp = DistributedDataParallel(
        Prescribed(SHAPES), bucket_cap_mb=EVERY_PARAMETER, find_unused_parameters=True
    )
    return ddp, commhooks.attach(ddp, Averaged())


def test_the_fields_of_buckets_are_saved_and_told_apart() -> None:
    ddp, hook = _averaged()
    _train(ddp, range(STEPS))
    saved = hook.state_dict("per_rank")
    after = _train(ddp, range(STEPS, 2 * STEPS))
    assert saved["batched_average"].keys() == {f"bucket of {name}" for name in SHAPES}
    shared, part = parts.split(saved, 0)
    assert part is None
    ddp, hook = _averaged()
    hook.load_state_dict(parts.merge(parts.check_shared(shared), [], 0, 1))
    assert all(map(bits_equal, _train(ddp, range(STEPS, 2 * STEPS)), after))
    shared["batched_average"]["bucket of wide"] *= 2
    with pytest.raises(commhooks.PayloadError, match="fingerprint"):
        parts.check_shared(shared)


@pytest.mark.parametrize("damage", [torch.full((400,), float("inf")), "text", None])
def test_a_damaged_field_of_a_bucket_is_refused_by_name(damage: Any) -> None:
    ddp, hook = _averaged()
    _train(ddp, range(STEPS))
    saved = hook.state_dict("per_rank")
    before = copy.deepcopy(session_of(hook).state["average"])
    saved["batched_average"]["bucket of wide"] = damage
    with pytest.raises(commhooks.PayloadError, match=r"batched_average\['bucket of wide'\]"):
        hook.load_state_dict(saved)
    assert bits_equal(session_of(hook).state["average"], before), "nothing has changed"
