"""`commhooks.doctor` and `commhooks doctor`: measure which hook makes a training fastest on its ranks and network."""

import argparse
import copy
import gc
import inspect
import itertools
import json
import logging
import math
import random
import statistics
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.auto.options import (
    ALLREDUCE,
    BF16,
    FP16,
    INT4,
    INT8,
    MARGIN,
    NOOP,
    Candidate,
    choose,
    powersgd,
)
from commhooks.comm.collectives import agreement_key, gather_rows, gather_texts
from commhooks.comm.groups import backend_of
from commhooks.compressors.cast import Noop
from commhooks.compressors.powersgd.options import PowerSGD
from commhooks.errors import AttachError, DoctorError, HookConfigError
from commhooks.gradients.torch_private import delays_all_reduce
from commhooks.hook.attach import attach
from commhooks.plan import new_table, text_of
from commhooks.registry import BUILT_IN, COMPRESSORS
from commhooks.request import why_not_called
from commhooks.tools.common import call, parse_options, process_group, seconds_of, user_code

logger = logging.getLogger(__name__)

BatchFn = Callable[[DistributedDataParallel], torch.Tensor]
Gradients = Sequence[torch.Tensor | None]
"""The gradients of a model's parameters, in order, on the CPU."""

ROUNDS = 3
# DDP rebuilds its buckets after the first backward pass, and the hook allocates buffers for them in the second pass.
_WARM_UP = 2
CONTRACT = (
    "batch_fn(model) makes a batch, calls the model that it is given (a copy of yours) and returns the loss, a tensor "
    "with one number"
)
LEGEND = (
    "step: forward, backward and exchange, without the optimizer, from a common start to the end of the last rank. MB "
    "sent: passed to all-reduce. error: relative error of the gradient in one step; hooks with error feedback send the "
    "missing part in later steps, so compare the losses at the end of training."
)
_ALONE = (
    "one rank only: there is nothing to exchange, and nothing to compress. Start as many ranks as the training will "
    "have, on its machines"
)
_FROZEN = "no parameter of this model requires a gradient: there is nothing to exchange"


def run(arguments: argparse.Namespace) -> None:
    options = parse_options(arguments.options)
    with process_group(arguments.backend, "torchrun --nproc-per-node 2 -m commhooks doctor package.module:build"):
        if dist.get_world_size() == 1:
            raise DoctorError(_ALONE)
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


def doctor(
    ddp_model: DistributedDataParallel,
    batch_fn: BatchFn,
    *,
    steps: int = 10,
    powersgd_ranks: Sequence[int] = (1, 2, 4),
    powersgd_options: Mapping[str, Any] | None = None,
    seconds: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> "DoctorReport":
    """Measure the training step with each hook. Every rank of the model's process group must call this with equal
    arguments, and gets the same report.

    The candidates are `noop` (no communication: the largest possible gain), plain all-reduce, fp16, bf16, int8, int4,
    PowerSGD and your own registered compressors. They take turns on temporary copies of `ddp_model.module`, one copy at
    a time, wrapped with the same DDP arguments. Afterwards the model's weights, gradients, buffers and hook, its
    optimizer and the random states of torch, Python and numpy are unchanged. Side effects of `batch_fn` remain: an
    iterator that it reads has advanced.

    Args:
        ddp_model: a `DistributedDataParallel` model; a hook attached to it is neither run nor changed.
        batch_fn: `batch_fn(model)` makes a batch, calls `model`, a copy of `ddp_model`, and returns the loss, a tensor
            with one number. The doctor calls backward. Batches should be as large as in training.
        steps: measured steps per candidate. Each of three rounds begins with two steps that do not count.
        powersgd_ranks: values of `matrix_approximation_rank` to measure.
        powersgd_options: other options of PowerSGD, e.g. `{"exclude": ["*embed*"]}`.
        seconds: time limit per candidate, after at least one measured step.
        progress: called with a line of text before each measurement.

    Returns:
        The report. `print(report)` shows a table and the hook to use; see also `report.chosen`, `report.measured` and
        `report.as_dict()`.

    Raises:
        DoctorError: there is no process group or only one rank, or the model is not a DDP model. On all ranks:
            `batch_fn` fails on any rank.
        HookConfigError: an unknown or invalid PowerSGD option.
    """
    check_model(ddp_model)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise DoctorError(f"steps={steps!r}; expected a number of steps, 1 or more")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise DoctorError(f"seconds={seconds!r}; expected a positive number")
    candidates = _candidates(powersgd_ranks, powersgd_options or {})
    group, parameters = ddp_model.process_group, list(ddp_model.module.parameters())
    device = _device_of(ddp_model)
    own = torch.tensor([agreement_key((steps, float(seconds), candidates))], dtype=torch.int64, device=device)
    found = gather_rows(own, group, None, "the arguments of the doctor (call it on every rank)").flatten().tolist()
    if others := [rank for rank, value in enumerate(found) if value != found[0]]:
        raise DoctorError(
            f"ranks {others} call the doctor with different arguments than rank 0: pass the same on every rank"
        )
    restore_random = keep_random_state({p.device for p in parameters})
    try:
        with torch.inference_mode(False), torch.enable_grad():
            local = check_batch_fn(ddp_model, batch_fn)
            rounds = Rounds(ddp_model, batch_fn, restore_random, local, steps, float(seconds), progress or logger.info)
            measured = rounds.measure(candidates)
    finally:
        restore_random()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    not_measured = tuple(each.label for each in candidates if each.label not in measured)
    return DoctorReport(measured, group.size(), backend_of(group, device), not_measured)


def _progress(text: str) -> None:
    print(f"commhooks doctor: {text}", file=sys.stderr, flush=True)


def _candidates(powersgd_ranks: Sequence[int], options: Mapping[str, Any]) -> list[Candidate]:
    for name in ("matrix_approximation_rank", "start_powerSGD_iter"):
        if name in options:
            raise DoctorError(f"powersgd_options={dict(options)!r}: {name} is set by the doctor; see powersgd_ranks")
    for rank in powersgd_ranks:  # an invalid option must not end the doctor halfway
        PowerSGD(**{"matrix_approximation_rank": rank, **options})
    low_rank = [powersgd(rank, options) for rank in dict.fromkeys(powersgd_ranks)]
    others = [
        Candidate(name, name)
        for name, compressor in COMPRESSORS.items()
        if compressor not in BUILT_IN and not compressor.uses_machines
    ]
    return [NOOP, ALLREDUCE, FP16, BF16, INT8, INT4, *low_rank, *others]


def _device_of(ddp_model: DistributedDataParallel) -> torch.device:
    return next(p.device for p in ddp_model.parameters() if p.requires_grad)


# ---- what can be measured --------------------------------------------------------------------------------------------


def wrapped(built: Any) -> tuple[DistributedDataParallel, Any]:
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
    devices = {p.device for p in model.parameters()}
    if not any(p.requires_grad for p in model.parameters()):
        raise DoctorError(_FROZEN)
    on_one_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
    return DistributedDataParallel(model, device_ids=[*devices] if on_one_gpu else None), batch_fn


def check_model(ddp_model: object) -> None:
    if not dist.is_initialized():
        raise DoctorError(
            "no process group: the doctor measures on the ranks and the network of a training; start it with torchrun, "
            "and from Python call torch.distributed.init_process_group first"
        )
    if not isinstance(ddp_model, DistributedDataParallel):
        raise DoctorError(
            f"expected a torch.nn.parallel.DistributedDataParallel model, got a {type(ddp_model).__module__}."
            f"{type(ddp_model).__qualname__}; wrap the model first (and torch.compile it afterwards)"
        )
    if ddp_model.mixed_precision is not None:
        raise DoctorError(
            "DistributedDataParallel(mixed_precision=...) occupies the communication hook, so no other hook can be "
            "tried; use autocast for mixed precision"
        )
    if delays_all_reduce(ddp_model):
        raise DoctorError("DistributedDataParallel(delay_all_reduce_named_params=...) cannot be measured")
    if not any(parameter.requires_grad for parameter in ddp_model.module.parameters()):
        raise DoctorError(_FROZEN)
    if ddp_model.process_group.size() == 1:
        raise DoctorError(_ALONE)


def check_batch_fn(ddp_model: DistributedDataParallel, batch_fn: BatchFn) -> Gradients:
    """Run `batch_fn` once on a copy of the model, without communication in the step, and return this rank's gradients.
    All ranks must call this. Raises DoctorError on all ranks if `batch_fn` fails on any of them."""
    group, works = ddp_model.process_group, "it works"
    trial = copy_of(ddp_model, alone=True)
    attach(trial, Noop(), process_group=group).quiet()
    problem: DoctorError | None = None
    try:
        _try(ddp_model, trial, batch_fn)
    except DoctorError as error:
        problem = error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = DoctorError(
            f"batch_fn or the backward pass of its loss raised {type(error).__name__}: {error} "
            f"({place.filename}, line {place.lineno}). {CONTRACT}"
        )
        problem.__cause__ = error
    own = works if problem is None else str(problem).encode(errors="backslashreplace").decode()
    texts = gather_texts(own, group, _device_of(ddp_model), "whether batch_fn works")
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text != works:
            raise DoctorError(f"rank {rank} cannot go on: {text}")
    return gradients_of(trial.module)


def _try(ddp_model: DistributedDataParallel, trial: DistributedDataParallel, batch_fn: BatchFn) -> None:
    if reason := why_not_called(batch_fn, trial):
        raise DoctorError(f"batch_fn cannot be called with one argument ({reason}). {CONTRACT}")

    def not_this_one(module: torch.nn.Module, arguments: Any) -> None:
        raise DoctorError(f"batch_fn called your own model instead of the copy that it was given. {CONTRACT}")

    guards = [module.register_forward_pre_hook(not_this_one) for module in (ddp_model, ddp_model.module)]
    try:
        loss: object = batch_fn(trial)
        wrong = ""
        if not isinstance(loss, torch.Tensor):
            wrong = f"a {type(loss).__name__}"
        elif loss.numel() != 1:
            wrong = f"a tensor of shape {tuple(loss.shape)}"
        elif not loss.requires_grad:
            wrong = "a tensor without a gradient (was it detached, or computed under no_grad?)"
        if wrong or not isinstance(loss, torch.Tensor):
            raise DoctorError(f"batch_fn returned {wrong}. {CONTRACT}")
        loss.backward()
    finally:
        for guard in guards:
            guard.remove()
    if all(p.grad is None for p in trial.module.parameters()):
        raise DoctorError(
            f"the loss of batch_fn does not depend on the parameters of the model that it was given. {CONTRACT}"
        )


# ---- copies of the model ---------------------------------------------------------------------------------------------


def copy_of(ddp_model: DistributedDataParallel, *, alone: bool = False) -> DistributedDataParallel:
    """Wrap a copy of `ddp_model.module` with the same DDP arguments, without communication and without a hook. `alone`:
    DDP will communicate nothing but gradients, so that one rank can fail without blocking the others."""
    try:
        module = copy.deepcopy(ddp_model.module)
    except Exception as error:
        raise DoctorError(
            f"the model cannot be copied, and only copies are measured: copy.deepcopy raised {type(error).__name__}: "
            f"{error}"
        ) from error
    taken = inspect.signature(DistributedDataParallel).parameters  # torch 2.8 takes fewer arguments than 2.13
    options: dict[str, Any] = {}
    if not alone:
        same = ["dim", "find_unused_parameters", "gradient_as_bucket_view"]
        same += ["batched_grad_copy", "skip_all_reduce_unused_params"]
        options = {name: getattr(ddp_model, name) for name in same if name in taken}
        # DDP stores limits in bytes. Pass on a default limit as default, because its first bucket is smaller.
        if limits := getattr(ddp_model, "bucket_bytes_cap_list", None):
            options["bucket_cap_mb_list"] = [limit / 2**20 for limit in limits]
        elif not ddp_model.bucket_bytes_cap_default:
            options["bucket_cap_mb"] = ddp_model.bucket_bytes_cap / 2**20
    # Where torch has the newer name, the older one is deprecated.
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in taken else "broadcast_buffers"
    options[buffers] = not alone and getattr(ddp_model, buffers)
    return DistributedDataParallel(
        module,
        device_ids=ddp_model.device_ids,
        output_device=ddp_model.output_device,
        process_group=ddp_model.process_group,
        static_graph=ddp_model.static_graph,
        init_sync=False,  # otherwise each copy would broadcast the whole model
        **options,
    )


def keep_random_state(devices: set[torch.device]) -> Callable[[], None]:
    """Return a function that restores the current random states of torch (CPU and `devices`), Python and numpy."""
    numpy = sys.modules.get("numpy")
    restorers: list[Callable[[], Any]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        *(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(d), d) for d in devices if d.type == "cuda"),
        partial(random.setstate, random.getstate()),
        *([] if numpy is None else [partial(numpy.random.set_state, numpy.random.get_state())]),
    ]

    def restore() -> None:
        for each in restorers:
            each()

    return restore


def gradients_of(module: torch.nn.Module) -> Gradients:
    return [None if each.grad is None else each.grad.to("cpu", copy=True) for each in module.parameters()]


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Holds the measurements of one candidate, equal on every rank.

    Attributes:
        step_ms: for each step, the time of forward, backward and communication, from a common start to the end of the
            slowest rank.
        bytes_sent: mean bytes per step passed to collectives.
        bytes_uncompressed: bytes per step that DDP passes to all-reduce without a hook.
        error: the relative error (Euclidean norm) of the hook's average in one step, without residuals of earlier
            steps. None for noop.
        useless: the hook was not measured, because it compresses no parameter of this model or cannot run.
        spent_s: seconds used so far, including warm-up.
    """

    candidate: Candidate
    step_ms: list[float] = field(default_factory=list)
    bytes_sent: int = 0
    bytes_uncompressed: int = 0
    error: float | None = None
    useless: bool = False
    spent_s: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return self.candidate.options_at_once(COMPRESSORS[self.candidate.hook].Config)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        if len(self.step_ms) == 1:
            return self.step_ms[0], self.step_ms[0]
        low, _, high = statistics.quantiles(self.step_ms, n=4, method="inclusive")
        return low, high


@dataclass
class Rounds:
    """Measures the candidates in turn, plain all-reduce before compressing ones, with one copy of the model at a time;
    see `doctor`. All ranks must call `measure`, and get the same result. After `restore_random` every candidate gets
    the same batches. `local`: this rank's gradients of one batch; `_mean`: their average over the ranks."""

    ddp_model: DistributedDataParallel
    batch_fn: BatchFn
    restore_random: Callable[[], None]
    local: Gradients
    steps: int
    seconds: float
    progress: Callable[[str], None]
    _mean: Gradients = field(default=(), init=False)

    def measure(self, candidates: Sequence[Candidate]) -> dict[str, Measured]:
        order = [Measured(candidate) for candidate in candidates]
        rounds = min(ROUNDS, self.steps)
        for turn in range(rounds):
            # Rounds begin with different candidates, so that a change of the machine's load affects all of them.
            first = turn * len(order) // rounds
            for each in order[first:] + order[:first]:
                if not each.useless and (not each.step_ms or each.spent_s < self.seconds):
                    self.progress(f"round {turn + 1} of {rounds}: {each.candidate.label}")
                    self._visit(each, self.steps * (turn + 1) // rounds)
        return {each.candidate.label: each for each in order if not each.useless}

    def _visit(self, measured: Measured, upto: int) -> None:
        self.restore_random()
        ddp_model = copy_of(self.ddp_model)
        parameter = weakref.ref(next(ddp_model.parameters()))
        self._measure(ddp_model, measured, upto)
        del ddp_model
        # Hooks are part of reference cycles with the parameters. They are young objects, so collect the oldest
        # generation, which is slow in a large program, only if that is not enough.
        for generation in range(1, 3):
            if parameter() is not None:
                gc.collect(generation)

    def _measure(self, ddp_model: DistributedDataParallel, measured: Measured, upto: int) -> None:
        candidate, options = measured.candidate, measured.options or None
        try:
            hook = attach(ddp_model, candidate.hook, hook_options=options, process_group=ddp_model.process_group)
        except (HookConfigError, AttachError) as error:  # raised on all ranks
            self.progress(f"{candidate.label} cannot run here: {error}")
            measured.useless = True
            return
        plan = hook.plan()
        if plan.selective and plan.parameters and not plan.compressed:
            measured.useless = True
            return
        hook.quiet()
        warm_up = _WARM_UP
        if not measured.step_ms:
            self._compare(ddp_model, measured)
            warm_up -= 1
        for _ in range(warm_up):
            if measured.spent_s < self.seconds / 5:
                self._step(ddp_model, measured)
        while len(measured.step_ms) < upto:
            measured.step_ms.append(self._step(ddp_model, measured))
            if measured.spent_s >= self.seconds:
                break
        stats = hook.stats()
        measured.bytes_sent = stats["bytes_sent"] // stats["backward_passes"]
        measured.bytes_uncompressed = stats["bytes_uncompressed"] // stats["backward_passes"]

    def _compare(self, ddp_model: DistributedDataParallel, measured: Measured) -> None:
        replaced = [
            parameter.register_hook(lambda grad, own=own: own.to(grad.device))
            for parameter, own in zip(ddp_model.module.parameters(), self.local, strict=True)
            if own is not None
        ]
        self._step(ddp_model, measured)
        for each in replaced:
            each.remove()
        if measured.candidate == ALLREDUCE:
            self._mean = gradients_of(ddp_model.module)
        if measured.candidate != NOOP:
            norm = _norm(self._mean)
            error = norm and _norm(gradients_of(ddp_model.module), self._mean) / norm
            measured.error = max(self._all_ranks(error))

    def _step(self, ddp_model: DistributedDataParallel, measured: Measured) -> float:
        ddp_model.zero_grad(set_to_none=True)
        self._all_ranks(0.0)  # a common start
        own = seconds_of(lambda: self.batch_fn(ddp_model).backward(), _device_of(ddp_model))
        passed = max(self._all_ranks(own))
        measured.spent_s += passed
        return 1000 * passed

    def _all_ranks(self, own: float) -> list[float]:
        row = torch.tensor([own], dtype=torch.float64, device=_device_of(self.ddp_model))
        rows = gather_rows(row, self.ddp_model.process_group, None, "the time of a step")
        found: list[float] = rows.flatten().tolist()
        return found


def _norm(gradients: Gradients, without: Gradients = ()) -> float:
    squares = 0.0
    for own, other in itertools.zip_longest(gradients, without):
        if own is not None:
            difference = own if other is None else own - other
            squares += float(torch.linalg.vector_norm(difference.to_dense().abs(), dtype=torch.float64)) ** 2
    return squares**0.5


# ---- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DoctorReport:
    """Holds the result of `commhooks.doctor`, equal on every rank. `print(report)` shows a table. `measured`:
    measurements by label. `not_measured`: labels of hooks that compress no parameter of this model."""

    measured: dict[str, Measured]
    world_size: int
    backend: str
    not_measured: tuple[str, ...] = ()

    @property
    def chosen(self) -> str:
        """The label of the hook to use, by the rule of `auto`: the most exact of the hooks within 10 % of the fastest;
        "allreduce" if no hook makes the step 10 % shorter."""
        tried = {label: each for label, each in self.measured.items() if label != NOOP.label}
        known = {label: each.candidate for label, each in tried.items()}
        return choose({label: each.median_ms for label, each in tried.items()}, known, ALLREDUCE.label)

    @property
    def gradient_bytes(self) -> int:
        return self.measured[ALLREDUCE.label].bytes_uncompressed

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain types, for JSON. Times are in milliseconds, one per measured step."""
        candidates = {
            label: {
                "hook": each.candidate.hook,
                "hook_options": each.options,
                "median_ms": each.median_ms,
                "quartiles_ms": list(each.quartiles_ms),
                "step_ms": each.step_ms,
                "bytes_sent": each.bytes_sent,
                "error": each.error if each.error is not None and math.isfinite(each.error) else None,
            }
            for label, each in self.measured.items()
        }
        return {
            "world_size": self.world_size,
            "backend": self.backend,
            "gradient_bytes": self.gradient_bytes,
            "candidates": candidates,
            "not_measured": list(self.not_measured),
            "chosen": self.chosen,
        }

    def __str__(self) -> str:
        state = random.getstate()  # importing rich draws a number (rich 15)
        try:
            return text_of(self._table(), *self._sentences()).strip("\n")
        finally:
            random.setstate(state)

    def _table(self) -> Any:
        table = new_table(f"{self.world_size} ranks, {self.backend}, {self.gradient_bytes / 1e6:.3f} MB of gradients")
        table.add_column("hook", no_wrap=True)
        for column in ("step, ms: median (quartiles)", "x faster", "MB sent", "error"):
            table.add_column(column, justify="right", no_wrap=True)
        plain_ms = self.measured[ALLREDUCE.label].median_ms
        for label, each in self.measured.items():
            low, high = each.quartiles_ms
            table.add_row(
                f"{label} <-" if label == self.chosen else label,
                f"{each.median_ms:.1f} ({low:.1f} .. {high:.1f})",
                f"{plain_ms / each.median_ms:.2f}",
                f"{each.bytes_sent / 1e6:.3f}",
                "-" if each.error is None else f"{each.error:.2g}",
            )
        return table

    def _sentences(self) -> list[str]:
        chosen, percent = self.measured[self.chosen], f"{100 * (MARGIN - 1):.0f} %"
        if chosen.candidate == ALLREDUCE:
            use = f"No hook makes the step {percent} shorter: train without one."
        else:
            options = f", hook_options={dict(chosen.candidate.options)!r}" if chosen.candidate.options else ""
            use = (
                f"The most exact hook within {percent} of the fastest:\n"
                f"    commhooks.attach(ddp_model, {chosen.candidate.hook!r}{options})"
            )
        unused = [f"{label} compresses no parameter of this model: not measured." for label in self.not_measured]
        return [use, LEGEND, *unused]
