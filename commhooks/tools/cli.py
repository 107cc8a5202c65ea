"""Run the `commhooks` command: its arguments, and `commhooks hooks`.

The other subcommands are modules of this package with a function `run(arguments)`. This module does
not import torch, so that `--help` and completion are fast.
"""

import argparse
import dataclasses
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import commhooks
from commhooks.errors import CommHookError, did_you_mean

WRAPPERS = ("fp16", "bf16")
SHARDS = ("int8", "bf16")
PLAN = """\
Shows before training what a hook compresses in a model, as print(hook.plan()) does: what is sent of
each parameter, or why it is not compressed, the bytes per step and rank, and the memory.

  commhooks plan train:build_model --hook powerSGD --options matrix_approximation_rank=4
  commhooks plan ../job/model.py:build_model --exclude '*embed*' '*head*'

With --shards it shows what FSDP2's own collectives send if fully_shard is applied to every layer
and to the model, without a MixedPrecisionPolicy; --options are those of commhooks.Shards:

  commhooks plan train:build_model --shards int8 --ranks 16 --ranks-per-node 8
"""
NETWORK = """\
Measures the network between the ranks of a run, without a script or a model: each connection, all
ranks together, the interface, and the time that a step spends on it with plain DDP and with hooks.
It takes less than a minute. Start it like the run, on every machine:

  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
    -m commhooks network

Times are predicted for transformers with --params parameters. With --step-ms, the time of a step
without a network, it recommends a hook."""
FINDS_MACHINES = "run the lighthouse, through which the machines of a run find each other (members)"
LIGHTHOUSE = """\
Runs torchft's lighthouse, through which the machines of a run with members="torchft" find each
other. It needs no GPU and hardly any memory or network; run it on a machine that stays. Ends with
Ctrl-C. Whoever reaches the port can take part, unless the machines share a secret
(COMMHOOKS_SECRET)."""

SHOWS_MACHINES = "show what the machines of a run do, in a table (members)"
SHOWN_MACHINES = """\
Shows what the machines of a run with members="torchft" do: outer steps so far, steps per second in
the latest round, the weight in the latest outer step, seconds of waiting for others, bytes sent,
and since when each takes part. Run it on any host that reaches them, with COMMHOOKS_SECRET if they
have one. Ends with Ctrl-C."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its status: 1 for a CommHookError, which stderr shows."""
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
    parsers = {}
    for name, command in COMMANDS.items():
        parsers[name] = subparsers.add_parser(
            name,
            help=command.summary,
            description=command.description or command.summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(parsers[name])
    with suppress(ImportError):  # argcomplete is optional
        import argcomplete

        argcomplete.autocomplete(parser)  # does nothing unless a shell asks for completions
    return parser, parsers


# ---- the arguments of each command
# --------------------------------------------------------------------------------------------------


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    return None


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns the nn.Module",
    )
    hook: Any = parser.add_argument("--hook", help="its name (powerSGD)")
    hook.completer = hook_names
    parser.add_argument(
        "--exclude",
        nargs="+",
        metavar="GLOB",
        help="the same as --options \"exclude=['GLOB', ...]\"",
    )
    parser.add_argument(
        "--wrapper", choices=WRAPPERS, help="the dtype to which the hook casts what it sends"
    )
    parser.add_argument(
        "--total-steps", type=int, metavar="N", help="of the run, for a start that is a fraction"
    )
    parser.add_argument(
        "--shards",
        choices=SHARDS,
        help="plan FSDP2's gathers of weights and scatters of gradients instead of a hook",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="of the run, with --shards")
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="of each machine, with --shards (1)"
    )
    options = "options of the hook, or of Shards; values are YAML"
    parser.add_argument("--options", nargs="+", default=[], metavar="NAME=VALUE", help=options)
    _json_argument(parser, "sizes in bytes")


def _network_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--params",
        nargs="+",
        default=["124M", "1.5B"],
        metavar="N",
        help="sizes of models: 350k, 124M, 7B (124M 1.5B)",
    )
    parser.add_argument(
        "--step-ms", type=float, metavar="MS", help="the time of a step without a network"
    )
    parser.add_argument(
        "--gathers",
        type=int,
        choices=(1, 2),
        default=2,
        help="of the weights in a step of fully_shard: 1 with reshard_after_forward=False (2)",
    )
    parser.add_argument(
        "--backend", help="of the process group: nccl, gloo (default: torch's choice)"
    )
    _json_argument(parser, "bytes, seconds, bit/s")


def _env_arguments(parser: argparse.ArgumentParser) -> None:
    _json_argument(parser, "texts")


def _machines_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lighthouse",
        metavar="URL",
        help="such as http://10.0.0.5:29510 (default: TORCHFT_LIGHTHOUSE)",
    )
    parser.add_argument(
        "--every-s", type=float, metavar="S", default=1, help="seconds between two looks (1)"
    )
    parser.add_argument("--once", action="store_true", help="print the table once, and end")


def _lighthouse_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=29510, help="on all interfaces (29510)")
    parser.add_argument(
        "--wait-s",
        type=float,
        metavar="S",
        default=3600,
        help=(
            "leave out a machine that is alive after so many seconds, if more than half of the"
            " machines wait for it (3600). The machines themselves leave out one that hangs"
        ),
    )
    parser.add_argument(
        "--heartbeat-timeout-s",
        type=float,
        metavar="S",
        default=5,
        help=(
            "leave out a machine whose heartbeats have not arrived for so many seconds, because its"
            " host or network is down (5). That a process has died is noticed at once"
        ),
    )


def _json_argument(parser: argparse.ArgumentParser, holds: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print JSON: {holds}")


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        summary: one line for `commhooks --help`.
        description: for its own `--help`; "": the summary.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    description: str = ""


COMMANDS = {
    "hooks": Command("list the hooks and their options"),
    "plan": Command("show what a hook will compress in your model", _plan_arguments, PLAN),
    "network": Command(
        "measure the network between the ranks, and what a step of training spends on it",
        _network_arguments,
        NETWORK,
    ),
    "env": Command(
        "print versions, backends, kernels and interfaces of this machine, for bug reports",
        _env_arguments,
    ),
    "lighthouse": Command(FINDS_MACHINES, _lighthouse_arguments, LIGHTHOUSE),
    "machines": Command(SHOWS_MACHINES, _machines_arguments, SHOWN_MACHINES),
}
"""The subcommands by name. All except `hooks` are modules of this package with a function `run`."""


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
    """Return the first sentence about each option, from the docstrings of the config classes."""
    texts: dict[str, str] = {}
    for base in config.__mro__:
        docstring = inspect.cleandoc(base.__doc__ or "")
        section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
        entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE)
        texts = {name: " ".join(text.split()) for name, text in entries} | texts
    names = [option.name for option in dataclasses.fields(config)]
    return {
        name: texts.get(name, "").partition(". ")[0].rstrip(".")
        for name in names
        if name not in config.without_use
    }
