"""`commhooks.doctor`: measure on the ranks and the network of a training whether a hook makes it faster, and which.

This module must not be named `doctor`: importing it would replace the function `commhooks.doctor` by the module.
"""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.comm.collectives import agreement_key, gather_rows
from commhooks.comm.groups import backend_of
from commhooks.compressors.adaptive import AdaptiveCompressor
from commhooks.compressors.auto.options import ALLREDUCE, BF16, FP16, INT4, INT8, NOOP, Candidate, powersgd
from commhooks.compressors.powersgd.options import PowerSGD
from commhooks.errors import DoctorError
from commhooks.registry import BUILT_IN, COMPRESSORS
from commhooks.tools.doctor.check import BatchFn, check_batch_fn, check_model
from commhooks.tools.doctor.copies import keep_random_state
from commhooks.tools.doctor.measure import Rounds
from commhooks.tools.doctor.report import DoctorReport

logger = logging.getLogger(__name__)


def doctor(
    ddp_model: DistributedDataParallel,
    batch_fn: BatchFn,
    *,
    steps: int = 10,
    powersgd_ranks: Sequence[int] = (1, 2, 4),
    powersgd_options: Mapping[str, Any] | None = None,
    seconds: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> DoctorReport:
    """Measure the training step with each hook. Every rank of the model's process group must call this with the same
    arguments; all get the same report.

    The candidates are `noop` (no communication: the largest possible gain), plain all-reduce, fp16, bf16, int8, int4
    and PowerSGD. They take turns, in rounds, on temporary copies of `ddp_model.module`, one copy at a time, wrapped
    with the same DDP arguments. The model's weights, gradients, buffers and hook, its optimizer and the random state of
    torch (CPU and the model's devices), Python and numpy are unchanged afterwards. Side effects of `batch_fn` remain:
    an iterator that it reads has advanced.

    Args:
        ddp_model: a `DistributedDataParallel` model; a hook attached to it is neither run nor changed.
        batch_fn: `batch_fn(model)` makes a batch, calls `model`, which is a copy of `ddp_model`, and returns the loss:
            a tensor with one number. The doctor calls backward. Batches should be as large as in training.
        steps: measured steps per candidate. Each of three rounds begins with two steps that are not counted.
        powersgd_ranks: values of `matrix_approximation_rank` to measure.
        powersgd_options: further options for PowerSGD, e.g. `{"exclude": ["*embed*"]}`.
        seconds: a candidate that has used this time is not measured further; it gets at least one measured step.
        progress: called from time to time with a text about what is measured.

    Returns:
        The report. `print(report)` shows a table and the hook to use; see also `report.chosen`, `report.measured` and
        `report.as_dict()`.

    Raises:
        DoctorError: no process group, only one rank, not a DDP model; or, on all ranks, `batch_fn` fails on one of
            them.
        HookConfigError: an unknown or invalid PowerSGD option.
    """
    check_model(ddp_model)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise DoctorError(f"steps={steps!r}; expected a number of steps, 1 or more")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise DoctorError(f"seconds={seconds!r}; expected a positive number")
    candidates = _candidates(powersgd_ranks, powersgd_options or {})
    group = ddp_model.process_group
    parameters = list(ddp_model.module.parameters())
    device = next(p.device for p in parameters if p.requires_grad)
    _check_arguments(group, device, (steps, float(seconds), candidates))
    restore_random = keep_random_state({p.device for p in parameters})
    tell = progress if progress is not None else logger.info
    try:
        with torch.inference_mode(False), torch.enable_grad():
            local = check_batch_fn(ddp_model, batch_fn)
            rounds = Rounds(ddp_model, batch_fn, restore_random, local, steps, float(seconds), tell)
            measured = rounds.measure(candidates)
    finally:
        restore_random()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    not_measured = tuple(each.label for each in candidates if each.label not in measured)
    return DoctorReport(measured, group.size(), backend_of(group, device), not_measured)


def _candidates(powersgd_ranks: Sequence[int], options: Mapping[str, Any]) -> list[Candidate]:
    """The hooks to measure. Raises HookConfigError for invalid PowerSGD options."""
    for name in ("matrix_approximation_rank", "start_powerSGD_iter"):
        if name in options:
            raise DoctorError(f"powersgd_options={dict(options)!r}: {name} is the doctor's own; see powersgd_ranks")
    for rank in powersgd_ranks:  # raises for options that it would not take: now, not in the middle
        PowerSGD(**{"matrix_approximation_rank": rank, **options})
    low_rank = [powersgd(rank, options) for rank in dict.fromkeys(powersgd_ranks)]
    others = [
        Candidate(name, name)
        for name, compressor in COMPRESSORS.items()
        if compressor not in BUILT_IN and not issubclass(compressor, AdaptiveCompressor)
    ]
    return [NOOP, ALLREDUCE, FP16, BF16, INT8, INT4, *low_rank, *others]


def _check_arguments(group: dist.ProcessGroup, device: torch.device, arguments: object) -> None:
    """Raise DoctorError on all ranks if the arguments differ between ranks, which would otherwise deadlock. All ranks
    must call this."""
    own = torch.tensor([agreement_key(arguments)], dtype=torch.int64, device=device)
    found = gather_rows(own, group, None, "the arguments of the doctor (call it on every rank)").flatten().tolist()
    if others := [rank for rank, value in enumerate(found) if value != found[0]]:
        raise DoctorError(f"ranks {others} call the doctor with other arguments than rank 0: give all the same")
