"""The arguments of the `commhooks` subcommands. Nothing here needs torch, so that `--help`, errors and completion are
quick."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

WRAPPERS = ("fp16", "bf16")

PLAN = """\
Shows what a hook will do to a model before there is a training: for each parameter and in all what is compressed or
why not, the bytes per step and rank, and the memory that is needed. It prints what print(hook.plan()) prints in a
training.

  commhooks plan train:build_model --hook powerSGD --options matrix_approximation_rank=4
  commhooks plan package.module:build_model --exclude '*embed*' '*head*'
"""
DOCTOR_COMMAND = "torchrun --nproc-per-node 2 -m commhooks doctor package.module:build"
DOCTOR = f"""\
Measures on your own ranks and network which hook makes training faster, and says when none does. Start it as you
start the training:

  {DOCTOR_COMMAND}

The function build takes no argument and returns (model, batch_fn): the model on its device, wrapped in
DistributedDataParallel or not, and a function batch_fn(model) that makes a batch, calls the model that it is given and
returns the loss:

  def build():
      model = Net().to(device)
      def batch_fn(model):
          inputs, targets = next(batches)
          return cross_entropy(model(inputs), targets)
      return model, batch_fn

The process group is there when build is called, and on a GPU the device of LOCAL_RANK is set. Nothing is trained:
copies of the model are measured. examples/doctor_transformer.py is a whole one."""
NETWORK_COMMAND = (
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m commhooks network"
)
NETWORK = f"""\
Measures the network between the ranks of a training, without a script or a model: the connection of each pair, what all
reach together and over which interface, and what a step spends on it with plain DDP and with hooks. It takes a minute
or less. Start it as you start the training, on every machine:

  {NETWORK_COMMAND}

The models are transformers of so many parameters. With --step-ms, the time of a step without a network, it says which
hook makes the network small beside that."""


class Command(NamedTuple):
    """A subcommand."""

    help: str
    """One line for the list of commands."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    module: str
    """Has the function `run(arguments)`, which runs it and returns the exit status; a `CommHookError` becomes one line
    on stderr and status 1. It is imported only to run."""


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.description = PLAN
    parser.add_argument(
        "model",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns the nn.Module, or (model, batch_fn) as for `commhooks doctor`",
    )
    hook: Any = parser.add_argument("--hook", default="powerSGD", help="its name (powerSGD)")
    hook.completer = hook_names
    parser.add_argument(
        "--options", nargs="+", default=[], metavar="NAME=VALUE", help="options of the hook; values are YAML"
    )
    parser.add_argument("--exclude", nargs="+", metavar="GLOB", help="the same as --options \"exclude=['GLOB', ...]\"")
    parser.add_argument("--wrapper", choices=WRAPPERS, help="what is made of the numbers that are sent")
    parser.add_argument("--total-steps", type=int, metavar="N", help="of the run, for a start that is a fraction")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = DOCTOR
    parser.add_argument("build", metavar="MODULE:FUNCTION", help="returns (model, batch_fn), see above")
    parser.add_argument("--steps", type=int, default=10, help="measured steps per candidate (10)")
    parser.add_argument(
        "--powersgd-ranks", type=int, nargs="*", default=[1, 2, 4], metavar="RANK", help="to be tried (1 2 4)"
    )
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="further options of PowerSGD, e.g. use_error_feedback=false",
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="a candidate that has used as many takes no further part (60)"
    )
    parser.add_argument("--backend", help="of the process group: nccl, gloo (default: torch's choice)")
    parser.add_argument("--json", action="store_true", help="print JSON: ms and bytes of each step")


def _network(parser: argparse.ArgumentParser) -> None:
    parser.description = NETWORK
    parser.add_argument(
        "--params", nargs="+", default=["124M", "1.5B"], metavar="N", help="sizes of models: 350k, 124M, 7B (124M 1.5B)"
    )
    parser.add_argument("--step-ms", type=float, metavar="MS", help="a step without a network")
    parser.add_argument("--backend", help="of the process group: nccl, gloo (default: torch's choice)")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, bit/s")


def hook_names(**_: object) -> list[str]:
    """For the completion of `--hook`."""
    from commhooks.registry import names_to_offer

    return names_to_offer()


COMMANDS = {
    "hooks": Command("list the hooks and their options", lambda parser: None, "commhooks.tools.hooks_command"),
    "plan": Command(
        "show what a hook will compress in your model",
        _plan,
        "commhooks.tools.plan_command",
    ),
    "doctor": Command(
        "measure on your own ranks and network which hook makes training faster, if any",
        _doctor,
        "commhooks.tools.doctor.command",
    ),
    "network": Command(
        "measure the network between the ranks, and what a step of training spends on it",
        _network,
        "commhooks.tools.network.command",
    ),
}
