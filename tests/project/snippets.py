"""Finds the fenced snippets of a Markdown page, and runs or checks each, by its language:

    python   executed on two ranks
    diff     its old and its new version, both as python; they must differ
    yaml     with `trainer:` parsed by LightningCLI, which must end up with a CommHookDDP; else read
    by CommHookKwargs bash     every command must exist, with its files, targets, extras and flags
    text     not looked at

A comment above a fence, which no page shows, says what is there when it runs. python and diff must
have one:

    <!-- snippet: alone -->       nothing: the snippet imports what it uses
    <!-- snippet: torchrun -->    nothing: a script of its own that torchrun starts, without a
    process group <!-- snippet: ddp -->         `model`, `optimizer` and `batches`, in a process
    group
    <!-- snippet: members -->     as for `ddp`, with a lighthouse of torchft
    <!-- snippet: attached -->    the same, and `ddp_model` with its `hook`, three steps old
    <!-- snippet: accelerate -->  as for `ddp`, and `train_loader`; in processes as `accelerate
    launch` starts them <!-- snippet: accelerate sharded --> the same on four ranks, where FSDP2 of
    Accelerate works <!-- snippet: transformers --> `model`, `args` and `train_dataset` for a
    Trainer; in processes of torchrun <!-- snippet: transformers sharded --> `model`,
    `train_dataset` and `TrainingArguments`, on such four ranks <!-- snippet: continued -->
    whatever the python snippet above it left
    <!-- snippet: lightning -->   `model` and `train_loader`; the snippet is a script of its own,
                                  started from a shell (of a diff the new version; the old one as
                                  below)
    <!-- snippet: lightning ranks --> the same in processes as torchrun starts them, which is much
    faster <!-- snippet: fabric ranks --> the same with Fabric
    <!-- snippet: lightning notebook --> a script as above that forks, so that nothing of its
    training is left in it

    <!-- snippet: output -->      of the script above: each line of this `text` must be in what
    its first run prints

A script with `ckpt_path="last"` is started twice: the second run must continue where the first has
ended.
"""

import contextlib
import dataclasses
import importlib.util
import linecache
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import clean_env
import pytest
import torch
import torch.distributed as dist

from commhooks import registry
from commhooks.errors import CommHookError
from tests.support import warm
from tests.support.repository import REPOSITORY

LANGUAGES = ("python", "diff", "yaml", "bash", "text")
RUN_AS_SCRIPTS = ("lightning", "lightning notebook")
_LIGHTNING_NEEDS = ("lightning", "lightning ranks", "lightning notebook")
_ACCELERATE_NEEDS = ("accelerate", "accelerate sharded")
_OTHER_NEEDS = ("transformers", "transformers sharded", "continued", "output", "fabric ranks")
NEEDS = (
    "",
    "alone",
    "torchrun",
    "ddp",
    "members",
    "attached",
    *_ACCELERATE_NEEDS,
    *_OTHER_NEEDS,
    *_LIGHTNING_NEEDS,
)

_COMMENT = re.compile(r"^\s*<!-- snippet: (.*?) -->\s*$")
_FENCE = re.compile(r"^(\s*)(```+|~~~+)\s*(\S*)")


class WrongSnippet(AssertionError):
    """A snippet does not do what its reader will expect; the text says where it is and why."""


@dataclass(frozen=True)
class Snippet:
    page: str
    line: int
    language: str
    needs: str
    text: str
    above: "Snippet | None" = None
    """The snippet that this one continues."""
    output: str = ""
    """Lines that a script must print."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def find_snippets(page: str, markdown: str) -> list[Snippet]:
    """All fences of a page. Raises `WrongSnippet` for one without a known language."""
    snippets: list[Snippet] = []
    lines = markdown.splitlines()
    number = 0
    in_list = False
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            if lines[number][:1].strip():
                in_list = re.match(r"[-*] |\d+\. ", lines[number]) is not None
            # "options" of mkdocstrings
            if re.match(r"    +(?!options: )\S", lines[number]) and not in_list:
                raise WrongSnippet(
                    f"{page}:{number + 1}: code without a fence, which nothing checks"
                )
            number += 1
            continue
        end = number + 1
        while end < len(lines) and lines[end].strip() != opening[2]:
            end += 1
        comment = _COMMENT.match(lines[number - 1]) if number else None
        needs = comment[1] if comment else ""
        where = f"{page}:{number + 1}"
        if end == len(lines):
            raise WrongSnippet(f"{where}: the fence is never closed")
        if opening[3] not in LANGUAGES:
            raise WrongSnippet(
                f"{where}: language {opening[3]!r}; expected one of {', '.join(LANGUAGES)}"
            )
        if needs not in NEEDS:
            raise WrongSnippet(f"{where}: unknown comment 'snippet: {needs}'")
        if not needs and opening[3] in ("python", "diff"):
            raise WrongSnippet(
                f"{where}: no comment says what is there when it runs, such as <!-- snippet:"
                " alone -->"
            )
        text = textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n"
        if needs == "output":
            if not snippets or snippets[-1].needs not in RUN_AS_SCRIPTS:
                raise WrongSnippet(f"{where}: the output of what? Above it must be a script")
            snippets[-1] = dataclasses.replace(snippets[-1], output=text)
        python = [snippet for snippet in snippets if snippet.language == "python"]
        above = python[-1] if needs == "continued" and python else None
        snippets.append(Snippet(page, number + 1, opening[3], needs, text, above))
        number = end + 1
    return snippets


def old_and_new(diff: str) -> tuple[str, str]:
    """The two versions of a text that a diff without headers shows."""
    old, new = [], []
    for line in diff.splitlines():
        if line[:1] not in ("-", "+", " ", ""):
            raise WrongSnippet(
                f"a line of a diff begins with '+', '-' or a space, this one does not: {line!r}"
            )
        if line[:1] != "+":
            old.append(line[1:])
        if line[:1] != "-":
            new.append(line[1:])
    if old == new:
        raise WrongSnippet("the diff changes nothing")
    return "\n".join(old) + "\n", "\n".join(new) + "\n"


def versions(snippet: Snippet) -> tuple[str, ...]:
    return old_and_new(snippet.text) if snippet.language == "diff" else (snippet.text,)


def check(snippet: Snippet, run_ranks: Callable[..., list[Any]], folder: Path) -> None:
    """Runs or checks one snippet in the empty `folder`; raises where it is wrong."""
    if snippet.language in ("python", "diff"):
        *old, new = versions(snippet)
        for index, version in enumerate([*old, new]):
            place = folder / str(index)
            place.mkdir()
            if snippet.needs == "lightning notebook":
                _compare(snippet, run_script(version, place, ""))
            elif snippet.needs == "lightning" and version == new:
                _compare(snippet, run_script(version, place))
                if 'ckpt_path="last"' in version and "resumed at step" not in run_script(
                    version, place
                ):
                    raise WrongSnippet(f"{snippet}: the second run does not continue\n{version}")
            else:
                chain = [*_chain_above(snippet), (str(snippet), version)]
                needs = _first(snippet).needs + (" ranks" if snippet.needs == "lightning" else "")
                if needs == "torchrun":
                    run_with_torchrun("\n".join(text for _, text in chain), place)
                    continue
                if needs.startswith("transformers"):
                    pytest.importorskip(
                        "transformers", reason="transformers needs Python 3.11 or newer"
                    )
                ranks = 4 if needs.endswith(" sharded") else 2
                run_ranks(execute, chain, needs, str(place), world_size=ranks, timeout_s=90)
    elif snippet.language == "yaml":
        check_yaml(snippet.text, folder)
    elif snippet.language == "bash":
        for command in commands(snippet.text):
            check_command(command)


def _compare(snippet: Snippet, printed: str) -> None:
    """The kernel depends on the machine, and is not compared."""

    def without_kernel(text: str) -> str:
        return re.sub(r"; [^;)]* kernel", "", text)

    for line in snippet.output.splitlines():
        if without_kernel(line) not in without_kernel(printed):
            raise WrongSnippet(f"{snippet} does not print {line!r}, but\n{printed}")


def _first(snippet: Snippet) -> Snippet:
    return _first(snippet.above) if snippet.above is not None else snippet


def _chain_above(snippet: Snippet) -> list[tuple[str, str]]:
    if snippet.above is None:
        return []
    return [*_chain_above(snippet.above), (str(snippet.above), versions(snippet.above)[-1])]


# ---- Python --------------------------------------------------------------------------------------


SCRIPT_LIMIT_S = 150

_DDP = """
import torch
import torch.distributed as dist

model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
train_loader = torch.utils.data.DataLoader(torch.cat(batches), batch_size=2)
"""
_ATTACHED = """
import commhooks

ddp_model = torch.nn.parallel.DistributedDataParallel(model)
hook = commhooks.attach(ddp_model, commhooks.PowerSGD(start_powerSGD_iter=1))
"""
_STEPS = """
for batch in batches:
    ddp_model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if "hook" in globals():
    assert hook.stats()["backward_passes"] >= len(batches), "the hook was not called"
"""


_ACCELERATE_STEPS = """
for batch in batches:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
if hasattr(accelerator.ddp_handler, "attached"):
    calls = accelerator.ddp_handler.attached.stats()["backward_passes"]
    assert calls >= len(batches), "the hook was not called"
"""

_TRANSFORMERS = """
import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers_trainer import make_model  # of examples/

model = make_model(width=16)
pieces = torch.arange(256).view(16, 16)
train_dataset = [{"input_ids": piece, "labels": piece} for piece in pieces]
args = TrainingArguments(
    "trainer", use_cpu=True, max_steps=4, save_steps=2, per_device_train_batch_size=2,
    report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
)
"""
_SHARDED = """
settings = {"use_cpu": True, "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2}
settings |= {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}


def TrainingArguments(*args, given=TrainingArguments, **kwargs):
    return given(*args, **settings | kwargs)
"""
_TRAINER_TRAINED = """
assert trainer.state.global_step == 4, "nothing was trained"
if hasattr(trainer, "comm_hook"):
    assert trainer.comm_hook.stats()["step"] == 4, "the hook was not called"
"""


def execute(chain: list[tuple[str, str]], needs: str, folder: str) -> None:
    """On every rank: what the snippets need, the snippets, and three training steps if there is a
    DDP model.

    `chain` holds where each snippet stands and its text.
    """
    outside = {}
    if needs in ("lightning ranks", "fabric ranks"):
        # as Lightning 2.6 knows torchrun
        outside = {
            "TORCHELASTIC_RUN_ID": "snippets",
            "GROUP_RANK": "0",
        }
    sharded = needs.endswith(" sharded")
    needs = needs.removesuffix(" sharded")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    if needs != "alone":
        exec(
            _DDP if needs in ("ddp", "members", "attached", "accelerate") else "import torch",
            namespace,
        )
    lighthouse = None if needs != "members" else _lighthouse()
    if needs == "attached":
        exec(_ATTACHED + _STEPS, namespace)
    before = os.getcwd()
    os.chdir(folder)
    with contextlib.ExitStack() as undo:
        undo.callback(os.chdir, before)
        undo.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        if lighthouse is not None:
            undo.enter_context(mock.patch.dict(os.environ, TORCHFT_LIGHTHOUSE=lighthouse[0]))
        undo.enter_context(_logging_as_before())
        undo.enter_context(mock.patch.dict(registry.COMPRESSORS))
        # a name that a snippet gives is free again afterwards
        undo.enter_context(mock.patch.dict(registry.FACTORIES))
        if needs in ("accelerate", "transformers", "lightning ranks", "fabric ranks"):
            from tests.support.accelerators import accelerate_launched, pretend_to_have_accelerators

            undo.enter_context(accelerate_launched(**outside))
            if sharded and needs == "accelerate":
                pretend_to_have_accelerators()
        if needs in ("lightning ranks", "fabric ranks"):
            exec(_LIGHTNING, namespace)
        if needs == "transformers":
            exec(_TRANSFORMERS + (_SHARDED if sharded else ""), namespace)
        for name, text in chain:
            # for tracebacks
            linecache.cache[name] = (
                len(text),
                None,
                text.splitlines(keepends=True),
                name,
            )
            exec(compile(text, name, "exec"), namespace)
            dist.barrier()  # what one rank has written, another may read
        if "ddp_model" in namespace:
            exec(_STEPS, namespace)
            for parameter in namespace["ddp_model"].parameters():
                everywhere = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
                dist.all_gather(everywhere, parameter.detach())
                assert all(torch.equal(parameter, other) for other in everywhere), (
                    "the replicas differ"
                )
        if needs == "accelerate":
            exec(_ACCELERATE_STEPS, namespace)
        if needs == "transformers":
            exec(_TRAINER_TRAINED, namespace)
        if needs == "lightning ranks":
            exec(_TRAINED, namespace)
        if needs == "fabric ranks":
            assert namespace["fabric"].strategy.comm_hook.stats()["compressed_steps"] > 0, (
                "nothing was compressed"
            )


def _lighthouse() -> tuple[str, Any]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("127.0.0.1:0", 1) if dist.get_rank() == 0 else None
    addresses = [None if server is None else server.address()]
    dist.broadcast_object_list(addresses)
    return f"http://127.0.0.1:{str(addresses[0]).rpartition(':')[2]}", server


@contextlib.contextmanager
def _logging_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("commhooks")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers


_LIGHTNING = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

model = BoringModel()
model.layer = torch.nn.Linear(32, 16)  # worth compressing
train_loader = torch.utils.data.DataLoader(RandomDataset(32, 16))
"""
_TRAINED = """
assert trainer.global_step > 0, "nothing was trained"
if hasattr(trainer.strategy, "comm_hook"):
    passes = trainer.strategy.comm_hook.stats()["so_far"]["backward_passes"]
    assert passes == trainer.global_step, "the hook was not called"
"""


def run_script(text: str, folder: Path, check: str = _TRAINED) -> str:
    """As a user would: a file, started once; Lightning starts the other processes. `check`: code at
    its end. Returns what it printed.
    """
    script = folder / "snippet.py"
    script.write_text(_LIGHTNING + text + check)
    env = clean_env.cleaned(os.environ, str(folder)) | {"PYTHONPATH": str(REPOSITORY)}
    command = [warm.python("lightning.pytorch"), str(script)]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=SCRIPT_LIMIT_S
    )
    if done.returncode != 0:
        raise WrongSnippet(f"{text}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def run_with_torchrun(text: str, folder: Path) -> None:
    script = folder / "snippet.py"
    script.write_text(text)
    env = clean_env.cleaned(os.environ, str(folder)) | {"PYTHONPATH": str(REPOSITORY)}
    torchrun = [
        warm.python(),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
    ]
    command = [*torchrun, "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=SCRIPT_LIMIT_S
    )
    if done.returncode != 0:
        raise WrongSnippet(f"{text}\n{done.stdout}{done.stderr}")


# ---- YAML ----------------------------------------------------------------------------------------


def check_yaml(text: str, folder: Path) -> None:
    if re.search("^trainer:", text, re.MULTILINE):
        _check_lightning_yaml(text, folder)
    else:
        _check_accelerate_yaml(text, folder)


def _check_accelerate_yaml(text: str, folder: Path) -> None:
    """Settings for `CommHookKwargs`; around a section there must be one of Accelerate."""
    import yaml
    from accelerate.commands.config.config_args import load_config_from_file

    from accelerate_commhooks.yaml_settings import SECTION, Settings

    path = folder / "config.yaml"
    path.write_text(text)
    try:
        Settings.read(path).check(imports=False)
    except CommHookError as error:
        raise WrongSnippet(f"{error}\n{text}") from error
    content = yaml.safe_load(text)
    if content.pop(SECTION, None) is not None:
        path.write_text(yaml.safe_dump(content))
        try:
            load_config_from_file(str(path))
        except ValueError as error:
            raise WrongSnippet(f"Accelerate refuses\n{text}\n{error}") from error


def _check_lightning_yaml(text: str, folder: Path) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_commhooks import CommHookDDP

    path = folder / "config.yaml"
    path.write_text(text)
    command_line = [
        "main.py",
        "--config",
        str(path),
        "--trainer.accelerator",
        "cpu",
        "--trainer.logger",
        "false",
    ]
    try:
        with mock.patch.object(sys, "argv", command_line):
            cli = LightningCLI(
                BoringModel, run=False, save_config_callback=None, seed_everything_default=False
            )
    except SystemExit as error:  # jsonargparse has written to stderr what it does not like
        raise WrongSnippet(f"LightningCLI refuses\n{text}") from error
    if not isinstance(cli.trainer.strategy, CommHookDDP):
        raise WrongSnippet(
            f"the strategy is a {type(cli.trainer.strategy).__name__}, not a CommHookDDP,"
            f" with\n{text}"
        )


# ---- commands ------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """The commands of a snippet as lists of words; comments are left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [
        words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))
    ]


def check_command(words: list[str]) -> None:
    """Whether a command line would work in a clone, as far as can be told without running it."""
    if words[0] == "export":
        words = words[1:]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return
    program, *rest = words
    checks = {
        "make": _check_make,
        "python": _check_python,
        "srun": check_command,
        "sudo": check_command,
        "torchrun": _check_torchrun,
    }
    checks |= {"pip": _check_pip, "accelerate-commhooks": _check_accelerate_commhooks}
    if program in checks:
        checks[program](rest)
    elif program == "commhooks":
        from commhooks.tools.cli import COMMANDS, main

        # the text speaks of the command
        if rest[1:] == [] and rest[0] in COMMANDS and rest != ["hooks"]:
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
        path = mock.patch.object(sys, "path", [str(script.parent), *sys.path])
        with path, _refused_arguments(f"python {shlex.join(words)}"):
            importlib.import_module(script.stem).arguments().parse_args(words[1:])


def _check_accelerate_commhooks(words: list[str]) -> None:
    from accelerate_commhooks.yaml_settings import Settings

    if words[0] != "launch":
        raise WrongSnippet(f"accelerate-commhooks {words[0]}: the command is launch")
    if words == ["launch"]:  # the text speaks of the command
        return
    from accelerate.commands.launch import launch_command_parser

    with _refused_arguments(f"accelerate-commhooks {shlex.join(words)}"):
        args = launch_command_parser().parse_args(words[1:])
    if args.config_file is not None:
        try:
            Settings.read(REPOSITORY / args.config_file).check(imports=False)
        except CommHookError as error:
            raise WrongSnippet(f"accelerate-commhooks {shlex.join(words)}: {error}") from error
    _check_python([args.training_script, *args.training_script_args])


@contextlib.contextmanager
def _refused_arguments(command: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, AttributeError, CommHookError, SystemExit) as error:
        raise WrongSnippet(f"{command}: does not take these arguments: {error}") from error


def _check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    # the text speaks of its flags
    if "-m" not in words and not any(word.endswith(".py") for word in words):
        unknown = [
            word for word in words if word.partition("=")[0] not in parser._option_string_actions
        ]
        if unknown:
            raise WrongSnippet(f"torchrun {shlex.join(words)}: torchrun does not take {unknown[0]}")
        return
    with _refused_arguments(f"torchrun {shlex.join(words)}"):
        args = parser.parse_args(words)
    if args.module and args.training_script == "commhooks":
        _check_commhooks(args.training_script_args)
    else:
        _check_python([*["-m"] * args.module, args.training_script, *args.training_script_args])


def _check_commhooks(words: list[str]) -> None:
    """The commands that only torchrun can start."""
    from commhooks.tools.cli import make_parser

    with _refused_arguments(f"commhooks {shlex.join(words)}"):
        assert words[:1] == ["network"]
        make_parser()[0].parse_args(words)


def _check_pip(words: list[str]) -> None:
    if words[:1] != ["install"]:
        raise WrongSnippet(f"pip {shlex.join(words)}: expected 'pip install'")
    optional = (
        (REPOSITORY / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    )
    for word in words[1:]:
        package, _, extras = word.rstrip("]").partition("[")
        if package not in (".", "-e", "--editable"):
            raise WrongSnippet(
                f"pip install {word}: only this repository, '.', is installed by its own pages"
            )
        for extra in filter(None, extras.split(",")):
            if not re.search(rf"^{re.escape(extra)} = \[", optional, re.MULTILINE):
                raise WrongSnippet(f"pip install {word}: there is no extra {extra!r}")
