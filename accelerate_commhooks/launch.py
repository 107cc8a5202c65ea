"""`accelerate-commhooks launch`: runs Accelerate's launcher with a section `comm_hook_config`.

Accelerate 1.15 rejects configuration files with unknown keys and does not pass the path of the file
to its workers. So Accelerate gets a copy of the file without the section, and the workers get the
section in the environment variable of `yaml_settings`. If no model got the hook, or the hook
compressed nothing, the workers write a message into a temporary folder, and the launcher prints it
after the run.
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

from accelerate_commhooks.yaml_settings import LINE_TO_ADD, SECTION, VARIABLE, Settings, no_section
from commhooks import HookConfigError

_DESCRIPTION = (
    f"Starts a script as `accelerate launch` does, with the same arguments. The section {SECTION}"
    f" of the configuration file, or the file named in {VARIABLE}, is checked before anything"
    " starts, and passed to all processes, where CommHookKwargs() reads it. The exit status is the"
    " script's."
)

_END_S = 30.0
"""Seconds for a script to end after a signal; torch's launcher has the same limit."""

_NOT_DDP = {
    DistributedType.DEEPSPEED: "use_deepspeed",
    DistributedType.MEGATRON_LM: "use_megatron_lm",
    DistributedType.XLA: "tpu",
}
"""Kind of run without DDP and FSDP -> its flag in Accelerate's launcher."""


def launch(arguments: list[str]) -> int:
    """Run `accelerate launch` with these arguments, and pass the settings to the workers.

    Prints a message if the script succeeded without the hook. Returns the exit status of the first
    process that failed (128 + n after signal n), or 0. Raises HookConfigError before anything is
    started.
    """
    parser = launch_command_parser()
    parser.prog = "accelerate-commhooks launch"
    parser.description = _DESCRIPTION
    args = parser.parse_args(arguments)
    file = args.config_file
    if file is None and os.path.isfile(default_config_file):
        file = default_config_file
    # with --cpu it ignores its default file
    accelerate_reads = args.config_file is not None or not args.cpu
    content = _read_as_accelerate(file) if file is not None else {}
    settings = _settings(file, content)
    settings.check(imports=False)
    if accelerate_reads and file is not None and "distributed_type" not in content:
        raise HookConfigError(
            f"{file} has only the hook's settings, and this command needs a configuration of"
            f" Accelerate. For `accelerate launch` with flags set {VARIABLE}={file}"
        )
    _refuse_without_ddp(args, file, content)
    alone = _one_process_only(args, content) and settings.values.get("members") is None
    if alone:
        _say(
            "Accelerate starts one process here: its model is not wrapped in DDP and gets no hook."
            " For several processes use `distributed_type: MULTI_GPU` or --multi_gpu, and on the"
            " CPU also Accelerator(cpu=True)."
        )
    with tempfile.TemporaryDirectory(prefix="commhooks-launch-") as folder:
        if content.pop(SECTION, None) is not None and accelerate_reads:
            args.config_file = os.path.join(folder, "config.yaml")
            Path(args.config_file).write_text(yaml.safe_dump(content), encoding="utf-8")
        # The machines of a host file cannot write into this folder.
        message_file = None if getattr(args, "mpirun_hostfile", None) else Path(folder, "message")
        settings = dataclasses.replace(settings, message_file=message_file)
        with patch_environment(**{VARIABLE: settings.to_environment()}):
            try:
                status = _run(args)
            except ValueError as error:  # by Accelerate, about its copy of the file
                message = str(error).replace(str(args.config_file), str(file))
                raise HookConfigError(message) from error
        if status == 0 and not alone and message_file is not None:
            _say_if_without_hook(args.training_script, settings.source, message_file)
    return status


def _say_if_without_hook(script: str, source: object, message_file: Path) -> None:
    """Print the workers' message, or that they wrote none because they did not read the settings.

    An empty message means that a model got the hook.
    """
    text = f"{script} did not read {source} and trained without a hook. {LINE_TO_ADD}"
    if message_file.exists():
        text = message_file.read_text(encoding="utf-8")
    if text:
        _say(text)


def _say(text: str) -> None:
    print(f"accelerate-commhooks launch: {text}", file=sys.stderr)


# --------------------------------------------------------------------------------------------------
# before the run


def _read_as_accelerate(file: str) -> dict[str, Any]:
    try:
        text = Path(file).read_text(encoding="utf-8")
        content = json.loads(text) if file.endswith(".json") else yaml.safe_load(text)
    except OSError as error:
        raise HookConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON, though its name ends with .json" if file.endswith(".json") else "YAML"
        raise HookConfigError(f"{file} is not {kind}: {' '.join(str(error).split())}") from error
    return content or {}


def _settings(file: str | None, content: dict[str, Any]) -> Settings:
    outside = os.environ.get(VARIABLE, "").strip()
    if file is not None and SECTION in content:
        if outside:
            raise HookConfigError(
                f"{file} has a section {SECTION!r}, and {VARIABLE}={outside} is set: both set a"
                " communication hook. Unset the variable or remove the section"
            )
        return Settings.read(file)
    settings = Settings.from_environment()
    if settings is None:
        where = f"there is no configuration file ({default_config_file})"
        if file:
            where = f"{file}: {no_section(content)}"
        raise HookConfigError(
            f"{where}, and {VARIABLE} is not set. `accelerate launch` starts a script without a"
            " communication hook"
        )
    return settings


def _refuse_without_ddp(
    args: argparse.Namespace, file: str | None, content: dict[str, Any]
) -> None:
    where = [f"--{flag}" for flag in _NOT_DDP.values() if getattr(args, flag)]
    kind = content.get("distributed_type")
    refused = {distributed_type.value for distributed_type in _NOT_DDP}
    if not where and not args.multi_gpu and kind in refused:
        where = [f"{file}: distributed_type: {kind}"]
    if where and not args.cpu:
        raise HookConfigError(
            f"{where[0]}: Accelerate does not wrap models in DistributedDataParallel then, so a"
            " communication hook cannot be attached. Use `accelerate launch`, and a configuration"
            f" without {SECTION!r}"
        )
    if content.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise HookConfigError(
            f"{file}: compute_environment: AMAZON_SAGEMAKER: this launcher cannot pass settings to"
            " these machines. Use `accelerate launch`, with a file of settings beside the script"
            f" and {VARIABLE} in the job's variables"
        )


def _one_process_only(args: argparse.Namespace, content: dict[str, Any]) -> bool:
    """Return whether Accelerate starts a single process.

    Accelerate 1.15 has two launchers for local machines; its launcher for the CPU starts several
    processes only through MPI.
    """
    kind = str(content.get("distributed_type") or "NO")  # YAML reads NO without quotes as false
    several = args.multi_gpu or args.use_fsdp or kind not in ("NO", "MULTI_CPU")
    return args.cpu or not (several or args.mpirun_hostfile or content.get("mpirun_config"))


# --------------------------------------------------------------------------------------------------
# the run


def _run(args: argparse.Namespace) -> int:
    def ended(signum: int, frame: FrameType | None) -> None:
        raise SignalException("ended", sigval=signal.Signals(signum))

    # With one process Accelerate sets no handler, and the default action would not remove the
    # temporary folder. With several processes torch's launcher sets its own handlers.
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
    except KeyboardInterrupt:  # a terminal sends it to the script, too
        _end_children()
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _end_children(signum: signal.Signals | None = None) -> None:
    """End the script: Accelerate 1.15 leaves a single process running; torch's launcher ends it."""
    children = psutil.Process().children()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            if signum is not None:
                child.send_signal(signum)
    for child in psutil.wait_procs(children, timeout=_END_S)[1]:
        with suppress(psutil.NoSuchProcess):
            child.kill()
