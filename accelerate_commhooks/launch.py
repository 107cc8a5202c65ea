"""`accelerate-commhooks launch`: runs Accelerate's launcher and passes the section `comm_hook_config` to the workers.

Accelerate 1.15 rejects configuration files with unknown keys and does not pass the file's name to its workers. The
section is therefore removed: Accelerate gets a copy of the file without it, in a folder that is removed when the run
ends, and the workers get the section in the environment variable of `settings`. They leave a message in that folder if
no model got the hook, or it compressed nothing, which is printed after the run.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml
from accelerate import DistributedType
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils import patch_environment
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accelerate_commhooks.settings import LINE_TO_ADD, SECTION, VARIABLE, Settings, no_section
from commhooks import HookConfigError

_DESCRIPTION = (
    f"Starts a script as `accelerate launch` does, with its arguments. The section {SECTION} of the configuration "
    f"file, or the file that {VARIABLE} names, goes to all processes, where CommHookKwargs() reads it; it is checked "
    "before anything starts. The exit status is that of the script."
)

_END_S = 30.0
"""Seconds in which a script must end after a signal; equal to the limit of torch's launcher."""

_NOT_DDP = {
    DistributedType.DEEPSPEED: "use_deepspeed",
    DistributedType.MEGATRON_LM: "use_megatron_lm",
    DistributedType.XLA: "tpu",
}
"""Where Accelerate neither wraps models in DDP nor shards them by FSDP, with the flags of its launcher."""


def launch(arguments: list[str]) -> int:
    """Run `accelerate launch` with these arguments, with the settings for the workers.

    Returns the exit status of the script: that of the first process that failed; 128 + n after signal n. If it is 0 and
    the hook was of no use, a message says so. Raises HookConfigError before anything is started.
    """
    parser = launch_command_parser()
    parser.prog, parser.description = "accelerate-commhooks launch", _DESCRIPTION
    args = parser.parse_args(arguments)
    file = args.config_file
    if file is None and os.path.isfile(default_config_file):
        file = default_config_file
    accelerate_reads = args.config_file is not None or not args.cpu  # with --cpu it ignores its default file
    content = _read_as_accelerate(file) if file is not None else {}
    settings = _settings(file, content)
    settings.check(imports=False)
    if accelerate_reads and file is not None and "distributed_type" not in content:
        raise HookConfigError(
            f"{file} has settings of the hook only, and this command needs Accelerate's own in it, too. For "
            f"`accelerate launch` with flags set {VARIABLE}={file}"
        )
    _refuse_without_ddp(args, file, content)
    alone = _one_process_only(args, content)
    if alone:
        _say(
            "Accelerate starts one process here, whose model is not wrapped in DDP and gets no hook. For several write "
            "`distributed_type: MULTI_GPU` or --multi_gpu; on the CPU too, with Accelerator(cpu=True) in the script."
        )
    with tempfile.TemporaryDirectory(prefix="commhooks-launch-") as folder:
        if content.pop(SECTION, None) is not None and accelerate_reads:
            args.config_file = os.path.join(folder, "config.yaml")
            Path(args.config_file).write_text(yaml.safe_dump(content), encoding="utf-8")
        # The machines of a host file cannot write into this folder.
        message_file = None if getattr(args, "mpirun_hostfile", None) else Path(folder, "message")
        settings = dataclasses.replace(settings, message_file=message_file)
        with patch_environment(**{VARIABLE: settings.to_environment()}):
            status = _run(args)
        if status == 0 and not alone and message_file is not None:
            text = f"{args.training_script} has not read {settings.source}, and trained without its hook. {LINE_TO_ADD}"
            if message_file.exists():
                text = message_file.read_text(encoding="utf-8")
            if text:
                _say(text)
    return status


def _say(text: str) -> None:
    print(f"accelerate-commhooks launch: {text}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------- before the run


def _read_as_accelerate(file: str) -> dict[str, Any]:
    """The content of a configuration file."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        content: dict[str, Any] = (json.loads(text) if file.endswith(".json") else yaml.safe_load(text)) or {}
    except OSError as error:
        raise HookConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON, which Accelerate expects under this name" if file.endswith(".json") else "YAML"
        raise HookConfigError(f"{file} is not {kind}: {' '.join(str(error).split())}") from error
    return content


def _settings(file: str | None, content: dict[str, Any]) -> Settings:
    outside = os.environ.get(VARIABLE, "").strip()
    if file is not None and SECTION in content:
        if outside:
            raise HookConfigError(
                f"{file} has a section {SECTION!r}, and {VARIABLE}={outside}: both ask for a communication hook. Unset "
                "the variable or remove the section"
            )
        return Settings.read(file)
    given = Settings.from_environment()
    if given is None:
        where = f"{file}: {no_section(content)}" if file else f"there is no configuration file ({default_config_file})"
        raise HookConfigError(
            f"{where}, and {VARIABLE} is not set. `accelerate launch` starts a script without a communication hook"
        )
    return given


def _refuse_without_ddp(args: argparse.Namespace, file: str | None, content: dict[str, Any]) -> None:
    """Raise HookConfigError if with these arguments and this configuration Accelerate neither wraps models in DDP nor
    shards them by FSDP."""
    where = [f"--{flag}" for flag in _NOT_DDP.values() if getattr(args, flag)]
    kind = content.get("distributed_type")
    if not where and not args.multi_gpu and kind in [each.value for each in _NOT_DDP]:
        where = [f"{file}: distributed_type: {kind}"]
    if where and not args.cpu:
        raise HookConfigError(
            f"{where[0]}: Accelerate does not wrap models in DistributedDataParallel then, so there is nothing to "
            f"attach a communication hook to. Use `accelerate launch`, and a configuration without {SECTION!r}"
        )
    if content.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise HookConfigError(
            f"{file}: compute_environment: AMAZON_SAGEMAKER: the script runs on machines that this launcher does not "
            f"reach. Use `accelerate launch`, with a file of settings beside the script and {VARIABLE} in the job's "
            "variables"
        )


def _one_process_only(args: argparse.Namespace, content: dict[str, Any]) -> bool:
    """Whether Accelerate starts one process for these arguments and this configuration. Accelerate 1.15 has two
    launchers for local machines; the launcher for the CPU starts several processes only through MPI."""
    kind = str(content.get("distributed_type") or "NO")  # YAML reads NO without quotes as false
    several = args.multi_gpu or args.use_fsdp or kind not in ("NO", "MULTI_CPU")
    return args.cpu or not (several or args.mpirun_hostfile or content.get("mpirun_config"))


# -------------------------------------------------------------------------------------------------------------- the run


def _run(args: argparse.Namespace) -> int:
    def ended(signum: int, frame: FrameType | None) -> None:
        raise SignalException("ended", sigval=signal.Signals(signum))

    # With one process Accelerate sets no handler, and the default action would leave the temporary folder behind. With
    # several, torch's launcher sets its own handlers.
    before = signal.signal(signal.SIGTERM, ended)
    try:
        launch_command(args)
    except subprocess.CalledProcessError as error:  # one process
        code = error.returncode
        what = f"exit status {code}" if code >= 0 else f"ended by signal {-code}"
        print(f"{args.training_script} failed: {what}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except ChildFailedError as error:  # several
        print(error, file=sys.stderr)
        code = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    except SignalException as error:
        _end_children(error.sigval)
        return 128 + error.sigval
    except KeyboardInterrupt:  # from a terminal the script has received it, too
        _end_children()
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _end_children(signum: signal.Signals | None = None) -> None:
    """End the script: Accelerate 1.15 leaves a single process running, while torch's launcher has ended several."""
    children = psutil.Process().children()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            if signum is not None:
                child.send_signal(signum)
    for child in psutil.wait_procs(children, timeout=_END_S)[1]:
        with suppress(psutil.NoSuchProcess):
            child.kill()
