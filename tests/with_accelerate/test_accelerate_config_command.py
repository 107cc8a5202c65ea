"""`accelerate-commhooks config` and `check`, on files."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.cli import main, write_section
from accelerate_commhooks.flags import FLAGS, YES_NO
from accelerate_commhooks.settings import CommHookConfig, Settings
from commhooks import HookConfigError
from commhooks.hook.vocabulary import SAVE_RESIDUAL, WRAPPERS
from tests.support.accelerate_yaml import ACCELERATE, default_file

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


def test_config_keeps_the_rest_of_the_file(tmp_path: Path, capsys: Any) -> None:
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
    assert Settings.read(path).values == settings
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["accelerate.yaml"]

    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    for text in ("plain all-reduce for the first 5 steps", "starts 2 processes", "CommHookKwargs()"):
        assert text in printed
    assert "check_every" not in printed  # a default


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
    # JSON writes a small number without a point, which PyYAML takes for a text.
    assert main(["config", str(path), "--hook", "powerSGD", "--hook_options", "orthogonalization_epsilon=1e-05"]) == 0
    assert CommHookKwargs.from_config(path).hook_options == {"orthogonalization_epsilon": 1e-05}
    path = tmp_path / "in_braces.yaml"
    path.write_text("{num_processes: 2, since: 2026-01-01}\n")
    assert main(["config", str(path), "--hook", "bf16"]) == 2
    assert "not changed, because not all in it is JSON (Object of type date" in capsys.readouterr().err
    assert path.read_text() == "{num_processes: 2, since: 2026-01-01}\n"
    path = tmp_path / "new.json"
    assert main(["config", str(path), "--hook", "bf16"]) == 0
    assert json.loads(path.read_text()) == {"comm_hook_config": {"hook": "bf16"}}
    assert main(["check", str(path)]) == 0
    assert "Settings only: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--hook", "powerSDG"], "did you mean 'powerSGD'"),
        (["--hook", "powerSGD", "--hook_options", "rank=2"], "hook_options.rank"),
        (["--hook", "powerSGD", "--wrapper", "fp8"], "argument --wrapper: invalid choice: 'fp8'"),
        (["--hook", "powerSGD", "--total_steps", "many"], "total_steps"),
        (["--hook", "powerSGD", "--rank", "4"], "write --hook_options matrix_approximation_rank=4"),
        (["--hook", "int8", "--rank", "4"], "write --hook powerSGD --hook_options matrix_approximation_rank=4"),
        (["--hook", "int8", "--exclude", "*x*"], "write --hook_options \"exclude=['*x*']\"\n"),
        (["--hook", "int8", "--hook_options", "exclude=[*x*]"], "put text with special characters in quotes"),
        (["--hook", "powerSGD", "--total", "4"], "there is no flag --total (did you mean '--total_steps'?)"),
    ],
)
def test_wrong_flags_change_nothing(flags: list[str], says: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(COMMENTED)
    try:
        assert main(["config", str(path), *flags]) == 2
    except SystemExit as stopped:  # argparse
        assert stopped.code == 2
    assert says in capsys.readouterr().err
    assert path.read_text() == COMMENTED


def test_config_protects_the_default_file(tmp_path: Path, capsys: Any) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    link = tmp_path / "link.yaml"
    with default_file(ACCELERATE) as default:
        link.symlink_to(default)
        for path in (default, link):
            assert main(["config", str(path), "--hook", "fp16"]) == 2
            assert "Accelerate refuses keys that it does not know" in capsys.readouterr().err
            assert default.read_text() == ACCELERATE
        # The reason: Accelerate itself cannot read it any more.
        assert main(["config", str(link), "--hook", "fp16", "--force"]) == 0
        assert link.is_symlink() and Settings.read(default).values == {"hook": "fp16"}
        with pytest.raises(ValueError, match="unknown keys.*comm_hook_config"):
            load_config_from_file(None)


def test_patterns_are_written_and_shown_as_they_are(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "hook.yaml"
    flags = ["--hook", "powerSGD", "--hook_options", "exclude=['*embed*', '[ab]*', ':x:']"]
    assert main(["config", str(path), *flags]) == 0
    assert Settings.read(path).values["hook_options"] == {"exclude": ["*embed*", "[ab]*", ":x:"]}
    capsys.readouterr()
    assert main(["check", str(path)]) == 0
    assert "hook_options.exclude              ['*embed*', '[ab]*', ':x:']\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 4", "starts 4 processes."),
        ("distributed_type: MULTI_GPU", "--num_processes N script.py` starts N processes."),
        ("distributed_type: 'NO'\nnum_processes: 2", "starts one process here, whose model is not wrapped in DDP"),
        ("distributed_type: NO\nnum_processes: 2", "starts one process here"),  # YAML reads this as false
    ],
)
def test_how_many_processes_start(lines: str, says: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(f"{lines}\ncomm_hook_config: {{hook: fp16}}\n")
    assert main(["check", str(path)]) == 0
    assert says in capsys.readouterr().out


def test_every_setting_has_a_flag_that_says_what_it_means() -> None:
    """Also with another version of Accelerate, whose settings of DDP may be others."""
    settings = {each.name: each for each in dataclasses.fields(CommHookConfig)}
    assert FLAGS.keys() == settings.keys()
    for name, (text, choices) in FLAGS.items():
        default, shown = settings[name].default, text.rpartition("(")[2].rstrip(")")
        assert len(text) > 20
        assert (choices == YES_NO) == isinstance(default, bool)
        if default is not None and name != "hook":
            assert shown == str(default).lower()
    assert (FLAGS["wrapper"][1], set(FLAGS["save_residual"][1])) == (WRAPPERS, set(SAVE_RESIDUAL))


def test_without_accelerate_it_is_one_line() -> None:
    block = "import sys; sys.modules['accelerate'] = None; from accelerate_commhooks.cli import main; "
    for arguments, status in ((["launch", "script.py"], 1), (["check", "file.yaml"], 1), (["--version"], 0)):
        command = [sys.executable, "-c", f"{block}sys.exit(main({arguments}))"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        line = "accelerate-commhooks: accelerate_commhooks needs Accelerate: pip install accelerate\n"
        assert (done.returncode, done.stderr) == (status, line if status else "")


def test_the_help_of_launch_says_what_it_adds(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["launch", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0 and text.startswith("usage: accelerate-commhooks launch ")
    assert "The section comm_hook_config of the configuration file" in text and "--num_processes" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "distributed_type: FSDP\nnum_processes: 2\ncomm_hook_config: {hook: fp16}\n",
            "yaml: distributed_type: FSDP: ",
        ),
        ("comm_hook_config: {hook: fp17}\n", "unknown hook 'fp17'"),
        (
            "comm_hook_config: {hook: powerSGD, random_seed: 3}\n",
            "comm_hook_config.random_seed: it is an option of the hook: move it into hook_options",
        ),
        (
            "hook: int8\nhook_options: {}\ncomm_hook_config: {hook: fp16}\n",
            "yaml: hook and hook_options beside comm_hook_config, where nobody reads it: move it into the section",
        ),
        (
            "distributed_type: MULTI_GPU\nnum_processes: ${oc.env:HOME}\ncomm_hook_config: {hook: fp16}\n",
            "num_processes: ${oc.env:HOME}: Accelerate resolves no interpolations, which work in comm_hook_config",
        ),
        ("hook: fp16  # YAML\n", "accelerate.json is not JSON, which Accelerate expects under this name: "),
    ],
)
def test_check_refuses(text: str, says: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / ("accelerate.json" if "JSON" in says else "accelerate.yaml")
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err


def test_config_says_in_a_line_what_is_in_its_way(tmp_path: Path, capsys: Any) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: \xff\n")
    for path, says in (
        (tmp_path, f"{tmp_path} cannot be read or written: Is a directory"),
        (tmp_path / "gone" / "a.yaml", f"{tmp_path}/gone/a.yaml cannot be read or written: No such file or directory"),
        (latin, f"{latin} is not YAML: 'utf-8' codec can't decode byte 0xff"),
    ):
        assert main(["config", str(path), "--hook", "fp16"]) == 2
        assert capsys.readouterr().err.startswith(f"accelerate-commhooks config: error: {says}")


def test_a_file_that_cannot_be_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    for text in ("- a\n", "a: [\n"):
        path.write_text(text)
        with pytest.raises(HookConfigError):
            write_section(path, {"hook": "fp16"})
        assert path.read_text() == text
    section = "comm_hook_config:\n  hook: fp16\n  total_steps: &n 2\n"
    for text in (section + "num_processes: *n\n", "num_processes: 2\n...\n"):  # YAML only without a new section
        path.write_text(text)
        with pytest.raises(HookConfigError, match="was not changed, because .* would be no YAML any more"):
            write_section(path, {"hook": "fp16"})
        assert path.read_text() == text
    path.write_text(ACCELERATE)
    with mock.patch("os.replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        write_section(path, {"hook": "fp16"})
    assert path.read_text() == ACCELERATE and len(list(tmp_path.iterdir())) == 1
