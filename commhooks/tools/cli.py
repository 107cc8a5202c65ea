"""Run the `commhooks` command: its arguments, and `commhooks hooks`. The other subcommands are
modules of this package with a function `run(arguments)`. This module does not import torch, so that
`--help` and completion are fast.
"""

import argparse
import dataclasses
import importlib
import inspect
import os
import re
import sys
from contextlib import suppress
from typing import Any

import commhooks
from commhooks.errors import CommHookError, did_you_mean

WRAPPERS = ("fp16", "bf16")
PLAN = """\
Shows before training what a hook compresses in a model, as print(hook.plan()) does: what is sent of
each parameter, or why it is not compressed, the bytes per step and rank, and the memory.

  commhooks plan train:build_model --hook powerSGD --options matrix_approximation_rank=4
  commhooks plan ../job/model.py:build_model --exclude '*embed*' '*head*'
"""
NETWORK = """\
Measures the network between the ranks of a run, without a script or a model: each connection, all
ranks together, the interface, and the time that a step spends on it with plain DDP and with hooks.
It takes less than a minute. Start it like the run, on every machine:

  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
    -m commhooks network

Times are predicted for transformers with --params parameters. With --step-ms, the time of a step
without a network, it recommends a hook."""
LIGHTHOUSE = """\
Runs torchft's lighthouse, through which the machines of a run with members="torchft" find each
other. It needs no GPU and hardly any memory or network; run it on a machine that stays. Ends with
Ctrl-C. Whoever reaches the port can take part: use it in a network that you trust."""
COMMANDS = {
    "hooks": "list the hooks and their options",
    "plan": "show what a hook will compress in your model",
    "network": "measure the network between the ranks, and what a step of training spends on it",
    "env": "print versions, backends, kernels and interfaces of this machine, for bug reports",
    "lighthouse": (
        "run the lighthouse, through which the machines of a training find each other (members)"
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return the exit status. For a `CommHookError`, print one line to stderr
    and return 1.
    """
    parser, parsers = make_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    used = parsers.get(parsed.command, parser)
    if unknown:
        flag = unknown[0].partition("=")[0]
        flags = re.findall(r"--[\w-]+", used.format_usage()) if flag.startswith("-") else []
        used.error(f"unrecognized arguments: {unknown[0]}{did_you_mean(flag, flags)}")
    if parsed.command is None:
        parser.print_help()
        return 0
    try:
        if parsed.command == "hooks":
            print_hooks()
        else:
            importlib.import_module(f"commhooks.tools.{parsed.command}").run(parsed)
        sys.stdout.flush()
        return 0
    except CommHookError as error:
        print(f"commhooks {parsed.command}: {error}", file=sys.stderr)
    except BrokenPipeError:  # the reader has closed the pipe, as in `commhooks plan ... | head`
        # otherwise Python reports it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser and its subparsers, without abbreviations: `--rank` must not mean
    `--ranks-per-node`.
    """
    parser = argparse.ArgumentParser(
        prog="commhooks",
        description="Communication hooks for DDP and FSDP2: list them, and measure what they gain.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"commhooks {commhooks.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    raw: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parsers = {
        name: subparsers.add_parser(name, help=text, description=text, **raw)
        for name, text in COMMANDS.items()
    }
    plan, network = parsers["plan"], parsers["network"]
    plan.description, network.description = PLAN, NETWORK

    plan.add_argument(
        "model",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns the nn.Module",
    )
    hook: Any = plan.add_argument("--hook", default="powerSGD", help="its name (powerSGD)")
    hook.completer = hook_names
    plan.add_argument(
        "--exclude",
        nargs="+",
        metavar="GLOB",
        help="the same as --options \"exclude=['GLOB', ...]\"",
    )
    plan.add_argument(
        "--wrapper", choices=WRAPPERS, help="the dtype to which the hook casts what it sends"
    )
    plan.add_argument(
        "--total-steps", type=int, metavar="N", help="of the run, for a start that is a fraction"
    )

    network.add_argument(
        "--params",
        nargs="+",
        default=["124M", "1.5B"],
        metavar="N",
        help="sizes of models: 350k, 124M, 7B (124M 1.5B)",
    )
    network.add_argument(
        "--step-ms", type=float, metavar="MS", help="the time of a step without a network"
    )

    lighthouse = parsers["lighthouse"]
    lighthouse.description = LIGHTHOUSE
    lighthouse.add_argument("--port", type=int, default=29510, help="on all interfaces (29510)")
    lighthouse.add_argument(
        "--wait-s",
        type=float,
        metavar="S",
        default=3600,
        help=(
            "leave out a machine that is alive after so many seconds, if more than half of the"
            " machines wait for it (3600). The machines themselves leave out one that hangs"
        ),
    )
    lighthouse.add_argument(
        "--heartbeat-timeout-s",
        type=float,
        metavar="S",
        default=5,
        help=(
            "leave out a machine whose heartbeats have not arrived for so many seconds, because its"
            " host or network is down (5). That a process has died is noticed at once"
        ),
    )

    options = "options of the hook; values are YAML"
    plan.add_argument("--options", nargs="+", default=[], metavar="NAME=VALUE", help=options)
    network.add_argument(
        "--backend", help="of the process group: nccl, gloo (default: torch's choice)"
    )
    for name, holds in {
        "plan": "sizes in bytes",
        "network": "bytes, seconds, bit/s",
        "env": "texts",
    }.items():
        parsers[name].add_argument("--json", action="store_true", help=f"print JSON: {holds}")
    with suppress(ImportError):  # argcomplete is optional
        import argcomplete

        argcomplete.autocomplete(parser)  # does nothing unless a shell asks for completions
    return parser, parsers


def hook_names(**_: object) -> list[str]:
    from commhooks.registry import names_to_offer

    return names_to_offer()


# ---- `commhooks hooks`
# -----------------------------------------------------------------------------------------------


def print_hooks() -> None:
    from rich.console import Console
    from rich.table import Table

    from commhooks.registry import COMPRESSORS, aliases, available_hooks, compressor_of

    table = Table(show_lines=True)
    table.add_column("hook", no_wrap=True)
    table.add_column("what it does, and options with their defaults")
    short = {name: alias for alias, name in aliases().items()}
    for name, hook in available_hooks().items():
        lines = [hook["description"]]
        explained = explained_options(COMPRESSORS[name].Config) if name in COMPRESSORS else {}
        for option, text in explained.items():  # one option per line, so that each can be copied
            lines += [f"  {option}={hook['options'][option]!r}", f"      {text}".rstrip()]
        table.add_row(
            f"{name}\n({short[name]})" if name in short else name, "\n".join(filter(None, lines))
        )
    *first, last = (
        name for name, hook in COMPRESSORS.items() if not compressor_of(hook.Config()).wrappers
    )
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(table)
    console.print(
        "Case, _ and - in names do not matter; names in parentheses are short forms. Every hook"
        f" except {', '.join(first)} and {last} takes wrapper={' or '.join(map(repr, WRAPPERS))},"
        " which halves what it sends. Give a hook of your own as 'package.module:function'; 'none'"
        " trains without a hook."
    )


def explained_options(config: type[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in config.__mro__:
        section = (
            inspect.cleandoc(each.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        )
        entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE)
        found = {name: " ".join(text.split()) for name, text in entries} | found
    names = [
        each.name for each in dataclasses.fields(config) if each.name not in config.without_use
    ]
    return {name: found.get(name, "").partition(". ")[0].rstrip(".") for name in names}
