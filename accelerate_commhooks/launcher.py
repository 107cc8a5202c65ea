"""`accelerate-commhooks launch`: runs Accelerate's launcher and passes the section `comm_hook_config` to the workers.

Accelerate 1.15 rejects configuration files with unknown keys and does not pass the file's name to its workers. The
section is therefore removed: Accelerate gets a copy of the file without it, in a folder that is removed when the run
ends, and the workers get the section in the environment variable of `settings`.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
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

from accelerate_commhooks.flags import SECTION, VARIABLE
from accelerate_commhooks.handler import CommHookKwargs
from accelerate_commhooks.replicas import WITH_REPLICAS
from accelerate_commhooks.settings import HOW_TO_WRITE, WHAT_TO_DO, Settings, load
from commhooks import HookConfigError

WHAT_IT_ADDS = (
    f"Starts a script as `accelerate launch` does, with its arguments. The section {SECTION} of the configuration "
    f"file, or the file that {VARIABLE} names, goes to all processes, where CommHookKwargs() reads it; it is checked "
    "before anything starts. The exit status is that of the script; it is 1 if no model got the hook."
)

REMINDER_S = 120.0
"""Seconds after the start at which a line is printed if the script has not used the settings yet."""

END_S = 30.0
"""Seconds in which a script must end after a signal; equal to the limit of torch's launcher."""

_NOT_DDP = {
    DistributedType.DEEPSPEED: "use_deepspeed",
    DistributedType.FSDP: "use_fsdp",
    DistributedType.MEGATRON_LM: "use_megatron_lm",
    DistributedType.XLA: "tpu",
}
"""Cases in which Accelerate does not wrap models in DDP, with the flags of its launcher."""


def launch(arguments: list[str]) -> int:
    """Run `accelerate launch` with these arguments, with the settings for the workers.

    Returns the exit status of the script: that of the first process that failed; 128 + n after signal n; 1 if the
    script succeeded without using the settings. Raises HookConfigError before anything is started.
    """
    parser = launch_command_parser()
    parser.prog, parser.description = "accelerate-commhooks launch", WHAT_IT_ADDS
    args = parser.parse_args(arguments)
    file = args.config_file
    if file is None and os.path.isfile(default_config_file):
        file = default_config_file
    accelerate_reads = args.config_file is not None or not args.cpu  # with --cpu it ignores its default file
    given, content = _settings(file), read_as_accelerate(file) if file is not None else {}
    check_settings(given)
    if accelerate_reads and (sentence := settings_only(file, content)):
        raise HookConfigError(f"{file}: {sentence}")
    refuse_without_hook(args, file, content)
    if sentence := one_process_only(args, content):
        print(f"accelerate-commhooks launch: {sentence}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="commhooks-launch-") as folder:
        if content.pop(SECTION, None) is not None and accelerate_reads:
            args.config_file = os.path.join(folder, "config.yaml")
            Path(args.config_file).write_text(yaml.safe_dump(content), encoding="utf-8")
        # Other machines in a host file cannot write into this folder.
        watched = getattr(args, "mpirun_hostfile", None) is None
        given = dataclasses.replace(given, used=Path(folder) if watched else None)
        # The check below comes at the end of the run, which may take days.
        reminder = threading.Timer(REMINDER_S, _remind, [args.training_script, given])
        reminder.daemon = True
        reminder.start()
        try:
            with patch_environment(**{VARIABLE: given.to_environment()}):
                status = _run(args)
        finally:
            reminder.cancel()
        if status == 0 and watched:
            # Accelerate's launcher has merged its configuration into `args`.
            several = (args.multi_gpu or args.use_fsdp) and not args.cpu
            if sentence := unused(args.training_script, given, several_processes=several):
                print(f"accelerate-commhooks launch: error: {sentence}", file=sys.stderr)
                return 1
    return status


def read_as_accelerate(file: str) -> dict[str, Any]:
    """The content of a configuration file."""
    text = Path(file).read_text(encoding="utf-8")
    try:
        content: dict[str, Any] = (json.loads(text) if file.endswith(".json") else yaml.safe_load(text)) or {}
    except json.JSONDecodeError as error:
        raise HookConfigError(f"{file} is not JSON, which Accelerate expects under this name: {error}") from error
    for name, value in content.items() if SECTION in content else ():
        if isinstance(value, str) and "${" in value:
            raise HookConfigError(
                f"{file}: {name}: {value}: Accelerate resolves no interpolations, which work in {SECTION} only: write "
                "the value, or give it as a flag"
            )
    return content


# ------------------------------------------------------------------------------------------------------- before the run


def _settings(file: str | None) -> Settings:
    outside = os.environ.get(VARIABLE, "").strip()
    if file is not None and SECTION in (loaded := load(file)):
        if outside:
            raise HookConfigError(
                f"{file} has a section {SECTION!r}, and {VARIABLE}={outside}: both ask for a communication hook. Unset "
                "the variable or remove the section"
            )
        return Settings.of_file(file, loaded)
    given = Settings.from_environment()
    if given is None:
        where = (
            f"{file} has no section {SECTION!r}" if file else f"there is no configuration file ({default_config_file})"
        )
        raise HookConfigError(f"{where}, and {VARIABLE} is not set. {HOW_TO_WRITE}")
    return given


def check_settings(given: Settings) -> None:
    """Raise HookConfigError for invalid settings. Imports no dotted paths: only the workers have the script's folder in
    `sys.path`."""
    settings = {name: value for name, value in given.values.items() if name != "hook_state"}
    if ":" in settings["hook"]:

        def stand_in(state: object, bucket: object) -> None: ...

        # The path is not imported here; the script checks the options of a compressor given by its path.
        stand_in.__qualname__ = settings["hook"]  # shown in messages
        settings["hook"] = stand_in
        settings.pop("hook_options", None)
    with given.locating_errors():
        try:
            CommHookKwargs(**settings)
        except HookConfigError as error:
            if not str(error).startswith("unknown hook"):
                raise
            raise HookConfigError(
                f"{error}. A name that the script itself registers is not known to the launcher: use `accelerate "
                f"launch` for it, with {VARIABLE}=file.yaml"
            ) from error


def settings_only(file: str | None, content: dict[str, Any]) -> str | None:
    """A sentence about a configuration file that lacks Accelerate's own settings, else None."""
    if file is None or "distributed_type" in content:
        return None
    return (
        f"Settings only: use it with CommHookKwargs.from_config({file!r}), or with {VARIABLE}={file} and "
        "CommHookKwargs(). For `accelerate-commhooks launch` it needs Accelerate's own settings too."
    )


def refuse_without_hook(args: argparse.Namespace, file: str | None, content: dict[str, Any]) -> None:
    """Raise HookConfigError if no model would get a hook under these arguments and this configuration, because
    Accelerate does not wrap models in DDP, or shards them with nothing left to a hook."""
    asked = [(kind, f"--{flag}") for kind, flag in _NOT_DDP.items() if getattr(args, flag)]
    named = [kind for kind in _NOT_DDP if kind.value == content.get("distributed_type")]
    if not asked and not args.multi_gpu:
        asked = [(kind, f"{file}: distributed_type: {kind.value}") for kind in named]
    for kind, where in [] if args.cpu else asked:
        if kind is not DistributedType.FSDP:
            raise HookConfigError(
                f"{where}: Accelerate does not wrap models in DistributedDataParallel then, so there is nothing to "
                f"attach a communication hook to. Use `accelerate launch`, and a configuration without {SECTION!r}"
            )
        version = _setting("fsdp_version", "fsdp_config", args, content)
        replicas, shards = (
            _setting(f"parallelism_config_dp_{each}_size", "parallelism_config", args, content)
            for each in ("replicate", "shard")
        )
        # One replica is enough if it is sharded: a run that has lost the others goes on.
        if str(version) != "2" or not f"{replicas}{shards}".isdecimal() or int(replicas) * int(shards) < 2:
            raise HookConfigError(
                f"{where}: with FSDP a communication hook averages between replicas that FSDP2 shards; given are "
                f"fsdp_version={version}, parallelism_config_dp_replicate_size={replicas} and "
                f"parallelism_config_dp_shard_size={shards}. Use fsdp_version=2 with {WITH_REPLICAS}; or use "
                f"`accelerate launch`, and a configuration without {SECTION!r}"
            )
    if content.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise HookConfigError(
            f"{file}: compute_environment: AMAZON_SAGEMAKER: the script runs on machines that this launcher does not "
            f"reach. Use `accelerate launch`, with a file of settings beside the script and {VARIABLE} in the job's "
            "variables"
        )


def _setting(name: str, section: str, args: argparse.Namespace, content: dict[str, Any]) -> Any:
    """A setting of Accelerate, from a flag or from its section in the configuration file, as its launcher finds it."""
    default = getattr(args, name)
    if name in getattr(args, "nondefault", ()):
        return default
    given = content.get(section)
    if not isinstance(given, dict):  # with anything but a section Accelerate itself will complain
        return default
    return given.get(name, given.get(name.removeprefix("fsdp_"), default))


def one_process_only(args: argparse.Namespace, content: dict[str, Any]) -> str | None:
    """A warning if Accelerate starts one process for these arguments and this configuration, else None.

    Accelerate 1.15 has two launchers for local machines; the one for the CPU starts several processes only through MPI.
    """
    kind = str(content.get("distributed_type") or "NO")  # YAML reads NO without quotes as false
    several = args.multi_gpu or args.use_fsdp or kind not in ("NO", "MULTI_CPU")
    if (several or args.mpirun_hostfile or content.get("mpirun_config")) and not args.cpu:
        return None
    return (
        "Accelerate starts one process here, whose model is not wrapped in DDP and gets no hook. For several write "
        "`distributed_type: MULTI_GPU` or --multi_gpu; on the CPU too, with Accelerator(cpu=True) in the script."
    )


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
        return _as_shell(code)
    except ChildFailedError as error:  # several
        print(error, file=sys.stderr)
        return _as_shell(error.get_first_failure()[1].exitcode)
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
    for child in psutil.wait_procs(children, timeout=END_S)[1]:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def _as_shell(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


# ------------------------------------------------------------------------------------------------ what the script used


def _remind(script: str, given: Settings) -> None:
    if given.used is not None and (sentence := unused(script, given, several_processes=False)):
        print(f"accelerate-commhooks launch: until now, {sentence}", file=sys.stderr)


def unused(script: str, given: Settings, several_processes: bool) -> str | None:
    """The error message for a script that has not used the settings, else None. With `several_processes` models should
    have been wrapped in DDP, so that the hook must have been attached, too."""
    if not given.noted("read"):
        return f"{script} has not used the hook {given.values['hook']!r} that {given.source} asks for. {WHAT_TO_DO}"
    if several_processes and not given.noted("attached"):
        return (
            f"{script} has attached the hook {given.values['hook']!r} that {given.source} asks for to no model: its "
            f"CommHookKwargs() was not given to an Accelerator that wraps a model in DDP or shards it. {WHAT_TO_DO}, "
            "and let `accelerator.prepare` wrap the model; start a script that only evaluates without such a section"
        )
    return None
