"""Checks command lines in snippets."""

import importlib.util
import re
import shlex
import sys
from typing import Any

from commhooks.errors import CommHookError
from tests.support.doc_snippets import WrongSnippet
from tests.support.repository import REPOSITORY


def commands(text: str) -> list[list[str]]:
    """The commands of a snippet as lists of words; comments are left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def check_command(words: list[str]) -> None:
    """Whether a command line would work in a clone of the repository: as far as can be told without running it."""
    if words[0] == "export":
        words = words[1:]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return
    program, *rest = words
    if program == "make":
        _check_make(rest)
    elif program in ("python", "python3"):
        _check_python(rest)
    elif program == "srun":
        check_command(rest)
    elif program == "torchrun":
        _check_torchrun(rest)
    elif program == "pip":
        _check_pip(rest)
    elif program == "accelerate-commhooks":
        _check_accelerate_commhooks(rest)
    elif program == "commhooks":
        from commhooks.tools.cli import COMMANDS, main

        if rest[1:] == [] and rest[0] in COMMANDS and rest != ["hooks"]:  # the text speaks of the command
            return
        try:
            status = main(rest)
        except SystemExit as error:
            status = error.code
        if status:
            raise WrongSnippet(f"{shlex.join(words)} exits with status {status}")
    else:
        raise WrongSnippet(f"{shlex.join(words)}: this test does not know {program!r}; teach it")


def _check_make(words: list[str]) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = [word for word in words if "=" not in word]
    for target in targets:
        if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE):
            raise WrongSnippet(f"make {target}: the Makefile has no such target")
    for name, _, value in (word.partition("=") for word in words if "=" in word):
        if f"$({name})" not in makefile:
            raise WrongSnippet(f"make {name}=...: the Makefile does not use {name}")
        if name == "ARGS" and targets == ["demo"]:
            _check_python(["examples/demo.py", *shlex.split(value)])


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if importlib.util.find_spec(words[1]) is None:
            raise WrongSnippet(f"python -m {words[1]}: there is no such module")
        return
    if words == ["train.py"]:  # stands for the reader's own
        return
    script = REPOSITORY / words[0]
    if not script.is_file():
        raise WrongSnippet(f"python {words[0]}: there is no such file")
    if script.name == "clean_env.py":
        _check_python(words[1:])
    elif words[1:]:
        sys.path.insert(0, str(script.parent))
        try:
            module = importlib.import_module(script.stem)
            module.arguments().parse_args(words[1:])
        except (AttributeError, SystemExit) as error:
            raise WrongSnippet(f"python {shlex.join(words)}: the script does not take these arguments") from error
        finally:
            sys.path.remove(str(script.parent))


def _check_accelerate_commhooks(words: list[str]) -> None:
    from accelerate_commhooks.settings import Settings
    from commhooks import HookConfigError

    if words[0] != "launch":
        raise WrongSnippet(f"accelerate-commhooks {words[0]}: the command is launch")
    if words == ["launch"]:  # the text speaks of the command
        return
    args = _launch_arguments(words)
    if args.config_file is not None:
        try:
            Settings.read(REPOSITORY / args.config_file).check(imports=False)
        except HookConfigError as error:
            raise WrongSnippet(f"accelerate-commhooks {shlex.join(words)}: {error}") from error
    _check_python([args.training_script, *args.training_script_args])


def _launch_arguments(words: list[str]) -> Any:
    """Of `accelerate launch`."""
    from accelerate.commands.launch import launch_command_parser

    try:
        return launch_command_parser().parse_args(words[1:])
    except SystemExit as error:
        raise WrongSnippet(f"accelerate {shlex.join(words)}: these are no arguments of it") from error


def _check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    if "-m" not in words and not any(word.endswith(".py") for word in words):  # the text speaks of its flags
        unknown = [word for word in words if word.partition("=")[0] not in parser._option_string_actions]
        if unknown:
            raise WrongSnippet(f"torchrun {shlex.join(words)}: torchrun does not take {unknown[0]}")
        return
    try:
        args = parser.parse_args(words)
    except SystemExit as error:
        raise WrongSnippet(f"torchrun {shlex.join(words)}: torchrun does not take these arguments") from error
    if args.module and args.training_script == "commhooks":
        _check_commhooks(args.training_script_args)
    else:
        _check_python([*["-m"] * args.module, args.training_script, *args.training_script_args])


def _check_commhooks(words: list[str]) -> None:
    """The commands that only torchrun can start."""
    from commhooks.tools.cli import make_parser
    from commhooks.tools.common import call

    try:
        assert words[:1] in (["doctor"], ["network"])
        given = make_parser()[0].parse_args(words)
        if words[0] == "doctor":
            call(given.build)
    except (AssertionError, CommHookError, SystemExit) as error:
        raise WrongSnippet(f"commhooks {shlex.join(words)}: cannot be started by torchrun: {error}") from error


def _check_pip(words: list[str]) -> None:
    if words[:1] != ["install"]:
        raise WrongSnippet(f"pip {shlex.join(words)}: expected 'pip install'")
    optional = (REPOSITORY / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    for word in words[1:]:
        package, _, extras = word.rstrip("]").partition("[")
        if package not in (".", "-e", "--editable"):
            raise WrongSnippet(f"pip install {word}: only this repository, '.', is installed by its own pages")
        for extra in filter(None, extras.split(",")):
            if not re.search(rf"^{re.escape(extra)} = \[", optional, re.MULTILINE):
                raise WrongSnippet(f"pip install {word}: there is no extra {extra!r}")
