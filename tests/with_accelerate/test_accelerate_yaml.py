"""The settings of `CommHookKwargs` as YAML: what is accepted, and what an error says."""

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


WRONG: dict[str, tuple[str, ...]] = {
    # text: what the message says after the file and the section, and overrides
    "hook: powerSGD\nwraper: fp16": (
        " has no setting 'wraper' (did you mean 'wrapper'?); known are hook, hook_options",
    ),
    "hook: powerSGD\nhook_options: {matrix_rank: 4}": (
        ": hook 'powerSGD' has no option 'matrix_rank' (did you mean 'matrix_approximation_rank'?); known are ",
    ),
    "hook: powerSGD\nhook_options: {min_compression_rate: four}": (
        ": PowerSGD: min_compression_rate='four'; expected f",
    ),
    "hook: powerSGD\nhook_options: {min_compression_rate: 0}": (": PowerSGD: min_compression_rate=0.0; expected a",),
    "hook: powerSGD\nhook_options: 4": (": hook_options=4; expected a dict or None",),
    "hook: powerSGD\nbucket_cap_mb: null": (": bucket_cap_mb=None; expected int or float",),
    "hook: powerSGD\nstrict: 3.5": (": strict=3.5; expected True or False",),
    "hook: [powerSGD]": (": hook=['powerSGD']; expected str",),
    "wrapper: fp16": (": hook is missing",),
    "hook: ???": ("hook: Missing mandatory value: ",),
    "hook: powerSGD\ntotal_steps: ${nowhere}": ("total_steps: Interpolation key 'nowhere' not found",),
    "hook: powerSGD\ntotal_steps: ${oc.env:NO_SUCH}": ("Environment variable 'NO_SUCH' not found",),
    "hook: powerSDG": (": unknown hook 'powerSDG' (did you mean 'powerSGD'?)",),
    "hook: powerSGD\nwrapper: fp61": (": wrapper='fp61'; expected one of None, 'fp16', 'bf16' (did you",),
    "hook: powerSGD\nhook_options: {start_powerSGD_iter: 0.1}": (": start_powerSGD_iter=0.1 is a fraction of the run",),
    "hook: fp16": (" has no setting 'wraper' (did you mean 'wrapper'?)", "wraper=fp16"),
    "hook: bf16": (": override 'wrapper'; expected 'key=value'", "wrapper"),
    "hook: powerSGD\nhook_options: [a]": (": overrides ['hook_options.x=1']: the file has a list", "hook_options.x=1"),
    "hook: int8": (": overrides ['hook_options.exclude=[*x*]']: while scanning an alias", "hook_options.exclude=[*x*]"),
}


@pytest.mark.parametrize("as_section", [True, False], ids=["section", "file of its own"])
@pytest.mark.parametrize("text", WRONG, ids=lambda text: text.replace("\n", ", "))
def test_errors_say_where_and_why(text: str, as_section: bool, tmp_path: Path) -> None:
    path = tmp_path / "hook.yaml"
    path.write_text(section(text) if as_section else text)
    says, *overrides = WRONG[text]
    with pytest.raises(HookConfigError) as raised:
        CommHookKwargs.from_config(path, overrides=overrides)
    assert str(raised.value).startswith(str(path)) and says in str(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", " is empty"),
        ("comm_hook_config:\n", ", section comm_hook_config is empty"),
        ("comm_hook_config: powerSGD\n", ", section comm_hook_config is a str"),
        (ACCELERATE, ": no section 'comm_hook_config'"),
        (
            ACCELERATE + "comm_hook_confg: {hook: fp16}\n",
            ": no section 'comm_hook_config' (did you mean 'comm_hook_confg'?)",
        ),
        ("comm_hook_confg: {hook: fp16}\n", " has no setting 'comm_hook_confg' (did you mean 'comm_hook_config'?)"),
        (
            "hook: int8\nhook_options: {}\ncomm_hook_config: {hook: fp16}\n",
            ": hook and hook_options beside comm_hook_config",
        ),
        ("- powerSGD\n", " holds a list, not settings"),
        ("hook: [", " is not YAML"),
        ("hook: fp16\nhook: bf16\n", "duplicate key hook"),
        ("comm_hook_config: ???\n", ": comm_hook_config: Missing mandatory value"),
        ("wrapper: ${", " is not YAML: "),
    ],
)
def test_files_that_hold_no_settings(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "hook.yaml"
    path.write_text(text)
    with pytest.raises(HookConfigError) as raised:
        CommHookKwargs.from_config(path)
    assert str(raised.value).startswith(f"{path}{says}") or says in str(raised.value)


def test_no_file_and_wrong_overrides(tmp_path: Path) -> None:
    with pytest.raises(HookConfigError, match="cannot be read: No such file"):
        CommHookKwargs.from_config(tmp_path / "nothing.yaml")
    with pytest.raises(HookConfigError, match="expected a list of texts"):
        CommHookKwargs.from_config(tmp_path / "nothing.yaml", overrides="wrapper=fp16")
