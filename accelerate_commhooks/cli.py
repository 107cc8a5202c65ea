"""The `accelerate-commhooks` command."""

import argparse
import json
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate_commhooks import check_accelerate
from accelerate_commhooks.flags import FLAGS, SECTION, add_flags
from commhooks import __version__
from commhooks.errors import HookConfigError

LAUNCH_HELP = "start a script as `accelerate launch` does, with the hook that the configuration file asks for"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 for an invalid request, 1 without Accelerate."""
    given = sys.argv[1:] if arguments is None else arguments
    args = None if given[:1] == ["launch"] else _parsed(given)  # launch: for Accelerate's launcher and the script
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
    following = given[given.index(unknown[0]) + 1 :]
    value = value or (following[0] if following else "VALUE")
    config.error(unknown_flag(flag, value, args.hook, re.findall(r"--[\w-]+", config.format_usage()), "--hook_options"))


# --------------------------------------------------------------------------------------------------------------- config


def _write_config(args: argparse.Namespace) -> int:
    from accelerate.commands.config.config_args import default_json_config_file, default_yaml_config_file

    from accelerate_commhooks.launcher import check_settings
    from accelerate_commhooks.settings import Settings

    path: Path = args.file
    defaults = (Path(default_yaml_config_file).resolve(), Path(default_json_config_file).resolve())
    if not args.force and path.resolve() in defaults:
        raise HookConfigError(
            f"{path} is Accelerate's default configuration file. Accelerate refuses keys that it does not know: with "
            f"{SECTION!r} in it, `accelerate launch`, `env`, `test` and `config update` end with an error in every "
            "project of yours. Write into a file of its own and launch with --config_file, or add --force"
        )
    flags = [
        f"{name}={value}" for name in FLAGS if name != "hook_options" and (value := getattr(args, name)) is not None
    ]
    flags += [f"hook_options.{each}" for each in args.hook_options or ()]
    settings = Settings({}, "flags").overridden(flags)
    check_settings(settings)
    new = not path.exists()
    try:
        write_section(path, settings.values)
    except OSError as error:
        raise HookConfigError(f"{path} cannot be read or written: {error.strerror or error}") from error
    print(f"{path}: the section {SECTION} is written. `accelerate-commhooks check {path}` shows what it does.")
    if new:
        print(
            f"The file is new and holds nothing else. `accelerate-commhooks launch --config_file {path}` needs "
            f"Accelerate's own settings in it too: run `accelerate config --config_file {path}`, and then this again."
        )
    return 0


def write_section(path: Path, settings: dict[str, Any]) -> None:
    """Write the section of a file in place of an older one; the rest of the file stays, also its comments. The file is
    created if it is missing, and not changed by an error. Accelerate reads JSON where the name ends in ".json"."""
    import yaml

    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        root = yaml.compose(before, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HookConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise HookConfigError(f"{path} does not hold settings ('key: value')")
    if path.suffix == ".json" or (root is not None and root.flow_style):  # there are no comments to keep
        try:
            text = json.dumps((yaml.safe_load(before) or {}) | {SECTION: settings}, indent=2) + "\n"
        except TypeError as error:  # of a date, for example
            raise HookConfigError(
                f"{path} was not changed, because not all in it is JSON ({error}). Write the section {SECTION} by hand"
            ) from error
    else:
        text = _without_section(before, root)
        text += "" if not text or text.endswith("\n") else "\n"
        text += yaml.safe_dump({SECTION: settings}, sort_keys=False)
    try:
        yaml.safe_load(text)
    except yaml.YAMLError as error:  # what stands around the section may need what was there before
        raise HookConfigError(
            f"{path} was not changed, because with the new section it would be no YAML any more "
            f"({' '.join(str(error).split())}). Write the section {SECTION} by hand"
        ) from error
    path = path.resolve()  # replace the target of a link, not the link
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _without_section(text: str, root: Any) -> str:
    for key, value in root.value if root is not None else ():
        if key.value == SECTION:
            lines = text.splitlines(keepends=True)
            end = value.end_mark.line + (value.end_mark.column > 0)
            # The parser ends a block before the next token. Blank lines and comments before that token belong to the
            # token, unless they are indented as the block is.
            while end > key.start_mark.line + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
                end -= 1
            return "".join(lines[: key.start_mark.line] + lines[end:])
    return text


# ---------------------------------------------------------------------------------------------------------------- check


def _check(args: argparse.Namespace) -> int:
    from accelerate_commhooks.launcher import check_settings
    from accelerate_commhooks.settings import LINE_TO_ADD, Settings

    settings = Settings.read(args.file)
    check_settings(settings)
    start, rows = _how_it_starts(str(args.file)), _described(settings.values)
    widest = max(map(len, rows))
    print(f"{args.file}:")
    for name, text in rows.items():
        print(f"  {name:{widest}}  {text}")
    print(f"All other settings have their defaults.\n{start}\nThe script needs this line: {LINE_TO_ADD}")
    return 0


def _described(settings: dict[str, Any]) -> dict[str, str]:
    """Each setting of a file with its value, or what it means; and the step at which compression begins."""
    from commhooks.hook.for_plugins import OFF, config_class

    rows = {name: str(value) for name, value in settings.items()}
    if settings["hook"] == OFF:
        rows["hook"] = "none: plain DDP, without a communication hook"
    known = config_class(settings["hook"])
    if known is None:
        return rows
    options = settings.get("hook_options") or {}
    rows.pop("hook_options", None)
    rows["hook"] = f"{known.hook_name}: {(known.__doc__ or '').strip().splitlines()[0]}"
    rows |= {f"hook_options.{name}": str(value) for name, value in options.items()}
    if known.start_option is not None:
        start = known(**options).resolved(settings.get("total_steps")).configured_start
        rows[f"hook_options.{known.start_option}"] = f"plain all-reduce for the first {start} steps"
    return rows


def _how_it_starts(file: str) -> str:
    """A sentence about `accelerate-commhooks launch --config_file file`."""
    from accelerate.commands.launch import launch_command_parser

    from accelerate_commhooks.launcher import one_process_only, read_as_accelerate, refuse_without_hook, settings_only

    content = read_as_accelerate(file)
    if sentence := settings_only(file, content):
        return sentence
    args = launch_command_parser().parse_args(["script.py"])
    refuse_without_hook(args, file, content)
    # Without a number, or with -1, Accelerate wants the flag.
    count, flag = content.get("num_processes", -1), ""
    if count == -1:
        count, flag = "N", "--num_processes N "
    launch = f"accelerate-commhooks launch --config_file {file} {flag}script.py"
    return one_process_only(args, content) or f"`{launch}` starts {count} processes."
