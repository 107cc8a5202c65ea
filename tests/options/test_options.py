"""Python, YAML, the environment, flags and LightningCLI take and refuse the same values."""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from omegaconf import DictConfig, ListConfig, OmegaConf

import commhooks
from accelerate_commhooks import CommHookKwargs
from commhooks import HookConfigError, PowerSGD
from commhooks.request import HookRequest
from commhooks.tools.common import parse_options
from lightning_commhooks import CommHookDDP, CommHookMonitor
from tests.support import warm
from tests.support.features import whole_numbers_in_config_classes
from tests.support.lightning_support import Model, cli_config

NUMBER_OF_STEPS, FRACTION = (
    "a number of steps, 0 or more",
    "a fraction of the run strictly between 0 and 1",
)
OK = ...
# Option, what is given, what it becomes (OK: it stays what it is), or what the error says is
# expected.
VALUES: list[tuple[str, Any, Any]] = [
    ("matrix_approximation_rank", 8, OK),
    ("matrix_approximation_rank", "4", 4),
    ("matrix_approximation_rank", 0, "at least 1"),
    *(
        ("matrix_approximation_rank", wrong, "int")
        for wrong in (1.5, 4.0, None, True, "four", "0.5", "", [4])
    ),
    ("start_powerSGD_iter", 7, OK),
    ("start_powerSGD_iter", 0.25, OK),
    ("start_powerSGD_iter", None, OK),
    ("start_powerSGD_iter", "4", 4),
    ("start_powerSGD_iter", "0.5", 0.5),
    ("start_powerSGD_iter", "1e-8", 1e-8),
    ("start_powerSGD_iter", -1, NUMBER_OF_STEPS),
    ("start_powerSGD_iter", 2**63, f"a number of steps, {2**62} at most"),
    *(("start_powerSGD_iter", wrong, FRACTION) for wrong in (1.0, 0.0, -0.5, float("inf"))),
    *(
        ("start_powerSGD_iter", wrong, "int or float or None")
        for wrong in ("soon", True, "true", "", [1], {"a": 1})
    ),
    ("min_compression_rate", 3, 3.0),
    ("min_compression_rate", "1e-1", 0.1),
    *(("min_compression_rate", wrong, "a positive number") for wrong in (0.0, -1.0, float("inf"))),
    *(("min_compression_rate", wrong, "float") for wrong in (False, "much", 10**400)),
    ("orthogonalization_epsilon", -1e-8, "0 or a small positive number"),
    ("warm_start", False, OK),
    ("warm_start", "yes", True),
    ("warm_start", "Off", False),
    # OmegaConf takes 4 for True.
    *(("warm_start", wrong, "True or False") for wrong in (4, 0, 0.0, None, "maybe", "1")),
    ("random_seed", "x", "int"),
    ("compression_stats_logging_frequency", 1.5, "int"),
    ("exclude", ["*embed*", "head.?.weight"], OK),
    ("exclude", [""], "patterns that are not empty"),
    *(("exclude", wrong, "a list of text") for wrong in ("*embed*", {"*embed*": True}, [None])),
]


def _from_python(name: str, value: Any, folder: Path) -> Any:
    return PowerSGD(**{name: value})


def _from_a_name(name: str, value: Any, folder: Path) -> Any:
    return HookRequest.parse("powerSGD", hook_options={name: value}).config


def _from_yaml(name: str, value: Any, folder: Path) -> Any:
    path = folder / "hook.yaml"
    path.write_text(
        yaml.safe_dump({"hook": "powerSGD", "total_steps": 9, "hook_options": {name: value}})
    )
    return CommHookKwargs.from_config(path).request.config


def _from_the_environment(name: str, value: Any, folder: Path) -> Any:
    with mock.patch.dict(os.environ, OPTION=value):
        return _from_yaml(name, "${oc.env:OPTION}", folder)


def _from_a_flag(name: str, value: Any, folder: Path) -> Any:
    options = parse_options([f"{name}={value}"])
    return HookRequest.parse("powerSGD", hook_options=options).config


@pytest.mark.parametrize(("name", "value", "expected"), VALUES)
def test_all_channels_take_and_refuse_the_same(
    name: str, value: Any, expected: Any, tmp_path: Path
) -> None:
    channels: list[Callable[..., Any]] = [_from_python, _from_a_name, _from_yaml]
    if isinstance(value, str):
        channels += [_from_the_environment]
        # read as None, as 1, and not at all
        channels += [] if value in ("", "1", "*embed*") else [_from_a_flag]
    for channel in channels:
        if isinstance(expected, str):
            with pytest.raises(HookConfigError) as raised:
                channel(name, value, tmp_path)
            assert f"PowerSGD: {name}=" in str(raised.value) and f"; expected {expected}" in str(
                raised.value
            )
        else:
            value_read = getattr(channel(name, value, tmp_path), name)
            wanted = value if expected is OK else expected
            assert (
                value_read == wanted
                and type(value_read) is type(wanted)
                and (value_read is not value or type(value) is not list)
            )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("matrix_approximation_rank", np.int64(2), 2),
        ("min_compression_rate", np.float32(1.5), 1.5),
        ("min_compression_rate", np.int32(3), 3.0),
        ("start_powerSGD_iter", np.float64(0.25), 0.25),
        ("start_powerSGD_iter", np.uint8(7), 7),
        ("warm_start", np.bool_(False), False),
        ("warm_start", np.int64(1), "True or False"),
        ("matrix_approximation_rank", np.bool_(True), "int"),
    ],
)
def test_numbers_of_numpy_are_those_of_python(
    name: str, value: Any, expected: Any, tmp_path: Path
) -> None:
    for channel in (_from_python, _from_a_name):
        if isinstance(expected, str):
            with pytest.raises(HookConfigError, match=f"expected {expected}"):
                channel(name, value, tmp_path)
        else:
            value_read = getattr(channel(name, value, tmp_path), name)
            assert value_read == expected and type(value_read) is type(expected)


def test_arguments_of_all_front_ends_take_numbers_of_numpy() -> None:
    request = HookRequest.parse(
        "powerSGD",
        hook_options={"start_powerSGD_iter": np.int64(3)},
        strict=np.bool_(False),
        total_steps=np.int64(9),
        check_every=np.int32(4),
        ranks_per_node=np.uint8(2),
    )
    arguments = (request.strict, request.total_steps, request.check_every, request.ranks_per_node)
    assert arguments == (False, 9, 4, 2) and [type(argument) for argument in arguments] == [
        bool,
        int,
        int,
        int,
    ]
    handler = CommHookKwargs(
        hook="int8", total_steps=np.int64(9), hook_options={"block_size": np.int64(64)}
    )
    assert handler.request.total_steps == 9 and handler.request.config.block_size == 64
    assert CommHookMonitor(every_n_steps=np.int64(5)).every_n_steps == 5
    state = commhooks.PowerSGDState(
        None, np.int64(2), start_powerSGD_iter=np.int64(4), warm_start=np.bool_(False)
    )
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter, state.warm_start) == (
        2,
        4,
        False,
    )
    members = commhooks.Torchft(
        min_machines=np.int64(2), timeout_s=np.float32(8), leave_s=np.int64(3)
    )
    assert (members.min_machines, members.timeout_s, members.leave_s) == (2, 8.0, 3) and type(
        members.leave_s
    ) is int


def test_every_option_is_in_the_table_of_values() -> None:
    names = {field.name for field in dataclasses.fields(PowerSGD)}
    # as bools
    assert names - {name for name, *_ in VALUES} == {
        "use_error_feedback",
        "batch_tensors_with_same_shape",
    }


@pytest.mark.parametrize(
    "config",
    [commhooks.AllReduce, commhooks.Noop, commhooks.PowerSGD, commhooks.DiLoCo, commhooks.Auto],
)
def test_a_config_is_frozen_and_a_structured_config_of_omegaconf(config: Any) -> None:
    assert OmegaConf.to_object(OmegaConf.structured(config)) == config()
    values = {"exclude": ["head.?.weight"]} if hasattr(config(), "exclude") else {}
    made = config(**values)
    through_yaml = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(made)))
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config), through_yaml)) == made
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.anything = 1


def test_the_defaults_are_those_of_torch_but_for_the_start() -> None:
    theirs = inspect.signature(commhooks.PowerSGDState).parameters
    for field in dataclasses.fields(PowerSGD):
        if field.name != "exclude":  # needs names, of which a PowerSGDState has none
            expected = None if field.name == "start_powerSGD_iter" else theirs[field.name].default
            assert field.default == expected, field.name
    with pytest.raises(HookConfigError, match="matrix_approximation_rank=0"):
        commhooks.PowerSGDState(None, matrix_approximation_rank=0)


# ---- Hydra, which passes OmegaConf's containers to what it makes ---------------------------------

YAML = """
rank: 4
options: {matrix_approximation_rank: "${rank}", exclude: ["*embed*", head.weight]}
nested: {sizes: [1, {b: "${rank}"}]}
"""


def test_containers_are_the_dicts_and_lists_that_they_stand_for() -> None:
    settings: DictConfig = OmegaConf.create(YAML)
    expected = PowerSGD(matrix_approximation_rank=4, exclude=["*embed*", "head.weight"])
    assert CommHookDDP("powerSGD", hook_options=settings.options)._request.config == expected
    made = PowerSGD(**settings.options)
    assert (
        made == expected and type(made.exclude) is list and pickle.loads(pickle.dumps(made)) == made
    )
    assert HookRequest.parse(
        "powerSGD", hook_options={"exclude": ListConfig(["a"])}
    ).config == PowerSGD(exclude=["a"])
    with mock.patch.dict(
        "commhooks.registry.FACTORIES", of_the_user=lambda options, group: (None, print)
    ):
        options = HookRequest.parse("of_the_user", hook_options=settings.nested).options
        assert (
            type(HookRequest.parse("of_the_user", hook_options={"a": ListConfig([1])}).options["a"])
            is list
        )
    assert options == {"sizes": [1, {"b": 4}]} and PowerSGD(exclude=("a",)).exclude == ["a"]  # type: ignore[arg-type]
    assert type(options["sizes"]) is list and type(options["sizes"][1]) is dict


@pytest.mark.parametrize("text", ["???", "${nowhere}"])
def test_a_value_that_is_not_there_is_an_error_with_its_name(text: str) -> None:
    options = OmegaConf.create({"matrix_approximation_rank": text})
    with pytest.raises(HookConfigError, match="hook_options: matrix_approximation_rank: "):
        HookRequest.parse("powerSGD", hook_options=options)
    with pytest.raises(HookConfigError, match="PowerSGD: exclude: "):
        PowerSGD(exclude=ListConfig([text]))


# ---- LightningCLI --------------------------------------------------------------------------------

CLI_CASES: list[dict[str, Any]] = [
    {
        "matrix_approximation_rank": 4,
        "start_powerSGD_iter": 7,
        "min_compression_rate": 2,
        "exclude": ["*embed*"],
    },
    {"start_powerSGD_iter": 0.25, "warm_start": False},
    {"matrix_approximation_rank": 0},
]


def _cli(hook: Any, **init_args: Any) -> str:
    """The configuration of the strategy, or "refused" if the error names the option."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as text:
        path = cli_config(Path(folder, "c.yaml"), "CommHookDDP", hook=hook, **init_args)
        with mock.patch.object(sys, "argv", ["program"]):
            try:
                cli = LightningCLI(
                    Model,
                    args=["--config", path],
                    run=False,
                    save_config_callback=None,
                    seed_everything_default=False,
                )
            except (
                SystemExit,
                ValueError,
            ) as error:  # jsonargparse's own, with our sentence or its own in it
                assert "matrix_approximation_rank" in text.getvalue() + str(error)
                return "refused"
    return repr(cli.trainer.strategy._request.config)


def print_cli_outcomes() -> None:
    """Per case: the options of a config class, and those of a hook by name."""
    results = [
        [
            _cli({"class_path": "commhooks.PowerSGD", "init_args": options}),
            _cli("powerSGD", hook_options=options),
        ]
        for options in CLI_CASES
    ]
    print(json.dumps(results))


@whole_numbers_in_config_classes
def test_lightning_cli_takes_and_refuses_the_same() -> None:
    """A process of its own is needed: in a shared one jsonargparse has read the step 7 as 7.0."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    python = warm.python("lightning.pytorch", "accelerate")
    done = subprocess.run([python, __file__], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout.splitlines()[-1])
    assert first == [repr(PowerSGD(**CLI_CASES[0]))] * 2
    assert second == [repr(PowerSGD(**CLI_CASES[1]))] * 2
    assert third == ["refused"] * 2


if __name__ == "__main__":
    print_cli_outcomes()
