"""The arguments that the front ends have in common: the same names, defaults and types everywhere."""

import dataclasses
import inspect
import re
import typing
from typing import Any

import pytest

import commhooks
from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.settings import STOCK_HOOK_FIELDS, TYPES
from commhooks.comm.wire import WIRE_DTYPES
from commhooks.request import ARGUMENTS, SAVE_RESIDUAL, WRAPPERS, HookRequest
from lightning_commhooks import CommHookCheckpoint, CommHookDDP, CommHookFSDP2, fabric, pytorch_lightning

REQUIRED = inspect.Parameter.empty


def _defaults(front_end: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(front_end):
        return {each.name: each.default for each in dataclasses.fields(front_end)}
    return {name: each.default for name, each in inspect.signature(front_end).parameters.items()}


# Each front end: the arguments that it lacks, and the defaults of its own.
FRONT_ENDS: dict[str, tuple[Any, set[str], dict[str, Any]]] = {
    "attach": (commhooks.attach, set(), {"hook": REQUIRED, "save_residual": "auto"}),
    "CommHookDDP": (CommHookDDP, {"total_steps"}, {"hook": REQUIRED, "save_residual": None, "strict": None}),
    "CommHookDDP, pytorch_lightning": (
        pytorch_lightning.CommHookDDP,
        {"total_steps"},
        {"hook": REQUIRED, "save_residual": None, "strict": None},
    ),
    "CommHookFSDP2": (
        CommHookFSDP2,
        {"hook_state", "total_steps", "ranks_per_node"},
        {"hook": REQUIRED, "save_residual": None},
    ),
    "Fabric": (fabric.CommHookDDP, set(), {"hook": REQUIRED, "save_residual": "mean"}),
    "CommHookKwargs": (CommHookKwargs, set(), {}),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_front_ends_have_the_same_arguments_and_defaults(name: str) -> None:
    front_end, lacks, own = FRONT_ENDS[name]
    expected = {name: each.default for name, each in ARGUMENTS.items() if name not in lacks} | own
    assert {name: default for name, default in _defaults(front_end).items() if name in ARGUMENTS} == expected


def test_yaml_has_the_same_arguments_and_those_of_ddp() -> None:
    of_accelerate = {each.name for each in dataclasses.fields(CommHookKwargs)} - set(STOCK_HOOK_FIELDS)
    assert TYPES.keys() == of_accelerate and ARGUMENTS.keys() < of_accelerate


def test_what_lightning_cli_offers_are_all_values() -> None:
    assert WRAPPERS == tuple(WIRE_DTYPES)
    for strategy in (CommHookDDP, CommHookFSDP2):
        hints = typing.get_type_hints(strategy.__init__)
        assert typing.get_args(typing.get_args(hints["wrapper"])[0]) == WRAPPERS
    for taker in (CommHookDDP, CommHookCheckpoint):
        hints = typing.get_type_hints(taker.__init__)
        assert typing.get_args(typing.get_args(hints["save_residual"])[0]) == SAVE_RESIDUAL


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"strict": 1}, "strict=1; expected True or False"),
        ({"check_every": 0}, "check_every=0; expected a number of steps, 1 or more, or None"),
        ({"check_every": 1.5}, "check_every=1.5; expected a number of steps, 1 or more, or None"),
        ({"check_every": "often"}, "check_every='often'; expected a number of steps, 1 or more, or None"),
        ({"check_every": True}, "check_every=True; expected a number of steps"),
        ({"total_steps": 2.0}, "total_steps=2.0; expected a number of steps, 1 or more, or None"),
        ({"ranks_per_node": "all"}, "ranks_per_node='all'; expected 'auto', a number of ranks, 1 or more, or None"),
        ({"ranks_per_node": 0}, "ranks_per_node=0; expected 'auto', a number of ranks, 1 or more, or None"),
        ({"wrapper": 16}, "wrapper=16; expected one of None, 'fp16', 'bf16'"),
        (
            {"save_residual": "men"},
            "save_residual='men'; expected one of 'mean', 'per_rank', 'drop' (did you mean 'mean'?)",
        ),
    ],
)
def test_a_wrong_value(given: dict[str, Any], text: str) -> None:
    with pytest.raises(commhooks.HookConfigError, match=re.escape(text)):
        HookRequest.parse("powerSGD", **given)
