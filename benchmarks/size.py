"""How much code one training step and an import run, and how much there is: what a reader has to
follow.

    python benchmarks/size.py [--hooks powerSGD int8 allreduce bf16 diloco]

A model of six linear layers runs in one process. `sys.setprofile` records every function of the
packages that one steady backward pass enters, in the thread that runs it. For diloco these are the
functions of a round of three whole steps.

    files, functions    files and functions of the packages that the step or round enters
    changes of file     how often a call or a return leads into another file

Below the table: how many modules of the packages each import runs, in a process of its own, and its
milliseconds once the framework is imported.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from common import Row, machine, number, parse, parser, report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("commhooks", "lightning_commhooks", "accelerate_commhooks")
STEPS_BEFORE = 6
EVERY = {"diloco": 3}
"""Steps in a round."""
OPTIONS = {
    "powerSGD": {"start_powerSGD_iter": 1},
    "int8": {"start_iter": 1},
    "int4": {"start_iter": 1},
    "diloco": {"sync_every": EVERY["diloco"], "outer_momentum": 0.9},
}
IMPORTS = {
    "commhooks": ("", "import commhooks"),
    "attach": ("import torch.distributed.fsdp", "from commhooks import attach"),
    "Lightning": ("import lightning.pytorch", "import lightning_commhooks"),
    "Fabric": ("import lightning.fabric", "from lightning_commhooks.fabric import CommHookDDP"),
    "Accelerate": ("import accelerate", "from accelerate_commhooks import CommHookKwargs"),
    "transformers": (
        "import accelerate; from transformers import Trainer",
        "from accelerate_commhooks.transformers import CommHookTrainer",
    ),
}
"""Front end -> what a script has imported before, and what is measured."""
_MEASURE_IMPORT = """
import sys, time
{before}
start = time.perf_counter()
{statement}
milliseconds = 1000 * (time.perf_counter() - start)
print(sum(name.partition(".")[0] in {packages} for name in sys.modules), milliseconds)
"""


class Followed:
    """The functions that one step enters, in order."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, int]] = set()
        self.changes = 0
        self._file = ""
        self._package = str(Path(commhooks.__file__).parent) + os.sep

    @contextmanager
    def __call__(self) -> Iterator[None]:
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._package):
            return
        if event == "call":
            self.functions.add((code.co_filename, code.co_firstlineno))
        self.changes += code.co_filename != self._file
        self._file = code.co_filename


def follow(hook: str) -> Row:
    """Measure one step or round with this hook."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
    commhooks.attach(ddp, hook, hook_options=OPTIONS.get(hook)).quiet()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    followed = Followed()
    for _ in range(STEPS_BEFORE):
        _step(ddp, optimizer)
    if hook in EVERY:
        with followed():
            for _ in range(EVERY[hook]):
                _step(ddp, optimizer)
    else:
        loss = ddp(torch.randn(8, 64)).square().mean()
        with followed():
            loss.backward()
    files = {file for file, _ in followed.functions}
    return {
        "hook": hook,
        "files": len(files),
        "functions": len(followed.functions),
        "changes of file": followed.changes,
    }


def _step(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ddp(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()


def lines(package: str) -> tuple[int, int]:
    """Return the number of files of a package, and of their lines: Python and C, as tracked by
    git.
    """
    command = ["git", "ls-files", f"{package}/*.py", f"{package}/*.c", f"{package}/*.h"]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return len(names), sum(len((ROOT / name).read_text().splitlines()) for name in names)


def of_import(name: str) -> str:
    """Measure one of `IMPORTS`, and return a line about it."""
    before, statement = IMPORTS[name]
    script = _MEASURE_IMPORT.format(before=before, statement=statement, packages=PACKAGES)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    modules, milliseconds = result.stdout.split()
    return f"{statement}: {modules} modules, {float(milliseconds):.0f} ms" + (
        f" after `{before}`" if before else ""
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--hooks", nargs="+", default=["powerSGD", "int8", "allreduce", "bf16", "diloco"]
    )
    made.add_argument("--imports", nargs="+", default=list(IMPORTS), choices=IMPORTS)
    args = parse(made, hooks=["powerSGD"], imports=["commhooks"])
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [follow(hook) for hook in args.hooks]
    dist.destroy_process_group()
    columns = {name: number(name) for name in ("hook", "files", "functions", "changes of file")}
    notes = ["{}: {} files, {} lines".format(package, *lines(package)) for package in PACKAGES]
    notes += [of_import(name) for name in args.imports]
    report(
        "size",
        "size: what a steady step or a round enters, CPU, DDP",
        args,
        machine(),
        rows,
        columns,
        notes,
    )


if __name__ == "__main__":
    main()
