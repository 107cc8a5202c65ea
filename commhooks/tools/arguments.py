"""The arguments of the `commhooks` subcommands. Nothing here needs torch, so that `--help`, errors and completion are
quick."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from commhooks.hook.vocabulary import WRAPPERS

PLAN = """\
Shows what a hook will do to a model before there is a training: per parameter, per bucket of DDP and for all of it,
what is compressed or why not, MB per step and rank, the memory that is needed, and below which bandwidth a step sends
faster with the hook. The same for a training that runs: print(hook.plan()).

  commhooks plan package.module:build_model --hook powerSGD --options matrix_approximation_rank=4
  commhooks plan checkpoint.ckpt --hook powerSGD --exclude '*embed*' '*head*'
  commhooks plan package.module:build_model --nodes 16 --ranks-per-node 8 --bandwidth 25
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
        metavar="MODULE:FUNCTION|FILE",
        help="a function without arguments that returns an nn.Module (package.module:build or train.py:build), or a "
        "file of torch.save with a state dict",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, bytes and seconds")
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MB", help="as DDP's argument (25)")
    parser.add_argument("--total-steps", type=int, metavar="N", help="of the run, for a start that is a fraction")
    of_a_hook = parser.add_argument_group("the plan of one hook")
    hook: Any = of_a_hook.add_argument("--hook", help="its name (powerSGD)")
    hook.completer = hook_names
    of_a_hook.add_argument("--options", nargs="+", metavar="NAME=VALUE", help="options of the hook; values are YAML")
    of_a_hook.add_argument(
        "--exclude", nargs="+", metavar="GLOB", help="the same as --options \"exclude=['GLOB', ...]\""
    )
    of_a_hook.add_argument("--wrapper", choices=WRAPPERS, help="what is made of the numbers that are sent")
    of_a_hook.add_argument("--world-size", type=int, metavar="N", help="ranks, for the estimate (2)")
    of_a_hook.add_argument("--rtt-ms", type=float, metavar="MS", help="round trip between ranks, for the estimate (0)")
    of_a_hook.add_argument("--device", choices=("cpu", "cuda"), help="where the codec is timed (cuda if there is one)")
    of_a_hook.add_argument(
        "--codec-ms",
        type=float,
        metavar="MS",
        help="the codec's time per step (of diloco per outer step), instead of timing",
    )
    of_a_hook.add_argument(
        "--step-ms",
        type=float,
        metavar="MS",
        help="a step without a network: what sync_every makes that small (diloco)",
    )
    on_nodes = parser.add_argument_group("instead of the plan, a table of all hooks on many nodes")
    on_nodes.add_argument("--nodes", type=int, metavar="N", help="how many; the flags below are for this table")
    on_nodes.add_argument("--ranks-per-node", type=int, metavar="N", help="how many (8)")
    on_nodes.add_argument("--bandwidth", type=float, metavar="GBIT", help="between nodes, Gbit/s (25)")
    on_nodes.add_argument("--inside", type=float, metavar="GBIT", help="inside a node, Gbit/s (400)")
    on_nodes.add_argument("--latency-us", type=float, metavar="US", help="per message between nodes (30)")
    on_nodes.add_argument("--backend", choices=["nccl", "gloo"], help="what carries the collectives (nccl)")


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
        help="further options of PowerSGD, e.g. warm_start=false",
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="a candidate that has used as many takes no further part (60)"
    )
    parser.add_argument("--backend", help="of the process group: nccl, gloo (default: torch's choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and the advice here")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a picture of step time against bandwidth here (PNG)"
    )


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
    from commhooks.compressors.registry import names_to_offer

    return names_to_offer()


COMMANDS = {
    "hooks": Command("list the hooks and their options", lambda parser: None, "commhooks.tools.hooks_command"),
    "plan": Command(
        "show what a hook will compress in your model, and from which bandwidth on it matters",
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
