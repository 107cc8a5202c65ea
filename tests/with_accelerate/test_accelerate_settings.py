"""The settings of `CommHookKwargs` in YAML and the environment: values, precedence, errors."""

import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.yaml_settings import VARIABLE, Settings
from commhooks import HookConfigError, PowerSGD
from tests.support.accelerators import ACCELERATE, section

FULL = """\
hook: powersgd
hook_options:
  matrix_approximation_rank: 4
  orthogonalization_epsilon: 1e-8
  start_powerSGD_iter: 0.5
wrapper: bf16
save_residual: mean
strict: no
total_steps: ${oc.env:STEPS_OF_TEST}
ranks_per_node: auto
bucket_cap_mb: 0.5
find_unused_parameters: true
"""


@pytest.mark.parametrize("text", [FULL, section(FULL)], ids=["file of its own", "section"])
def test_every_kind_of_value_is_read(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS_OF_TEST", "40")
    path = tmp_path / "hook.yaml"
    path.write_text(text)
    options = {
        "matrix_approximation_rank": 4,
        "orthogonalization_epsilon": 1e-8,
        "start_powerSGD_iter": 0.5,
    }
    expected: dict[str, Any] = {
        "hook": "powersgd",
        "wrapper": "bf16",
        "save_residual": "mean",
        "strict": False,
    }
    expected |= {
        "total_steps": 40,
        "ranks_per_node": "auto",
        "bucket_cap_mb": 0.5,
        "find_unused_parameters": True,
    }
    handler = CommHookKwargs.from_config(path)
    assert handler == CommHookKwargs(hook_options=options, **expected)
    assert handler.to_kwargs() == {"bucket_cap_mb": 0.5, "find_unused_parameters": True}
    overrides = ["hook_options.matrix_approximation_rank=8", "wrapper=null", "total_steps=7"]
    changed = CommHookKwargs.from_config(str(path), overrides=overrides)
    expected |= {"wrapper": None, "total_steps": 7}
    assert changed == CommHookKwargs(
        hook_options=options | {"matrix_approximation_rank": 8}, **expected
    )


def test_interpolations_see_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(section("hook: powerSGD\ntotal_steps: ${num_processes}"))
    assert Settings.read(path).values == {"hook": "powerSGD", "total_steps": 2}


class State:
    """What a YAML file can name as `hook_state`."""


SHARED_STATE = {"made": "once"}


def test_a_hook_state_is_found_by_its_path() -> None:
    def state(path: str) -> Any:
        return Settings(
            {"hook": "test_accelerate_settings:State", "hook_state": path}, "file"
        ).arguments()["hook_state"]

    assert state("test_accelerate_settings:SHARED_STATE") is SHARED_STATE
    assert isinstance(state("test_accelerate_settings:State"), State)
    with pytest.raises(HookConfigError, match="expected 'package.module:name'"):
        state("test_accelerate_settings.State")


@pytest.mark.parametrize("written", ["null", "~", "off", "none", "None", '"off"'])
def test_every_way_to_write_no_hook_is_understood(written: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        section(f"hook: {written}\nhook_options: {{matrix_approximation_rank: 2}}\nwrapper: bf16")
    )
    assert CommHookKwargs.from_config(file).off


# ---- what is wrong -------------------------------------------------------------------------------


WRONG = [
    # content of the file or section, what the message says after its name, overrides
    (
        "hook: powerSGD\nwraper: fp16",
        " has no setting 'wraper' (did you mean 'wrapper'?); known are hook, hook_options",
    ),
    (
        "hook: powerSGD\nhook_options: {matrix_rank: 4}",
        ": hook 'powerSGD' has no option 'matrix_rank' (did you mean",
    ),
    ("hook: powerSGD\nhook_options: 4", ": hook_options=4; expected a dict or None"),
    ("hook: powerSGD\nbucket_cap_mb: null", ": bucket_cap_mb=None; expected int or float"),
    ("hook: powerSGD\nstrict: 3.5", ": strict=3.5; expected True or False"),
    ("wrapper: fp16", ": hook is missing"),
    ("hook: ???", "hook: Missing mandatory value: "),
    (
        "hook: powerSGD\ntotal_steps: ${nowhere}",
        "total_steps: Interpolation key 'nowhere' not found",
    ),
    ("hook: powerSDG", ": unknown hook 'powerSDG' (did you mean 'powerSGD'?)"),
    (
        "hook: powerSGD\nhook_options: {start_powerSGD_iter: 0.1}",
        ": start_powerSGD_iter=0.1 is a fraction of the run",
    ),
    ("hook: fp16", " has no setting 'wraper' (did you mean 'wrapper'?)", "wraper=fp16"),
    ("hook: bf16", ": override 'wrapper'; expected 'key=value'", "wrapper"),
    ("hook: bf16", ": hook: no viable alternative at input '${'", "hook=${"),
    ("hook: '${'", "hook: no viable alternative at input '${'"),
    (
        "hook: powerSGD\nhook_options: [a]",
        ": overrides ['hook_options.x=1']: the file has a list where",
        "hook_options.x=1",
    ),
    (
        "hook: int8",
        ": overrides ['hook_options.exclude=[*x*]']: while scanning an alias",
        "hook_options.exclude=[*x*]",
    ),
]
NO_SETTINGS = [
    # content of a file, what the message says after its name
    ("", " is empty"),
    ("comm_hook_config:\n", ", section comm_hook_config is empty"),
    ("comm_hook_config: powerSGD\n", ", section comm_hook_config is a str"),
    (
        ACCELERATE + "comm_hook_confg: {hook: fp16}\n",
        ": no section 'comm_hook_config' (did you mean 'comm_hook_confg'?)",
    ),
    (
        "comm_hook_confg: {hook: fp16}\n",
        " has no setting 'comm_hook_confg' (did you mean 'comm_hook_config'?)",
    ),
    (
        "hook: int8\nhook_options: {}\ncomm_hook_config: {hook: fp16}\n",
        ": hook and hook_options outside comm_hook_config",
    ),
    ("- powerSGD\n", " is a list; expected settings"),
    ("hook: [", " is not YAML"),
    ("hook: fp16\nhook: bf16\n", "duplicate key hook"),
    ("comm_hook_config: ???\n", ": comm_hook_config: Missing mandatory value"),
    (
        "comm_hook_config: ${comm_hook_config}\n",
        ": comm_hook_config: Recursive interpolation detected",
    ),
]


@pytest.mark.parametrize(
    ("text", "says", "overrides"),
    [(kind(text), says, more) for text, says, *more in WRONG for kind in (str, section)]
    + [(text, says, []) for text, says in NO_SETTINGS],
)
def test_errors_say_where_and_why(
    text: str, says: str, overrides: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "hook.yaml"
    path.write_text(text)
    with pytest.raises(HookConfigError) as raised:
        CommHookKwargs.from_config(path, overrides=overrides)
    assert str(raised.value).startswith(str(path)) and says in str(raised.value)


def test_no_file_and_wrong_overrides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HookConfigError, match="cannot be read: No such file"):
        CommHookKwargs.from_config(tmp_path / "nothing.yaml")
    with pytest.raises(HookConfigError, match="is a str; expected a list of str"):
        CommHookKwargs.from_config(tmp_path / "nothing.yaml", overrides="wrapper=fp16")


# ---- in the environment --------------------------------------------------------------------------


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "hook.yaml"
    path.write_text(
        "hook: powerSGD\nhook_options: {matrix_approximation_rank: 4}\nwrapper: bf16\nstrict:"
        " false\n"
    )
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_the_variable_names_a_file(named: Path) -> None:
    expected = CommHookKwargs(
        hook="powerSGD", hook_options={"matrix_approximation_rank": 4}, wrapper="bf16", strict=False
    )
    assert CommHookKwargs() == CommHookKwargs.from_config() == expected
    overridden = CommHookKwargs.from_config(
        overrides=["hook_options.matrix_approximation_rank=8", "strict=true"]
    )
    assert overridden.hook_options == {"matrix_approximation_rank": 8} and overridden.strict


def test_an_argument_comes_before_the_environment_and_the_default(named: Path) -> None:
    handler = CommHookKwargs(wrapper=None, strict=True, bucket_cap_mb=7)
    assert (handler.wrapper, handler.strict, handler.bucket_cap_mb) == (None, True, 7)  # argument
    # environment
    assert (handler.hook, handler.hook_options) == (
        "powerSGD",
        {"matrix_approximation_rank": 4},
    )
    assert handler.save_residual == "per_rank"  # default
    # A hook given as an argument leaves nothing of the environment, which describes another hook.
    for kwargs in (
        {"hook": None},
        {"hook": "allreduce"},
        {"hook": PowerSGD()},
        {"comm_hook": "fp16"},
    ):
        handler = CommHookKwargs(**kwargs)
        assert (handler.wrapper, handler.strict, handler.hook_options) == (None, True, None)
    other = named.with_name("other.yaml")
    other.write_text("hook: allreduce\n")
    assert CommHookKwargs.from_config(other) == CommHookKwargs(hook="allreduce")


def test_settings_from_the_launcher_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        VARIABLE, Settings({"hook": "powerSGD", "strict": False}, "a.yaml").to_environment()
    )
    assert CommHookKwargs.from_config(overrides=["strict=true"]) == CommHookKwargs(
        hook="powerSGD", strict=True
    )
    with pytest.raises(
        HookConfigError, match=r"^a.yaml has no setting 'stric' \(did you mean 'strict'\?\)"
    ):
        CommHookKwargs.from_config(overrides=["stric=true"])


def test_copies_do_not_ask_the_environment_again(named: Path) -> None:
    handler = CommHookKwargs(strict=True)
    with mock.patch.dict(os.environ, {VARIABLE: "/nothing.yaml"}):
        other = pickle.loads(pickle.dumps(handler))
        assert other == handler and other.given == handler.given


def test_wrong_content_of_the_variable_is_refused(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("/no/such/file.yaml", "{", "{}", '{"settings": 3, "source": "x"}'):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(HookConfigError, match=VARIABLE):
            CommHookKwargs()
    named.write_text("hook: powerSDG")
    monkeypatch.setenv(VARIABLE, str(named))
    with pytest.raises(HookConfigError, match="hook.yaml: unknown hook 'powerSDG'"):
        CommHookKwargs()
    with pytest.raises(HookConfigError, match="^wrapper='fp61'"):  # which the file does not hold
        CommHookKwargs(hook="powerSGD", wrapper="fp61")


def test_a_missing_hook_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in (None, "", "  "):
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(HookConfigError, match=f"needs hook=.*{VARIABLE}"):
            CommHookKwargs()
        with pytest.raises(HookConfigError, match=f"without a path, and {VARIABLE} is not set"):
            CommHookKwargs.from_config()
