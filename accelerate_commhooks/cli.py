"""The `accelerate-commhooks` command."""

import argparse
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate_commhooks.flags import FLAGS, SECTION, add_flags
from commhooks import __version__
from commhooks.errors import HookConfigError

LAUNCH_HELP = "start a script as `accelerate launch` does, with the hook that the configuration file asks for"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 for an invalid request, 1 without Accelerate."""
    given = sys.argv[1:] if arguments is None else arguments
    args = None if given[:1] == ["launch"] else _parsed(given)  # launch: for Accelerate's launcher and the script
    from accelerate_commhooks.installed import check_accelerate

    try:
        check_accelerate()
    except ImportError as error:
        print(f"accelerate-commhooks: {error}", file=sys.stderr)
        return 1
    try:
        if args is None:
            from accelerate_commhooks.launcher import launch

            return launch(given[1:])
        return _write_config(args) if args.command == "config" else _check(args)
    except HookConfigError as error:
        print(f"accelerate-commhooks {given[0]}: error: {error}", file=sys.stderr)
        return 2


def _parsed(given: list[str]) -> argparse.Namespace:
    """The arguments of the other commands. None takes abbreviations."""
    parser = argparse.ArgumentParser(
        prog="accelerate-commhooks",
        description="Communication hooks for Accelerate, set in its configuration file.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"commhooks {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("launch", help=LAUNCH_HELP)
    config = commands.add_parser(
        "config",
        help=f"write the section {SECTION} of a configuration file",
        description=f"Writes the section {SECTION} by flags, in place of an older one; the rest of the file stays.",
        allow_abbrev=False,
    )
    config.add_argument("file", type=Path, help="Accelerate's configuration file, or a file of its own")
    config.add_argument("--force", action="store_true", help="also write into Accelerate's default configuration file")
    add_flags(config)
    check = commands.add_parser("check", help="validate a file and print what will happen", allow_abbrev=False)
    check.add_argument("file", type=Path, help="Accelerate's configuration file, or a file of its own")
    with suppress(ImportError):  # argcomplete is optional
        import argcomplete

        argcomplete.autocomplete(parser)  # does nothing unless a shell asks for completions
    args, unknown = parser.parse_known_args(given)
    if not unknown:
        return args
    if args.command != "config" or not unknown[0].startswith("-"):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    from commhooks.hook.for_plugins import unknown_flag

    flag, _, value = unknown[0].partition("=")
    value = value or next(iter(each for each in given[given.index(unknown[0]) + 1 :][:1]), "VALUE")
    config.error(unknown_flag(flag, value, args.hook, re.findall(r"--[\w-]+", config.format_usage()), "--hook_options"))


# --------------------------------------------------------------------------------------------------------------- config


def _write_config(args: argparse.Namespace) -> int:
    from accelerate.commands.config.config_args import default_json_config_file, default_yaml_config_file

    from accelerate_commhooks.handed_over import HandedOver
    from accelerate_commhooks.section_file import write_section
    from accelerate_commhooks.yaml_config import overridden, read_settings

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
    for name in FLAGS:
        value = getattr(args, name)
        if name == "hook_options":
            flags += [f"hook_options.{each}" for each in value or ()]
        elif value is not None:
            flags.append(f"{name}={value}")
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

    from accelerate_commhooks.handed_over import LINE_TO_ADD, HandedOver
    from accelerate_commhooks.yaml_config import read_settings, source_of

    settings = read_settings(args.file)
    _check_settings(HandedOver(settings, source_of(args.file)))
    start = how_it_starts(args.file, yaml.safe_load(args.file.read_text(encoding="utf-8")))
    rows = described(settings)
    widest = max(len(name) for name, _ in rows)
    print(f"{args.file}:")
    for name, text in rows:
        print(f"  {name:{widest}}  {text}")
    print(f"All other settings have their defaults.\n{start}\nThe script needs this line: {LINE_TO_ADD}")
    return 0


def described(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """The settings of a file, each with its value, or what it means; and the step at which compression begins."""
    from commhooks.hook.for_plugins import COMPRESSORS, OFF, canonical_name

    compressor = COMPRESSORS.get(canonical_name(settings["hook"]) or "")
    if compressor is None:
        plain = {"hook": "none: plain DDP, without a communication hook"} if settings["hook"] == OFF else {}
        return [(name, str(value)) for name, value in (settings | plain).items()]
    known, options = compressor.Config, settings.get("hook_options") or {}
    rows = {name: str(value) for name, value in settings.items() if name != "hook_options"}
    rows["hook"] = f"{known.hook_name}: {(known.__doc__ or '').strip().splitlines()[0]}"
    rows |= {f"hook_options.{name}": str(value) for name, value in options.items()}
    if known.start_option is not None:
        start = known(**options).resolved(settings.get("total_steps")).configured_start
        rows[f"hook_options.{known.start_option}"] = f"plain all-reduce for the first {start} steps"
    return list(rows.items())


def how_it_starts(file: Path, content: dict[str, Any]) -> str:
    """A sentence about `accelerate-commhooks launch --config_file file`."""
    from accelerate.commands.launch import launch_command_parser

    from accelerate_commhooks.launcher import one_process_only, refuse_without_ddp, settings_only

    if sentence := settings_only(str(file), content):
        return sentence
    args = launch_command_parser().parse_args(["script.py"])
    refuse_without_ddp(args, str(file), content)
    launch = f"accelerate-commhooks launch --config_file {file} script.py"
    return one_process_only(args, content) or f"`{launch}` starts {content.get('num_processes')} processes."
