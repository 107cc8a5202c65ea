"""The settings of `CommHookKwargs` as YAML: what is accepted, what an error says, and what wins over what."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerators import launched, new_accelerator
from training import make_model

from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.cli import main
from accelerate_commhooks.handed_over import VARIABLE, HandedOver, handed_over, unused
from accelerate_commhooks.section_file import write_section
from accelerate_commhooks.yaml_config import STOCK_HOOK_FIELDS, CommHookConfig, read_settings, to_arguments
from commhooks import HookConfigError, PowerSGD

ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n"


def section(text: str) -> str:
    return ACCELERATE + "comm_hook_config:\n" + "".join(f"  {line}\n" for line in text.splitlines())


def test_the_keys_are_the_arguments() -> None:
    """One vocabulary: what `CommHookKwargs` takes and what the YAML takes are the same, with the same defaults."""
    python = {f.name: f.default for f in dataclasses.fields(CommHookKwargs) if f.name not in STOCK_HOOK_FIELDS}
    yaml = {f.name: f.default for f in dataclasses.fields(CommHookConfig)}
    assert python | {"hook": "???"} == yaml  # in YAML it is mandatory


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
    expected |= {"total_steps": 40, "bucket_cap_mb": 0.5, "find_unused_parameters": True}
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
    assert read_settings(path) == {"hook": "powerSGD", "total_steps": 2}


class State:
    """What a YAML file can name as `hook_state`."""


SHARED_STATE = {"made": "once"}


def test_hook_state_by_its_path() -> None:
    named = {"hook": "test_accelerate_yaml:State", "hook_state": "test_accelerate_yaml:SHARED_STATE"}
    assert to_arguments(named)["hook_state"] is SHARED_STATE
    assert isinstance(to_arguments({"hook_state": "test_accelerate_yaml:State"})["hook_state"], State)
    for path, text in [
        ("no_such_module:x", "cannot import 'no_such_module'"),
        ("test_accelerate_yaml:nothing", "has no 'nothing'"),
    ]:
        with pytest.raises(HookConfigError, match=text):
            to_arguments({"hook_state": path})
    with pytest.raises(HookConfigError, match="expected 'package.module:name'"):
        to_arguments({"hook_state": "test_accelerate_yaml.State"})


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
    Wrong("hook: powerSGD\nhook_options: {matrix_approximation_rank: null}", "hook_options.matrix_appr", "None"),
    Wrong("hook: powerSGD\nhook_options: {matrix_approximation_rank: 0}", "hook_options", "expected at least 1"),
    Wrong("hook: powerSGD\nhook_options: 4", "hook_options", "Cannot assign int"),
    Wrong("hook: powerSGD\nbucket_cap_mb: many", "bucket_cap_mb", "'many'"),
    Wrong("hook: powerSGD\nbucket_cap_mb: null", "bucket_cap_mb", "None"),
    Wrong("hook: powerSGD\nstrict: 3.5", "strict", "not a valid bool"),
    Wrong("hook: null", "hook", "None"),
    Wrong("hook: [powerSGD]", "hook", "Cannot convert"),
    Wrong("wrapper: fp16", "hook", "is missing"),
    Wrong("hook: ???", "hook", "Missing mandatory value"),
    Wrong("hook: powerSGD\ntotal_steps: ${nowhere}", "total_steps", "'nowhere' not found"),
    Wrong("hook: powerSGD\ntotal_steps: ${oc.env:NO_SUCH_VARIABLE}", "total_steps", "NO_SUCH_VARIABLE"),
    Wrong("hook: powerSGD", "wraper", "did you mean 'wrapper'?", ("wraper=fp16",)),
    Wrong("hook: powerSGD", "", "override 'wrapper'; expected 'key=value'", ("wrapper",)),
    # These are found by CommHookKwargs itself.
    Wrong("hook: powerSDG", "", "did you mean 'powerSGD'?"),
    Wrong("hook: powerSGD\nwrapper: fp32", "", "wrapper='fp32'"),
    Wrong("hook: powerSGD\nsave_residual: per_rnak", "", "did you mean 'per_rank'?"),
    Wrong("hook: powerSGD\ntotal_steps: 0", "", "total_steps=0"),
    Wrong("hook: powerSGD\nhook_options: {start_powerSGD_iter: 0.1}", "", "total_steps"),
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
        ("- powerSGD\n", "ListConfig"),
        ("hook: [", "is not YAML"),
        ("hook: fp16\nhook: bf16\n", "duplicate key hook"),
        ("comm_hook_config: ???\n", "Missing mandatory value: comm_hook_config"),
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


# ---- the environment -------------------------------------------------------------------------------------------------


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "hook.yaml"
    path.write_text("hook: powerSGD\nhook_options: {matrix_approximation_rank: 4}\nwrapper: bf16\nstrict: false\n")
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_the_variable_names_a_file(named: Path) -> None:
    expected = CommHookKwargs(
        hook="powerSGD", hook_options={"matrix_approximation_rank": 4}, wrapper="bf16", strict=False
    )
    assert CommHookKwargs() == CommHookKwargs.from_config() == expected
    overridden = CommHookKwargs.from_config(overrides=["hook_options.matrix_approximation_rank=8", "strict=true"])
    assert overridden.hook_options == {"matrix_approximation_rank": 8} and overridden.strict


def test_argument_over_environment_over_default(named: Path) -> None:
    handler = CommHookKwargs(wrapper=None, strict=True, bucket_cap_mb=7)
    assert (handler.wrapper, handler.strict, handler.bucket_cap_mb) == (None, True, 7)  # argument
    assert (handler.hook, handler.hook_options) == ("powerSGD", {"matrix_approximation_rank": 4})  # environment
    assert handler.save_residual == "per_rank"  # default
    # A hook given as an argument leaves nothing of the environment, which describes another hook.
    for kwargs in ({"hook": "allreduce"}, {"hook": PowerSGD()}, {"comm_hook": "fp16"}):
        handler = CommHookKwargs(**kwargs)
        assert (handler.wrapper, handler.strict, handler.hook_options) == (None, True, None)
    other = named.with_name("other.yaml")
    other.write_text("hook: allreduce\n")
    assert CommHookKwargs.from_config(other) == CommHookKwargs(hook="allreduce")


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda handler: pickle.loads(pickle.dumps(handler))])
def test_copies_do_not_ask_the_environment_again(named: Path, way: Any) -> None:
    handler = CommHookKwargs(strict=True)
    with mock.patch.dict(os.environ, {VARIABLE: "/nothing.yaml"}):
        assert way(handler) == handler
        assert way(handler)._handed_over == handler._handed_over


def test_wrong_content_of_the_variable(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("/no/such/file.yaml", "{", "{}", '{"settings": 3, "source": "x", "used": null}'):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(HookConfigError, match=VARIABLE):
            CommHookKwargs()
    named.write_text("hook: powerSDG")
    monkeypatch.setenv(VARIABLE, str(named))
    with pytest.raises(HookConfigError, match="hook.yaml: unknown hook 'powerSDG'"):
        CommHookKwargs()


def test_nothing_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "  "):
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(HookConfigError, match=f"needs hook=.*{VARIABLE}"):
            CommHookKwargs()
        with pytest.raises(HookConfigError, match=f"nothing was handed over.*{VARIABLE}"):
            CommHookKwargs.from_config()


# ---- what the launcher hands over must be used -----------------------------------------------------------------------


def given_by_launcher(folder: Path) -> HandedOver:
    return HandedOver({"hook": "powerSGD", "bucket_cap_mb": 3}, "my.yaml, section comm_hook_config", folder)


@launched
def _prepare(variable: str, ways: list[str]) -> list[str]:
    outcomes = []
    with mock.patch.dict(os.environ, {VARIABLE: variable}):
        for way in ways:
            try:
                handler = CommHookKwargs(hook="fp16") if way == "own" else CommHookKwargs()
                accelerator = new_accelerator(handler)
                model = accelerator.prepare(make_model())
                assert handler.is_attached(model)
                outcomes.append(f"{handler.attached.name} {handler.bucket_cap_mb}")
            except HookConfigError as error:
                outcomes.append(str(error))
    return outcomes


def test_the_first_prepare_refuses_a_hook_of_the_scripts_own(run_ranks: Any, tmp_path: Path) -> None:
    given = given_by_launcher(tmp_path)
    for refused, used, also_used in run_ranks(_prepare, given.to_environment(), ["own", "theirs", "own"]):
        assert "my.yaml, section comm_hook_config asks for the hook 'powerSGD'" in refused
        assert (
            "hook='fp16' of its own. Write `accelerator = Accelerator(kwargs_handlers=[CommHookKwargs()])`" in refused
        )
        assert used == "powerSGD 3"
        assert also_used == "fp16_compress 25"  # of a second model, say
    assert given.noted("read") and given.noted("attached")
    assert unused("train.py", given, several_processes=True) is None


def test_a_file_in_the_variable_is_only_a_default(run_ranks: Any, named: Path) -> None:
    assert run_ranks(_prepare, str(named), ["own"]) == [["fp16_compress 25"]] * 2


def test_what_counts_as_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_by_launcher(tmp_path)
    monkeypatch.setenv(VARIABLE, given.to_environment())
    assert handed_over() == given
    for several in (True, False):
        assert "train.py has not used the hook 'powerSGD'" in str(unused("train.py", given, several))
    CommHookKwargs()  # given to no accelerator: enough where nothing is wrapped in DDP
    assert unused("train.py", given, several_processes=False) is None
    assert "attached the hook 'powerSGD'" in str(unused("train.py", given, several_processes=True))
    # On another machine there is no such folder: that is no error.
    monkeypatch.setenv(VARIABLE, dataclasses.replace(given, used=tmp_path / "elsewhere").to_environment())
    CommHookKwargs()


# ---- accelerate-commhooks config and check ---------------------------------------------------------------------------

COMMENTED = """\
# mine
compute_environment: LOCAL_MACHINE
comm_hook_config:   # old
  hook: fp16
  # inside

# about the port
main_process_port: 0
distributed_type: MULTI_GPU
num_processes: 2"""


def test_config_keeps_the_rest_of_the_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # of rich
    path = tmp_path / "accelerate.yaml"
    path.write_text(COMMENTED)
    path.chmod(0o640)
    flags = ["--hook", "powerSGD", "--hook_options", "matrix_approximation_rank=4", "start_powerSGD_iter=0.1"]
    flags += ["--total-steps", "50", "--strict", "false", "--bucket_cap_mb", "0.5"]
    assert main(["config", str(path), *flags]) == 0
    rest = COMMENTED.replace("comm_hook_config:   # old\n  hook: fp16\n  # inside\n", "")
    assert path.read_text().startswith(f"{rest}\ncomm_hook_config:\n  hook: powerSGD\n")
    settings = {"hook": "powerSGD", "total_steps": 50, "strict": False, "bucket_cap_mb": 0.5}
    settings["hook_options"] = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 0.1}
    assert read_settings(path) == settings
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["accelerate.yaml"]

    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    for text in ("plain all-reduce for the first 5 steps", "starts 2 processes", "CommHookKwargs()"):
        assert text in printed


def test_config_of_new_and_json_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new.yaml"
    assert main(["config", str(path), "--hook", "fp16"]) == 0
    assert "accelerate config --config_file" in capsys.readouterr().out
    assert CommHookKwargs.from_config(path) == CommHookKwargs(hook="fp16")
    path = tmp_path / "accelerate.json"
    path.write_text(json.dumps({"distributed_type": "NO", "comm_hook_config": {"hook": "fp16"}}))
    assert main(["config", str(path), "--hook", "bf16"]) == 0
    assert json.loads(path.read_text()) == {"distributed_type": "NO", "comm_hook_config": {"hook": "bf16"}}
    assert main(["check", str(path)]) == 0
    assert "starts one process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--hook", "powerSDG"], "did you mean 'powerSGD'"),
        (["--hook", "powerSGD", "--hook_options", "rank=2"], "hook_options.rank"),
        (["--hook", "powerSGD", "--wrapper", "fp8"], "wrapper='fp8'"),
        (["--hook", "powerSGD", "--total_steps", "many"], "total_steps"),
    ],
)
def test_wrong_flags_change_nothing(flags: list[str], says: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(COMMENTED)
    assert main(["config", str(path), *flags]) == 2
    assert says in capsys.readouterr().err
    assert path.read_text() == COMMENTED


@pytest.fixture
def default_config() -> Any:
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ACCELERATE)
    yield path
    path.unlink()


def test_config_protects_the_default_file(default_config: Path, tmp_path: Path, capsys: Any) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(default_config)
    for path in (default_config, link):
        assert main(["config", str(path), "--hook", "fp16"]) == 2
        assert "Accelerate refuses keys that it does not know" in capsys.readouterr().err
        assert default_config.read_text() == ACCELERATE
    # The reason: Accelerate itself cannot read it any more.
    assert main(["config", str(link), "--hook", "fp16", "--force"]) == 0
    assert link.is_symlink() and read_settings(default_config) == {"hook": "fp16"}
    from accelerate.commands.config.config_args import load_config_from_file

    with pytest.raises(ValueError, match="unknown keys.*comm_hook_config"):
        load_config_from_file(None)


def test_patterns_are_written_and_shown_as_they_are(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "hook.yaml"
    flags = ["--hook", "powerSGD", "--hook_options", "exclude=['*embed*', '[ab]*', ':x:']"]
    assert main(["config", str(path), *flags]) == 0
    assert read_settings(path)["hook_options"] == {"exclude": ["*embed*", "[ab]*", ":x:"]}
    capsys.readouterr()
    assert main(["check", str(path)]) == 0
    shown = "".join(line.split("│")[2].strip() for line in capsys.readouterr().out.splitlines() if line.count("│") == 4)
    assert "['*embed*','[ab]*',':x:']" in shown.replace(" ", "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("distributed_type: FSDP\nnum_processes: 2\ncomm_hook_config: {hook: fp16}\n", "use_fsdp"),
        ("comm_hook_config: {hook: fp17}\n", "unknown hook 'fp17'"),
    ],
)
def test_check_refuses(text: str, says: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_cannot_be_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    for text in ("- a\n", "a: [\n"):
        path.write_text(text)
        with pytest.raises(HookConfigError):
            write_section(path, {"hook": "fp16"})
        assert path.read_text() == text
    path.write_text(ACCELERATE)
    with mock.patch("os.replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        write_section(path, {"hook": "fp16"})
    assert path.read_text() == ACCELERATE and len(list(tmp_path.iterdir())) == 1
