"""`commhooks doctor`: run the doctor under torchrun on a model that a user's function builds."""

import argparse
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import DoctorError
from commhooks.tools.arguments import DOCTOR_COMMAND
from commhooks.tools.doctor.check import CONTRACT, check_world_size
from commhooks.tools.doctor.run import doctor
from commhooks.tools.measuring import process_group
from commhooks.tools.options import parse_options
from commhooks.tools.user_code import call, user_code

START_IT = (
    f"the doctor measures on the ranks and the network of a training. Start it as you start that: {DOCTOR_COMMAND}"
)


def run(arguments: argparse.Namespace) -> int:
    """Run the command. All ranks must call this; rank 0 prints."""
    options = parse_options(arguments.options)
    with process_group(arguments.backend, START_IT):
        check_world_size(None)
        ddp_model, batch_fn = wrapped(call(arguments.build))
        with user_code(arguments.build):
            report = doctor(
                ddp_model,
                batch_fn,
                steps=arguments.steps,
                powersgd_ranks=arguments.powersgd_ranks,
                powersgd_options=options,
                seconds=arguments.seconds,
                progress=_progress if dist.get_rank() == 0 else None,
            )
        if dist.get_rank() == 0:
            print(json.dumps(report.as_dict(), indent=1) if arguments.json else report, flush=True)
        dist.barrier()
    return 0


def _progress(text: str) -> None:
    print(f"commhooks doctor: {text}", file=sys.stderr, flush=True)


def wrapped(built: Any) -> tuple[DistributedDataParallel, Any]:
    """Check what the user's function has returned, and wrap its model in DDP."""
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
