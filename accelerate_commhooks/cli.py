"""The `accelerate-commhooks` command."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from accelerate_commhooks.yaml_config import SECTION, CommHookConfig, overridden
from commhooks import HookConfigError, __version__

LAUNCH_HELP = "start a script as `accelerate launch` does, with the hook that the configuration file asks for"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 for an invalid request."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given[:1] == ["launch"]:  # the other arguments are for Accelerate's launcher and the script
            from accelerate_commhooks.launcher import launch

            return launch(given[1:])
        args = _parser().parse_args(given)
        return _write_config(args) if args.command == "config" else _check(args)
    except HookConfigError as error:
        print(f"accelerate-commhooks {given[0]}: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-commhooks", description="Communication hooks for Accelerate, set in its configuration file."
    )
    parser.add_argument("--version", action="version", version=f"commhooks {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("launch", help=LAUNCH_HELP)

    config = commands.add_parser(
        "config",
        help=f"write the section {SECTION} of a configuration file",
        description=f"Writes the section {SECTION} by flags, in place of an older one; the rest of the file stays.",
    )
    config.add_argument("file", type=Path, help="Accelerate's configuration file, or a file of its own")
    config.add_argument("--force", action="store_true", help="also write into Accelerate's default configuration file")
    for field in dataclasses.fields(CommHookConfig):
        names = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
        about: dict[str, Any] = {"metavar": "VALUE", "help": f"default: {field.default}"}
        if field.name == "hook":
            about = {"metavar": "NAME", "required": True, "help": "`commhooks hooks` lists them"}
        elif field.name == "hook_options":
            about = {"metavar": "NAME=VALUE", "nargs": "+", "help": "e.g. matrix_approximation_rank=4"}
        config.add_argument(*names, dest=field.name, **about)

    check = commands.add_parser("check", help="validate a file and print what will happen")
    check.add_argument("file", type=Path, help="Accelerate's configuration file, or a file of its own")
    return parser


# --------------------------------------------------------------------------------------------------------------- config


def _write_config(args: argparse.Namespace) -> int:
    from accelerate.commands.config.config_args import default_json_config_file, default_yaml_config_file

    from accelerate_commhooks.handed_over import HandedOver
    from accelerate_commhooks.section_file import write_section
    from accelerate_commhooks.yaml_config import read_settings

    path: Path = args.file
    if not args.force and path.resolve() in (
        Path(default_yaml_config_file).resolve(),
        Path(default_json_config_file).resolve(),
    ):
        raise HookConfigError(
            f"{path} is Accelerate's default configuration file. Accelerate refuses keys that it does not know: with "
            f"{SECTION!r} in it, `accelerate launch`, `env`, `test` and `config update` end with an error in every "
            "project of yours. Write into a file of its own and launch with --config_file, or add --force"
        )
    flags = []
    for field in dataclasses.fields(CommHookConfig):
        value = getattr(args, field.name)
        if field.name == "hook_options":
            flags += [f"hook_options.{each}" for each in value or ()]
        elif value is not None:
            flags.append(f"{field.name}={value}")
    settings = overridden({}, flags, "flags")
    _check_settings(HandedOver(settings, "flags"))
    new = not path.exists()
    write_section(path, settings)
    read_settings(path)
    print(f"{path}: the section {SECTION} is written. `accelerate-commhooks check {path}` shows what it does.")
    if new:
        print(
            f"The file is new and holds nothing else. `accelerate-commhooks launch --config_file {path}` needs "
            f"Accelerate's own settings in it too: run `accelerate config --config_file {path}`, and then this again."
        )
    return 0


def _check_settings(given: Any) -> None:
    from accelerate_commhooks.launcher import check_settings

    check_settings(given)


# ---------------------------------------------------------------------------------------------------------------- check


def _check(args: argparse.Namespace) -> int:
    import yaml
    from rich.console import Console
    from rich.table import Table

    from accelerate_commhooks.handed_over import LINE_TO_ADD, HandedOver
    from accelerate_commhooks.yaml_config import read_settings

    settings = read_settings(args.file)
    _check_settings(HandedOver(settings, str(args.file)))
    table = Table(title=str(args.file), title_justify="left")
    for column in ("setting", "value", ""):
        table.add_column(column, no_wrap=column == "setting", overflow="fold")
    for name, value, note in described(settings):
        table.add_row(name, str(value), note)
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(table)
    content = yaml.safe_load(args.file.read_text(encoding="utf-8"))
    console.print(how_it_starts(args.file, content))
    console.print(f"The script needs this line: {LINE_TO_ADD}")
    return 0


def described(settings: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Rows (setting, value, note). The note is the description of the hook, "default", a computed start step, or
    empty for a value from the file."""
    from commhooks.hook.for_plugins import COMPRESSORS, canonical_name

    rows: list[tuple[str, Any, str]] = []
    compressor = COMPRESSORS.get(canonical_name(settings["hook"]) or "")
    known = None if compressor is None else compressor.Config
    for field in dataclasses.fields(CommHookConfig):
        value = settings.get(field.name, field.default)
        note = "" if field.name in settings else "default"
        if field.name == "hook" and known is not None:
            rows.append(("hook", known.hook_name, (known.__doc__ or "").strip().splitlines()[0]))
        elif field.name != "hook_options" or known is None:
            rows.append((field.name, value, note))
        else:
            made = known(**(value or {}))
            for option in dataclasses.fields(known):
                shown, about = getattr(made, option.name), "" if option.name in (value or {}) else "default"
                if option.name == known.start_option:
                    start = made.resolved(settings.get("total_steps")).configured_start
                    if start != shown:
                        about = f"plain all-reduce for the first {start} steps"
                rows.append((f"hook_options.{option.name}", shown, about))
    return rows


def how_it_starts(file: Path, content: dict[str, Any]) -> str:
    """A sentence about `accelerate-commhooks launch --config_file file`."""
    from accelerate.commands.launch import launch_command_parser

    from accelerate_commhooks.handed_over import VARIABLE
    from accelerate_commhooks.launcher import one_process_only, refuse_without_ddp

    if "distributed_type" not in content:
        return (
            f"Settings only: use it with CommHookKwargs.from_config({str(file)!r}), or with {VARIABLE}={file} and "
            "CommHookKwargs(). For `accelerate-commhooks launch` it needs Accelerate's own settings too."
        )
    args = launch_command_parser().parse_args(["script.py"])
    refuse_without_ddp(args, content)
    launch = f"accelerate-commhooks launch --config_file {file} script.py"
    return one_process_only(args, content) or f"`{launch}` starts {content.get('num_processes')} processes."
