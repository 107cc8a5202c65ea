"""`accelerate-commhooks launch`, or `accelerate launch` with a variable, sets up the hook."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from accelerate.commands.config.config_args import default_config_file

from accelerate_commhooks.__main__ import main
from accelerate_commhooks.yaml_settings import VARIABLE
from tests.support import warm
from tests.support.accelerators import ACCELERATE, section
from tests.support.features import fully_shard_on_gloo
from tests.support.repository import PYTHONPATH

LIMIT_S = 180
pytestmark = pytest.mark.timeout(LIMIT_S + 20)

OURS = ["-m", "accelerate_commhooks", "launch"]
STOCK = ["-m", "accelerate.commands.launch"]
SHARDED = (
    ACCELERATE.replace("MULTI_GPU", "FSDP").replace("num_processes: 2", "num_processes: 4")
    + """\
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 500}
parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2}
"""
)
HOOK = (
    "hook: powerSGD\nhook_options: {matrix_approximation_rank: 1, start_powerSGD_iter:"
    " 1}\nbucket_cap_mb: 9\n"
)
SECTION = section(HOOK).removeprefix(ACCELERATE)
SENTENCE = "Write `CommHookKwargs().attach(accelerator)`"


@contextmanager
def default_file(text: str) -> Iterator[Path]:
    """Keep `text` in Accelerate's default configuration file while the context lasts."""
    path = Path(default_config_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    try:
        yield path
    finally:
        path.unlink()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "accelerate.yaml"
    path.write_text(ACCELERATE + SECTION)
    return path


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def left_behind(temporary: Path) -> list[str]:
    return [path.name for path in temporary.glob("commhooks-launch-*")]


@contextmanager
def started(command: list[str], temporary: Path, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Context manager: a process. At the end it is killed with all of its descendants."""
    env = os.environ | {"PYTHONPATH": PYTHONPATH, "TMPDIR": str(temporary)} | environ
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for descendant in [*psutil.Process(process.pid).children(recursive=True), process]:
                descendant.kill()
        process.communicate()


def run(command: list[str], temporary: Path, **environ: str) -> tuple[int, str]:
    with started([warm.python("accelerate"), *command], temporary, **environ) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


# ---- it works ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [pytest.param("section", marks=fully_shard_on_gloo), "variable"])
def test_the_workers_use_what_was_handed_over(
    way: str, config: Path, temporary: Path, tmp_path: Path
) -> None:
    """Our launcher's section shards replicas; the variable with Accelerate's launcher uses DDP."""
    # all of them the script's
    arguments = [
        "--config_file",
        "other.yaml",
        "-m",
        "--lr=0.1",
        "two words",
        "--",
        "-x",
    ]
    if way == "section":
        before = SHARDED + SECTION
        ranks = 4
        environ = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        command = [*OURS, f"--config_file={config}", "-m", "tests.with_accelerate.launched_script"]
    else:
        before = ACCELERATE
        ranks = 2
        environ = {VARIABLE: str(tmp_path / "hook.yaml")}
        (tmp_path / "hook.yaml").write_text(HOOK)
        command = [
            *STOCK,
            f"--config_file={config}",
            str(Path(__file__).with_name("launched_script.py")),
        ]
    config.write_text(before)
    status, output = run([*command, str(tmp_path), *arguments], temporary, **environ)
    assert status == 0, output
    for rank in range(ranks):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert seen["arguments"] == arguments and seen["main"] == "__main__"
        assert seen["processes"] == ranks and seen["rank_variable"] == str(rank)
        assert way == "variable" or "dp_shard_cp=2" in seen["mesh"]
        options = "{'matrix_approximation_rank': 1, 'start_powerSGD_iter': 1}"
        # The script's own bucket_cap_mb=3 wins over the 9 of the file.
        assert (
            seen["handler"]
            == f"CommHookKwargs(bucket_cap_mb=3, hook='powerSGD', hook_options={options})"
        )
        assert seen["stats"]["compressed_steps"] == 2
    assert "accelerate-commhooks launch: " not in output
    assert left_behind(temporary) == []
    assert config.read_text() == before


# ---- it is not used ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uses", "says"),
    [
        (
            "",
            "{script} did not read {config}, section comm_hook_config and trained without a hook. ",
        ),
        (
            "from accelerate_commhooks import CommHookKwargs\nCommHookKwargs()\n",
            "the hook 'powerSGD' of {config}, section comm_hook_config was attached to no model. ",
        ),
    ],
    ids=["no handler", "for no accelerator"],
)
def test_a_message_comes_after_the_run(
    uses: str, says: str, config: Path, temporary: Path, tmp_path: Path
) -> None:
    script = tmp_path / "trains.py"
    # One write: two processes share the output.
    script.write_text(
        f"{uses}import os\nos.write(1, f\"ran as rank {{os.environ['RANK']}}\\n\".encode())\n"
    )
    status, output = run([*OURS, "--config_file", str(config), str(script)], temporary)
    assert status == 0 and "ran as rank 0" in output and "ran as rank 1" in output
    last = output.splitlines()[-1]
    assert last.startswith(
        "accelerate-commhooks launch: " + says.format(script=script, config=config) + SENTENCE
    )
    assert "CommHookTrainer" in last
    assert left_behind(temporary) == []


def test_the_exit_status_is_that_of_the_processes(
    config: Path, temporary: Path, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys\nsys.exit(7)\n")
    status, output = run([*OURS, "--config_file", str(config), str(script)], temporary)
    assert status == 7 and "exitcode  : 7" in output and SENTENCE not in output, output
    assert left_behind(temporary) == []


def test_a_hook_that_does_nothing_is_told(config: Path, temporary: Path, tmp_path: Path) -> None:
    """The last line is the launcher's, behind whatever the processes print at their end."""
    config.write_text(section("hook: powerSGD\n"))
    script = tmp_path / "trains.py"
    script.write_text(
        "import torch\nfrom accelerate import Accelerator\nfrom accelerate_commhooks import"
        " CommHookKwargs\naccelerator = Accelerator(cpu=True,"
        " kwargs_handlers=[CommHookKwargs()])\nmodel = accelerator.prepare(torch.nn.Linear(64,"
        " 64))\nfor _ in range(9):\n    accelerator.backward(model(torch.ones(2,"
        " 64)).sum())\naccelerator.end_training()\n"
    )
    status, output = run([*OURS, "--config_file", str(config), str(script)], temporary)
    assert status == 0, output
    text = (
        "hook 'powerSGD' has compressed nothing in 9 backward passes: it begins at step 100. Set "
    )
    assert output.count(f"commhooks: {text}") == 1 and output.count(text) == 2, output
    assert output.splitlines()[-1].startswith(f"accelerate-commhooks launch: {text}"), output
    assert left_behind(temporary) == []


@pytest.fixture
def in_this_process(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Launch one process by `main` in the test's own process, which is much faster."""
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(sys, "executable", warm.python("accelerate"))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    return temporary


@pytest.fixture
def launch_one(in_this_process: Path, tmp_path: Path) -> Callable[[Path | None, str], int]:
    def launch(config: Path | None, code: str) -> int:
        file = [] if config is None else ["--config_file", str(config)]
        (tmp_path / "script.py").write_text(code)
        return main(["launch", *file, "--cpu", str(tmp_path / "script.py"), "3"])

    return launch


READS = (
    "from accelerate_commhooks import CommHookKwargs\nassert CommHookKwargs().hook == 'powerSGD'\n"
)


def test_one_process_trains_without_a_hook(
    config: Path, launch_one: Any, temporary: Path, capfd: Any
) -> None:
    before = dict(os.environ)
    assert launch_one(config, READS) == 0
    err = capfd.readouterr().err
    assert "starts one process here" in err and SENTENCE not in err
    members = config.with_name("members.yaml")
    members.write_text(section("hook: diloco\nmembers: torchft\n"))
    assert launch_one(members, READS.replace("powerSGD", "diloco")) == 0
    assert "starts one process here" not in capfd.readouterr().err
    # The status of the script goes through.
    assert launch_one(config, "import sys\nsys.exit(int(sys.argv[1]))") == 3
    assert launch_one(config, "import os\nos.kill(os.getpid(), 9)") == 128 + 9
    assert os.environ == before and left_behind(temporary) == []


# ---- before anything is started ------------------------------------------------------------------


REFUSED = {
    ACCELERATE + "comm_hook_config: {hook: powerSDG}\n": "did you mean 'powerSGD'",
    ACCELERATE: (
        "accelerate.yaml: no section 'comm_hook_config', and ACCELERATE_COMM_HOOK_CONFIG is not set"
    ),
    ACCELERATE.replace("MULTI_GPU", "DEEPSPEED")
    + SECTION: "yaml: distributed_type: DEEPSPEED: Accelerate",
    ACCELERATE.replace("LOCAL_MACHINE", "AMAZON_SAGEMAKER") + SECTION: "AMAZON_SAGEMAKER",
    ACCELERATE.replace("num_machines", "num_machine")
    + SECTION: "/accelerate.yaml had unknown keys (['num_machine'])",
    SECTION: (
        "accelerate.yaml has only the hook's settings, and this command needs a configuration of"
        " Accelerate"
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_wrong_settings_are_refused(
    text: str, tmp_path: Path, in_this_process: Path, capfd: Any
) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text(text)
    assert main(["launch", "--config_file", str(config), "no_such_script.py"]) == 2
    err = capfd.readouterr().err
    assert (
        REFUSED[text] in err
        and "accelerate-commhooks launch: error: " in err
        and "commhooks-launch-" not in err
    )
    assert left_behind(in_this_process) == []


@pytest.mark.parametrize("flag", ["--use_deepspeed", "--use_megatron_lm", "--tpu"])
def test_wrong_flags_are_refused(
    flag: str, config: Path, in_this_process: Path, capfd: Any
) -> None:
    assert main(["launch", "--config_file", str(config), flag, "no_such_script.py"]) == 2
    assert (
        f"error: {flag}: Accelerate does not wrap models in DistributedDataParallel"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "hook: [", "a.yaml is not YAML: "),
        ("a.json", "{'distributed_type'", "a.json is not JSON, though its name ends with .json: "),
        ("missing.yaml", None, "missing.yaml cannot be read: No such file or directory"),
    ],
)
def test_unreadable_files_are_refused(
    name: str, text: str | None, message: str, tmp_path: Path, in_this_process: Path, capfd: Any
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["launch", "--config_file", str(tmp_path / name), "no_such_script.py"]) == 2
    assert message in capfd.readouterr().err


def test_hooks_of_the_script_are_left_to_it(tmp_path: Path, launch_one: Any, capfd: Any) -> None:
    """The launcher cannot import what lies beside the script; everything else is checked."""
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        ACCELERATE + "comm_hook_config: {hook: 'beside:hook', hook_state: 'beside:STATE'}\n"
    )
    (tmp_path / "beside.py").write_text("STATE = {}\ndef hook(state, bucket): ...\n")
    code = (
        "from accelerate_commhooks import CommHookKwargs\nassert CommHookKwargs().hook_state =="
        " {}\n"
    )
    assert launch_one(config, code) == 0
    config.write_text(config.read_text().replace("}", ", wrapper: fp8}"))
    assert launch_one(config, code) == 2
    assert "section comm_hook_config: wrapper='fp8'; expected one of" in capfd.readouterr().err


def test_settings_in_two_places_or_none_are_refused(
    config: Path, launch_one: Any, monkeypatch: Any, capfd: Any
) -> None:
    assert launch_one(None, READS) == 2
    assert "there is no configuration file" in capfd.readouterr().err
    beside = config.with_name("hook.yaml")
    beside.write_text(HOOK)
    monkeypatch.setenv(VARIABLE, str(beside))
    assert launch_one(config, READS) == 2
    assert "both set a communication hook" in capfd.readouterr().err
    assert launch_one(None, READS) == 0  # the variable alone will do
    config.write_text(ACCELERATE)
    assert launch_one(config, READS) == 0
    assert os.environ[VARIABLE] == str(beside)


def test_the_default_configuration_file_is_read(
    tmp_path: Path, in_this_process: Path, capfd: Any
) -> None:
    (tmp_path / "script.py").write_text(READS)
    with default_file("distributed_type: 'NO'\nnum_processes: 1\n" + SECTION):
        assert main(["launch", str(tmp_path / "script.py")]) == 0, capfd.readouterr().err


def test_without_accelerate_it_is_one_line() -> None:
    block = (
        "import sys; sys.modules['accelerate'] = None; from accelerate_commhooks.__main__ import"
        " main; "
    )
    for arguments, status in ((["launch", "script.py"], 1), (["--version"], 0)):
        command = [sys.executable, "-c", f"{block}sys.exit(main({arguments}))"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        line = (
            "accelerate-commhooks: accelerate_commhooks needs Accelerate: pip install accelerate\n"
        )
        assert (done.returncode, done.stderr) == (status, line if status else "")


# ---- it is interrupted ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signum", "to_all", "flags"),
    [
        (signal.SIGINT, True, ["--cpu"]),  # to the script as well, as a terminal does
        (signal.SIGTERM, False, ["--cpu"]),
        (signal.SIGTERM, False, []),
    ],
    ids=["Ctrl-C, one process", "SIGTERM, one process", "SIGTERM, two processes"],
)
def test_an_interrupt_ends_all_processes(
    signum: signal.Signals,
    to_all: bool,
    flags: list[str],
    config: Path,
    temporary: Path,
    tmp_path: Path,
) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], 'pid' + os.environ.get('RANK',"
        " '0')).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"  # longer than anybody waits here
    )
    command = [
        warm.python("accelerate"),
        *OURS,
        "--config_file",
        str(config),
        *flags,
        str(script),
        str(tmp_path),
    ]
    with started(command, temporary) as process:
        files = [tmp_path / f"pid{rank}" for rank in range(1 if flags else 2)]
        deadline = time.monotonic() + LIMIT_S
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert len(left_behind(temporary)) == 1
        workers = [psutil.Process(int(file.read_text())) for file in files]
        for pid in [process.pid, *(worker.pid for worker in workers if to_all)]:
            os.kill(pid, signum)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signum, output
    assert left_behind(temporary) == []
    assert not [
        worker
        for worker in workers
        if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    ]
