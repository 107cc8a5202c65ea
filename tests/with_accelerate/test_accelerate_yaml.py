"""The settings of `CommHookKwargs` as YAML: what is accepted, and what an error says."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.settings import Settings
from commhooks import HookConfigError
from tests.support.accelerate_yaml import ACCELERATE, section

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
def test_every_kind_of_value(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS_OF_TEST", "40")
    path = tmp_path / "hook.yaml"
    path.write_text(text)
    options = {"matrix_approximation_rank": 4, "orthogonalization_epsilon": 1e-8, "start_powerSGD_iter": 0.5}
    expected: dict[str, Any] = {"hook": "powersgd", "wrapper": "bf16", "save_residual": "mean", "strict": False}
    expected |= {"total_steps": 40, "ranks_per_node": "auto", "bucket_cap_mb": 0.5, "find_unused_parameters": True}
    handler = CommHookKwargs.from_config(path)
    assert handler == CommHookKwargs(hook_options=options, **expected)
    assert handler.to_kwargs() == {"bucket_cap_mb": 0.5, "find_unused_parameters": True}
    overrides = ["hook_options.matrix_approximation_rank=8", "wrapper=null", "total_steps=7"]
    changed = CommHookKwargs.from_config(str(path), overrides=overrides)
    expected |= {"wrapper": None, "total_steps": 7}
    assert changed == CommHookKwargs(hook_options=options | {"matrix_approximation_rank": 8}, **expected)


def test_interpolations_see_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(section("hook: powerSGD\ntotal_steps: ${num_processes}"))
    assert Settings.read(path).values == {"hook": "powerSGD", "total_steps": 2}


class State:
    """What a YAML file can name as `hook_state`."""


SHARED_STATE = {"made": "once"}


def test_hook_state_by_its_path() -> None:
    def state(path: str) -> Any:
        return Settings({"hook": "test_accelerate_yaml:State", "hook_state": path}, "file").arguments()["hook_state"]

    assert state("test_accelerate_yaml:SHARED_STATE") is SHARED_STATE
    assert isinstance(state("test_accelerate_yaml:State"), State)
    with pytest.raises(HookConfigError, match="expected 'package.module:name'"):
        state("test_accelerate_yaml.State")


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Wrong:
    text: str
    path: str
    """The full path of the key, as the message has it."""
    says: str
    overrides: tuple[str, ...] = ()


WRONG = [
    Wrong("hook: powerSGD\nwraper: fp16", "wraper", "did you mean 'wrapper'?"),
    Wrong("hook: powerSGD\ncomm_hook: fp16", "comm_hook", "did you mean 'hook'?"),
    Wrong("hook: powerSGD\nhook_options: {matrix_rank: 4}", "hook_options.matrix_rank", "'matrix_approximation_rank'?"),
    Wrong("hook: fp16\nhook_options: {a: 4}", "hook_options.a", "it has none"),
    Wrong("hook: powerSGD\nhook_options: {matrix_approximation_rank: four}", "hook_options.matrix_appr", "'four'"),
    Wrong(
        "hook: powerSGD\nhook_options: {matrix_approximation_rank: 0}",
        "hook_options.matrix_appr",
        "rank: 0; expected at least",
    ),
    Wrong("hook: powerSGD\nhook_options: 4", "hook_options", "4 is of type int; expected options, as 'name: value'"),
    Wrong("hook: powerSGD\nbucket_cap_mb: null", "bucket_cap_mb", "None"),
    Wrong("hook: powerSGD\nstrict: 3.5", "strict", "not a valid bool"),
    Wrong("hook: [powerSGD]", "hook", "['powerSGD'] is of type list; expected str"),
    Wrong("wrapper: fp16", "hook", "is missing"),
    Wrong("hook: ???", "hook", "'???' stands for a value that is still missing"),
    Wrong("hook: powerSGD\ntotal_steps: ${nowhere}", "total_steps", "its ${...} leads to 'nowhere', which is not"),
    Wrong("hook: powerSGD\ntotal_steps: ${oc.env:NO_SUCH_VARIABLE}", "total_steps", "NO_SUCH_VARIABLE"),
    Wrong("hook: powerSGD", "wraper", "did you mean 'wrapper'?", ("wraper=fp16",)),
    Wrong("hook: powerSGD", "", "override 'wrapper'; expected 'key=value'", ("wrapper",)),
    Wrong("hook: powerSGD\nhook_options: [a]", "", "x=1']: the file has a list where", ("hook_options.x=1",)),
    # These are found by CommHookKwargs itself.
    Wrong("hook: powerSDG", "hook", "did you mean 'powerSGD'?"),
    Wrong("hook: powerSGD\nwrapper: fp32", "wrapper", "'fp32'; expected one of None, 'fp16'"),
    Wrong("hook: powerSGD\nsave_residual: per_rnak", "save_residual", "did you mean 'per_rank'?"),
    Wrong("hook: powerSGD\ntotal_steps: 0", "total_steps", "0; expected a number of steps"),
    Wrong("hook: powerSGD\nhook_options: {start_powerSGD_iter: 0.1}", "hook_options.start_power", "`total_steps: N`"),
]


@pytest.mark.parametrize("as_section", [True, False], ids=["section", "file of its own"])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.text.replace("\n", ", "))
def test_errors_say_where_and_why(wrong: Wrong, as_section: bool, tmp_path: Path) -> None:
    path = tmp_path / "hook.yaml"
    path.write_text(section(wrong.text) if as_section else wrong.text)
    with pytest.raises(HookConfigError) as raised:
        CommHookKwargs.from_config(path, overrides=wrong.overrides)
    message = str(raised.value)
    full = f"comm_hook_config.{wrong.path}" if as_section else wrong.path
    assert message.startswith(f"{path}: {full if wrong.path else ''}") and wrong.says in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("comm_hook_config:\n", "comm_hook_config is empty"),
        ("comm_hook_config: powerSGD\n", "comm_hook_config is a str"),
        (ACCELERATE, "without a section 'comm_hook_config'"),
        ("- powerSGD\n", "holds a list, not settings"),
        ("hook: [", "is not YAML"),
        ("hook: fp16\nhook: bf16\n", "duplicate key hook"),
        ("comm_hook_config: ???\n", "comm_hook_config: '???' stands for a value that is still missing"),
        ("comm_hook_confg:\n  hook: powerSGD\n", "comm_hook_confg: the section for the hook is called comm_"),
        ("comm_hook: {hook: powerSGD}\n", "comm_hook: the section for the hook is called comm_hook_config"),
        ("wrapper: ${", "wrapper: '${' begins a reference to another key that cannot be read"),
    ],
)
def test_files_that_hold_no_settings(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "hook.yaml"
    path.write_text(text)
    with pytest.raises(HookConfigError) as raised:
        CommHookKwargs.from_config(path)
    assert str(path) in str(raised.value) and says in str(raised.value)


def test_no_file_and_wrong_overrides(tmp_path: Path) -> None:
    with pytest.raises(HookConfigError, match="cannot be read: No such file"):
        CommHookKwargs.from_config(tmp_path / "nothing.yaml")
    with pytest.raises(HookConfigError, match="expected a list of texts"):
        CommHookKwargs.from_config(tmp_path / "nothing.yaml", overrides="wrapper=fp16")
