"""A mistake of a compressor's author is an error that names it, never a hang or a wrong result."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks import HookConfigError, HookRunError, PayloadError, registry
from tests.support.ddp_steps import backward, mlp, process_group_of_one, wrap
from tests.support.workers import RanksFailed


@pytest.fixture(autouse=True)
def registered_again() -> Iterator[None]:
    with mock.patch.dict(registry.COMPRESSORS):
        yield


def compressor(exchange: Any, **attributes: Any) -> type[commhooks.Compressor[Any]]:
    """A registered compressor of every matrix, with this exchange."""

    @dataclass(frozen=True, kw_only=True)
    class Config(commhooks.HookConfig):
        """For a test."""

        hook_name: ClassVar[str] = "of_a_test"

    def plan_parameter(self: Any, info: commhooks.ParameterInfo) -> commhooks.UnitPlan:
        return commhooks.UnitPlan(
            info.name, tuple(info.parameter.shape), info.numel, info.parameter.dtype, True, "", 1
        )

    members = {
        "Config": Config,
        "exchange": exchange,
        "plan_parameter": plan_parameter,
        **attributes,
    }
    return commhooks.register_compressor(type("OfATest", (commhooks.Compressor,), members))


def average(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
    reduced = yield commhooks.Send(flat.div_(step.world_size), what="all", last=True)
    yield commhooks.Verdict(reduced.isfinite().all())


def run(made: Any) -> None:
    with process_group_of_one():
        ddp = wrap(mlp())
        commhooks.attach(ddp, made)
        backward(ddp, 0)


def no_generator(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
    return None


def a_tuple(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
    yield flat, "P"


def no_verdict(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
    yield commhooks.Send(flat, last=True)


def a_bool(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
    yield commhooks.Send(flat, last=True)
    yield commhooks.Verdict(True)


def goes_on(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
    yield from average(self, flat, work, state, step)
    yield commhooks.Send(flat)


def too_short(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
    yield from average(self, flat, work, state, step)
    return flat[:3]


def once(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
    yield commhooks.Send(flat)


def no_all(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
    reduced = yield commhooks.Send(flat, last=True)
    yield commhooks.Verdict(reduced.isfinite())


def with_state(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
    state["residual"]["x"] = flat
    yield commhooks.Send(flat, last=True)


@pytest.mark.parametrize(
    ("exchange", "attributes", "text"),
    [
        (no_generator, {}, "the exchange of of_a_test is a NoneType, not a generator"),
        (a_tuple, {}, "yields a tuple; expected Send or Verdict"),
        (no_verdict, {}, "ended before its verdict: it must yield Verdict"),
        (a_bool, {}, r"yields Verdict\(True\); expected a bool tensor without dimensions"),
        (
            no_all,
            {},
            (
                r"yields Verdict\(a tensor of shape \(\d+,\) in torch.bool\); expected a bool"
                r" tensor without dim"
            ),
        ),
        (goes_on, {}, "goes on after the verdict"),
        (too_short, {}, r"returns a tensor of shape \(3,\); expected None"),
        (average, {"transactional": False}, "asks for a verdict, but it is not transactional"),
        (once, {"transactional": False}, "put last=True on its only Send"),
        (
            with_state,
            {"transactional": False},
            r"state\['residual'\]: a compressor that is not transactional",
        ),
    ],
)
def test_a_malformed_exchange_is_an_error(
    exchange: Any, attributes: dict[str, Any], text: str
) -> None:
    with pytest.raises((HookRunError, RuntimeError), match=text):
        run(compressor(exchange, **attributes))


def test_a_missing_plan_is_an_error() -> None:
    with pytest.raises(
        HookConfigError, match=r"OfATest.plan_parameter returned None for .*; expected a UnitPlan"
    ):
        run(compressor(average, plan_parameter=lambda self, info: None))


def test_a_workspace_of_none_is_a_workspace() -> None:
    seen = []

    def watched(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
        seen.append(work)
        yield from average(self, flat, work, state, step)

    run(compressor(watched, workspace=lambda self, layout, plans: None))
    assert seen and not any(seen)


def _between_nodes() -> list[str]:
    errors = []
    for exchange in (no_verdict, goes_on, too_short):
        with mock.patch.dict(registry.COMPRESSORS):
            ddp = wrap(mlp())
            commhooks.attach(ddp, compressor(exchange), ranks_per_node=2)
            with pytest.raises(HookRunError) as raised:
                backward(ddp, 0)
            errors.append(str(raised.value))
    return errors


def test_between_nodes_the_same_rules_hold(run_ranks: Any) -> None:
    for messages in run_ranks(_between_nodes, world_size=4):
        expected = [
            "ended before its verdict: it must yield Verdict",
            "goes on after the verdict",
            "returns a tensor",
        ]
        assert all(text in message for text, message in zip(expected, messages, strict=True))


def test_the_operation_of_a_send_is_named() -> None:
    with pytest.raises(TypeError):
        commhooks.Send(torch.zeros(2), "gather")  # type: ignore[misc]
    with pytest.raises(
        HookRunError, match=r"op='mean'.*expected one of 'sum', 'max', .* divide what is sent by"
    ):
        commhooks.Send(torch.zeros(2), op="mean")  # type: ignore[arg-type]


def _rows() -> str:
    def sends_too_little(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
        yield commhooks.Send(flat[:2].clone(), what="rows", op="all_to_all", last=True)

    with mock.patch.dict(registry.COMPRESSORS):
        model = wrap(mlp(), bucket_cap_mb=25)
        commhooks.attach(model, compressor(sends_too_little, transactional=False))
        with pytest.raises(commhooks.HookRunError) as caught:
            backward(model, 0)
    return str(caught.value)


def test_a_message_without_a_row_for_each_rank_is_an_error(run_ranks: Any) -> None:
    for text in run_ranks(_rows, world_size=3):
        assert (
            text.startswith("all-to-all of rows ")
            and "(2,) does not have one row for each of 3" in text
        )


def _different_plans() -> None:
    def plan_parameter(self: Any, info: commhooks.ParameterInfo) -> commhooks.UnitPlan:
        plan = commhooks.UnitPlan.uncompressed(info, "no")
        compressed = dist.get_rank() == 0
        return commhooks.UnitPlan(plan.name, plan.shape, plan.numel, plan.dtype, compressed, "", 1)

    with mock.patch.dict(registry.COMPRESSORS):
        commhooks.attach(wrap(mlp()), compressor(average, plan_parameter=plan_parameter))


def test_plans_that_differ_between_ranks_are_an_error(run_ranks: Any) -> None:
    with pytest.raises(
        RanksFailed, match="the ranks compress different things: parameter 0 is .* on rank 1"
    ):
        run_ranks(_different_plans)


# ---- registration and fields ---------------------------------------------------------------------


def _config(**members: Any) -> type[Any]:
    made = type(
        "Config", (commhooks.HookConfig,), {"__annotations__": {}, "hook_name": "mine", **members}
    )
    return dataclass(frozen=True, kw_only=True)(made)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"Config": None}, "its Config is None; expected a dataclass"),
        (
            {"Config": type("Plain", (commhooks.HookConfig,), {"hook_name": "mine"})},
            "is not a dataclass: decorate it",
        ),
        ({"Config": _config(aliases="fp16")}, "expected a tuple of names"),
        (
            {"Config": _config(start_option="start")},
            "start_option='start' is not one of the options",
        ),
        ({"Config": _config(), "exchange": None}, "does not define exchange"),
        (
            {"Config": _config(), "state_fields": commhooks.RESIDUAL},
            "state_fields are StateField.*; expected a tuple",
        ),
        (
            {"Config": _config(), "state_fields": ("residual",)},
            "state_fields hold 'residual'; expected commhooks.RES",
        ),
        (
            {"Config": _config(), "transactional": False, "state_fields": (commhooks.RESIDUAL,)},
            "with transactional=False there is no learned state",
        ),
    ],
)
def test_a_wrong_class_cannot_be_registered(members: dict[str, Any], text: str) -> None:
    members = {"exchange": average} | members
    if members["exchange"] is None:
        del members["exchange"]
    with pytest.raises(HookConfigError, match=text):
        commhooks.register_compressor(type("Mine", (commhooks.Compressor,), members))
    assert "mine" not in registry.COMPRESSORS


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"key": "shape"}, "keeps something else under this key"),
        ({"key": "q"}, "keeps something else under this key"),
        ({"key": "residual"}, "differs between ranks: use RESIDUAL"),
        ({"key": "momentum", "replicated": False}, "; use RESIDUAL"),
    ],
)
def test_fields_that_no_checkpoint_can_hold_are_refused(
    arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        commhooks.StateField(**arguments)


class _Doubles(commhooks.StateField):
    def dtype(self, plan: commhooks.UnitPlan) -> torch.dtype:
        return torch.float64


def test_a_field_comes_back_as_it_was(run_ranks: Any) -> None:
    """In its own dtype, and a damaged one is refused before anything changes."""

    def remembers(self: Any, flat: Any, work: Any, state: Any, step: Any) -> Any:
        layout, _ = work
        reduced = yield commhooks.Send(flat.div_(step.world_size), what="all", last=True)
        good = yield commhooks.Verdict(reduced.isfinite().all())
        for slot in layout.slots if good else ():
            state["mean"][slot.name] = slot.of(reduced).double() / 3

    made = compressor(remembers, state_fields=(_Doubles("mean"),))
    with process_group_of_one():
        ddp = wrap(mlp())
        hook = commhooks.attach(ddp, made)
        backward(ddp, 0)
        saved = hook.state_dict()
        again = commhooks.attach(wrap(mlp()), made)
        again.load_state_dict(saved)
        for name, entry in again.state_dict()["parameters"].items():
            assert entry["mean"].dtype == torch.float64
            assert torch.equal(entry["mean"], saved["parameters"][name]["mean"])
        saved["parameters"]["0.weight"]["mean"] = torch.zeros(3)
        with pytest.raises(
            PayloadError,
            match="parameters\\['0.weight'\\]\\['mean'\\] does not fit|it has a mean of 3",
        ):
            again.load_state_dict(saved)
        assert again.stats()["step"] == 1
