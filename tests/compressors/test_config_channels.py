"""The same options in Python, as `hook_options`, in YAML and with LightningCLI: the same configuration, or refused by
all."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightning.pytorch.cli import LightningCLI

from accelerate_commhooks import CommHookKwargs
from commhooks import HookConfigError, PowerSGD
from commhooks.request import HookRequest
from tests.support.features import whole_numbers_in_config_classes
from tests.support.lightning_support import Model

Options = dict[str, Any]

FOLDER = tempfile.TemporaryDirectory(prefix="commhooks-channels-")  # for hypothesis, which takes no fixtures


def _yaml(options: Options) -> Any:
    path = Path(FOLDER.name, "hook.yaml")
    path.write_text(yaml.safe_dump({"hook": "powerSGD", "total_steps": 1000, "hook_options": options}))
    return CommHookKwargs.from_config(path).request.config


CHANNELS: dict[str, Callable[[Options], Any]] = {
    "a config object": lambda options: PowerSGD(**options),
    "hook_options": lambda options: HookRequest.parse("powerSGD", hook_options=options).config,
    "YAML": _yaml,
}


def outcome(channel: Callable[[Options], Any], options: Options) -> str:
    """The configuration, or "refused" if the error names an option."""
    try:
        return repr(channel(options))
    except HookConfigError as error:
        assert any(name in str(error) for name in options), (options, str(error))
        return "refused"


numbers = st.one_of(
    st.integers(-3, 10),
    st.integers(),
    st.sampled_from([2**31, 2**62, 2**63, 10**30, 10**400, -(10**400)]),
    st.floats(),
    st.floats(0, 1),
)
values = st.one_of(numbers, st.booleans(), st.none(), st.lists(st.integers(), max_size=2), st.just({"a": 1}))
likely = {
    "matrix_approximation_rank": st.integers(1, 64),
    "start_powerSGD_iter": st.one_of(st.none(), st.integers(0, 10**6), st.floats(0.001, 0.999)),
    "min_compression_rate": st.floats(0.5, 100),
    "use_error_feedback": st.booleans(),
    "warm_start": st.booleans(),
    "orthogonalization_epsilon": st.floats(0, 1),
    "random_seed": st.integers(),
    "compression_stats_logging_frequency": st.integers(1, 10**6),
    "batch_tensors_with_same_shape": st.booleans(),
    "exclude": st.lists(st.sampled_from(["*embed*", "head.?", "[ab]*", "0.weight"]), max_size=2),
}


@st.composite
def options(draw: st.DrawFn) -> Options:
    """Mostly sensible options, at most one of which may be anything."""
    names = draw(st.lists(st.sampled_from(sorted(likely)), min_size=1, max_size=4, unique=True))
    chosen = {name: draw(likely[name]) for name in names}
    if draw(st.booleans()):
        chosen[draw(st.sampled_from(names))] = draw(values)
    return chosen


OUTCOMES: list[str] = []


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(options())
@example({"warm_start": 4})  # OmegaConf would take it for True
@example({"use_error_feedback": 0.0})
def _alike(chosen: Options) -> None:
    got = {name: outcome(channel, chosen) for name, channel in CHANNELS.items()}
    assert len(set(got.values())) == 1, (chosen, got)
    OUTCOMES.append(got["YAML"])


def test_all_channels_accept_and_refuse_the_same() -> None:
    OUTCOMES.clear()
    _alike()
    assert 8 < OUTCOMES.count("refused") < 0.7 * len(OUTCOMES) and len(set(OUTCOMES)) > 20


TEXTS = ["4", "0.5", " 8 ", "1e-8", "1_000", "yes", "Off", "true", "nan", "-1", "", "four", "None", "\ud800", "[", "0x"]


@pytest.mark.parametrize(
    "name", ["matrix_approximation_rank", "start_powerSGD_iter", "warm_start", "min_compression_rate"]
)
def test_text_is_converted_as_yaml_does(name: str) -> None:
    """`${oc.env:NAME}` and overrides give text, so that text stands for a number."""
    taken = [text for text in TEXTS if outcome(CHANNELS["hook_options"], {name: text}) != "refused"]
    assert (
        taken
        == {
            "matrix_approximation_rank": ["4", " 8 ", "1_000"],
            "start_powerSGD_iter": ["4", "0.5", " 8 ", "1e-8", "1_000"],
            "warm_start": ["yes", "Off", "true"],
            "min_compression_rate": ["4", "0.5", " 8 ", "1e-8", "1_000"],
        }[name]
    )


# ---- LightningCLI, which is slow: by a table ----------------------------------------------------------------------


def _cli(hook: Any, **init_args: Any) -> Any:
    strategy = {"class_path": "lightning_commhooks.CommHookDDP", "init_args": {"hook": hook, **init_args}}
    content = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "strategy": strategy}
    path = Path(FOLDER.name, "hook.yaml")
    path.write_text(yaml.safe_dump({"trainer": content}))
    text = io.StringIO()
    with mock.patch.object(sys, "argv", ["program"]), contextlib.redirect_stderr(text):
        try:
            cli = LightningCLI(
                Model, args=["--config", str(path)], run=False, save_config_callback=None, seed_everything_default=False
            )
        except (SystemExit, ValueError) as error:  # jsonargparse's own, with our sentence or its own in it
            raise HookConfigError(text.getvalue() + str(error)) from error
    return cli.trainer.strategy._request.config


CLI_CASES: list[Options] = [
    {"matrix_approximation_rank": 4, "start_powerSGD_iter": 0.25, "min_compression_rate": 2, "warm_start": False},
    {"start_powerSGD_iter": 7, "exclude": ["*embed*", "head.?.weight"]},
    {"start_powerSGD_iter": None, "matrix_approximation_rank": 8},
    {"start_powerSGD_iter": 1.0},
    {"use_error_feedback": 4},
    {"matrix_approximation_rank": 0},
]


def print_cli_outcomes() -> None:
    """Per case: the options of a config class, and those of a hook by name."""
    found = [
        (
            outcome(lambda options: _cli({"class_path": "commhooks.PowerSGD", "init_args": options}), chosen),
            outcome(lambda options: _cli("powerSGD", hook_options=options), chosen),
        )
        for chosen in CLI_CASES
    ]
    print(json.dumps(found))


@whole_numbers_in_config_classes
def test_lightning_cli() -> None:
    """In a process of its own, as a command line is: after many other tests of one process jsonargparse has been seen
    to read the step 7 as 7.0, which is refused."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    for chosen, found in zip(CLI_CASES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert found == [outcome(CHANNELS["a config object"], chosen)] * 2, chosen


if __name__ == "__main__":
    print_cli_outcomes()
