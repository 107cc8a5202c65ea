"""`commhooks doctor`: run the doctor under torchrun on a model that a user's function builds."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.compressors.dotted_path import current_folder_first, import_path
from commhooks.errors import DoctorError
from commhooks.tools.arguments import DOCTOR_COMMAND
from commhooks.tools.doctor.check import CONTRACT, check_world_size
from commhooks.tools.doctor.report import check_output
from commhooks.tools.doctor.run import doctor
from commhooks.tools.options import parse_options
from commhooks.tools.process_group import process_group

START_IT = (
    f"the doctor measures on the ranks and the network of a training. Start it as you start that: {DOCTOR_COMMAND}"
)


def run(arguments: argparse.Namespace) -> int:
    """Run the command. All ranks must call this; rank 0 prints and writes files."""
    if os.environ.get("RANK", "0") == "0":  # which writes; other machines may lack the folder
        check_output(arguments.json, arguments.plot)
    options = parse_options(arguments.options)
    with current_folder_first(), process_group(arguments.backend, START_IT):
        check_world_size(None)
        ddp_model, batch_fn = build_model(import_build(arguments.build))
        rank, progress = dist.get_rank(), Progress(sys.stderr)
        report = doctor(
            ddp_model,
            batch_fn,
            steps=arguments.steps,
            powersgd_ranks=arguments.powersgd_ranks,
            powersgd_options=options,
            seconds=arguments.seconds,
            progress=progress if rank == 0 else None,
        )
        if rank == 0:
            progress.end()
            print(report, flush=True)
            if arguments.json is not None:
                report.save_json(arguments.json)
            if arguments.plot is not None:
                report.plot(arguments.plot)
        dist.barrier()
    return 0


class Progress:
    """Shows what is measured: on a terminal in one line that is overwritten, in a file or pipe in a line each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, text: str) -> None:
        start, end = ("\r\x1b[2K", "") if self._stream.isatty() else ("", "\n")
        print(f"{start}commhooks doctor: {text}", end=end, file=self._stream, flush=True)

    def end(self) -> None:
        """Remove the line from the terminal."""
        if self._stream.isatty():
            print("\r\x1b[2K", end="", file=self._stream, flush=True)


def import_build(path: str) -> Callable[[], Any]:
    """Import the function at a path `package.module:function`."""
    found = import_path(path, repr(path), error_class=DoctorError)
    if not callable(found):
        raise DoctorError(f"{path!r} is a {type(found).__name__}; expected a function that returns (model, batch_fn)")
    return found


def build_model(build: Callable[[], Any]) -> tuple[DistributedDataParallel, Any]:
    """Call `build` and wrap the model it returns."""
    built = build()
    if not isinstance(built, tuple) or len(built) != 2:
        raise DoctorError(
            f"build returned a {type(built).__name__}; expected (model, batch_fn), an nn.Module and a function: "
            f"{CONTRACT}"
        )
    model, batch_fn = built
    if not isinstance(model, torch.nn.Module):
        raise DoctorError(f"build returned (a {type(model).__name__}, ...); expected an nn.Module as the first")
    if not callable(batch_fn):
        raise DoctorError(f"build returned (model, a {type(batch_fn).__name__}); expected a function: {CONTRACT}")
    if isinstance(model, DistributedDataParallel):
        return model, batch_fn
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise DoctorError("the model has no parameter that requires a gradient: there is nothing to exchange")
    device = trained[0].device
    on_one_gpu = device.type == "cuda" and {p.device for p in model.parameters()} == {device}
    return DistributedDataParallel(model, device_ids=[device] if on_one_gpu else None), batch_fn
