"""The arguments that the front ends have in common: the same names, defaults and types everywhere, and explained."""

import dataclasses
import inspect
import typing
from typing import Any

import pytest

import commhooks
from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.settings import CommHookConfig
from commhooks.comm.wire import WIRE_DTYPES
from commhooks.hook import vocabulary
from commhooks.hook.vocabulary import ARGUMENTS
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
    "YAML of Accelerate": (CommHookConfig, set(), {"hook": "???"}),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_front_ends_have_the_same_arguments_and_defaults(name: str) -> None:
    front_end, lacks, own = FRONT_ENDS[name]
    expected = {name: each.default for name, each in ARGUMENTS.items() if name not in lacks} | own
    assert {name: default for name, default in _defaults(front_end).items() if name in ARGUMENTS} == expected


def test_what_lightning_cli_offers_are_all_values() -> None:
    assert vocabulary.WRAPPERS == tuple(WIRE_DTYPES)
    for strategy in (CommHookDDP, CommHookFSDP2):
        hints = typing.get_type_hints(strategy.__init__)
        assert typing.get_args(typing.get_args(hints["wrapper"])[0]) == vocabulary.WRAPPERS
    for taker in (CommHookDDP, CommHookCheckpoint):
        hints = typing.get_type_hints(taker.__init__)
        assert typing.get_args(typing.get_args(hints["save_residual"])[0]) == vocabulary.SAVE_RESIDUAL


@pytest.mark.parametrize("name", [name for name in FRONT_ENDS if name != "YAML of Accelerate"])
def test_each_argument_is_explained_where_it_is(name: str) -> None:
    """At runtime, for `help()` and for LightningCLI's; the source refers to `commhooks.attach`."""
    front_end, lacks, _ = FRONT_ENDS[name]
    doc = inspect.getdoc(front_end) or ""
    assert "as in `commhooks.attach`" not in doc
    for argument in ARGUMENTS.keys() - lacks - {"hook", "save_residual"}:
        assert f"\n    {argument}: " in doc, argument
    assert "ranks_per_node" in lacks or "with the names of the parameters. None: never." in doc


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
        ({"save_residual": "men"}, r"save_residual='men' (did you mean 'mean'?); expected one of 'mean', 'per_rank', "),
    ],
)
def test_a_wrong_value_is_refused_by_all_in_the_same_words(given: dict[str, Any], text: str) -> None:
    (name,) = given
    for front_end, lacks, _ in (FRONT_ENDS["CommHookDDP"], FRONT_ENDS["Fabric"], FRONT_ENDS["CommHookKwargs"]):
        if name not in lacks:
            with pytest.raises(commhooks.HookConfigError) as caught:
                front_end(hook="powerSGD", **given)
            assert text in str(caught.value)
