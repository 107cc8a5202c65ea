"""Late answers change nothing: every read waits for its collective (see `late_answers.py`)."""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks import (
    BatchedPowerSGD,
    BF16Compress,
    FP16Compress,
    HookConfig,
    Int4Compress,
    Int8Compress,
    PowerSGD,
)
from tests.cuda.late_answers import late_answers, sleep_on
from tests.cuda.places import CPU, MASKED, ON_CUDA, PLACES, entered, same, world_size
from tests.support.kernels import computing_with
from tests.support.training import ONE_BUCKET_MB, Run, make_model

STEPS = 5


@dataclass(frozen=True)
class Case:
    hook: HookConfig
    attach: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `attach`."""
    run: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `Run.new`."""
    ddp: dict[str, Any] = field(default_factory=dict)
    kernel: str = "native"


def _power_sgd(**options: Any) -> PowerSGD:
    return PowerSGD(**({"matrix_approximation_rank": 2, "start_powerSGD_iter": 2} | options))


CASES = {
    "powerSGD": Case(_power_sgd()),
    "same shapes together": Case(_power_sgd(batch_tensors_with_same_shape=True)),
    "one bucket, from the first step": Case(
        _power_sgd(start_powerSGD_iter=0), run={"bucket_cap_mb": ONE_BUCKET_MB}
    ),
    "without warm start": Case(_power_sgd(warm_start=False)),
    "batched": Case(BatchedPowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=2)),
    "fp16 wire": Case(_power_sgd(), attach={"wrapper": "fp16"}),
    "bf16 wire": Case(_power_sgd(), attach={"wrapper": "bf16"}),
    "int8": Case(Int8Compress(start_iter=2, block_size=32)),
    "int8, torch": Case(Int8Compress(start_iter=2, block_size=32), kernel="torch"),
    "int4, no error feedback": Case(
        Int4Compress(start_iter=2, block_size=32, use_error_feedback=False)
    ),
    "views of buckets": Case(_power_sgd(), ddp={"gradient_as_bucket_view": True}),
    "static graph": Case(_power_sgd(), ddp={"static_graph": True}),
    "checks": Case(_power_sgd(), attach={"check_every": 2}),
    "allreduce": Case(commhooks.AllReduce(), ddp={"gradient_as_bucket_view": True}),
    "allreduce, checks": Case(commhooks.AllReduce(), attach={"check_every": 2}),
    "fp16": Case(FP16Compress()),
    "bf16": Case(BF16Compress(), ddp={"static_graph": True}),
    "noop": Case(commhooks.Noop()),
}


ON_CPU = (
    "powerSGD",
    "one bucket, from the first step",
    "batched",
    "int8",
    "allreduce, checks",
    "fp16",
)
"""One of each way to wait for answers. Those of an accelerator are the simulated accelerator's to
examine.
"""


def _train(place: str, case: Case, late: bool) -> dict[str, Any]:
    with entered(place) as here, late_answers() if late else contextlib.nullcontext() as seen:
        ddp = {**case.ddp, "process_group": here.group}
        with computing_with(case.kernel):
            run = Run.new(
                make_model().to(here.device), hook=case.hook, ddp=ddp, **case.run, **case.attach
            )
        # backward comes late, too: whoever does not wait for it sends the gradients of the step
        # before
        if late:
            run.ddp.register_forward_hook(lambda *_: sleep_on(here.device))
        run.train(STEPS)
        return {
            "weights": run.weights().cpu(),
            "gradients": torch.stack(run.gradients).cpu(),
            "stats": run.hook.stats(),
            "late": 0 if seen is None else seen.answers,
        }


@pytest.mark.parametrize(
    ("name", "place"),
    [("powerSGD", MASKED), *((name, CPU) for name in ON_CPU)]
    + [pytest.param(name, *place.values, marks=place.marks) for name in CASES for place in ON_CUDA],
)
def test_late_answers_change_nothing(run_ranks: Any, name: str, place: str) -> None:
    case = CASES[name]
    ranks = world_size(place)
    in_time = run_ranks(_train, place, case, False, world_size=ranks)
    late = run_ranks(_train, place, case, True, world_size=ranks)
    for expected, got in zip(in_time, late, strict=True):
        assert expected["late"] == 0 and got["late"] == got["stats"]["collectives"]
        # several buckets
        assert (got["late"] > 2 * STEPS) == (name != "noop" and "bucket_cap_mb" not in case.run)
        assert got["gradients"].isfinite().all()
        assert same(place, got["gradients"], expected["gradients"])
        assert same(place, got["weights"], expected["weights"])
        if got["stats"]["compressed_steps"] is not None:
            assert got["stats"]["compressed_steps"] == STEPS - case.hook.configured_start
        if "check_every" in case.attach and world_size(place) > 1:
            assert got["stats"]["handshakes"] >= STEPS // 2
    assert torch.equal(late[0]["weights"], late[-1]["weights"]) or name == "noop"


def _read_early(place: str) -> list[list[float]]:
    with entered(place) as here, late_answers():
        buffer = torch.full((3,), dist.get_rank() + 1.0, device=here.device)
        work = dist.all_reduce(buffer, group=here.group, async_op=True)
        early = buffer.clone()
        work.wait()
        in_time = buffer.clone()
        work = dist.all_reduce(buffer, group=here.group, async_op=True)
        then = work.get_future().then(lambda future: 2 * future.value()[0]).wait()
        return [tensor.tolist() for tensor in (early, in_time, then)]


@pytest.mark.parametrize("place", PLACES)
def test_who_reads_early_reads_nan(run_ranks: Any, place: str) -> None:
    """The tool itself: otherwise the test above would show nothing."""
    ranks = world_size(place)
    for early, in_time, then in run_ranks(_read_early, place, world_size=ranks):
        assert all(number != number for number in early)
        assert in_time == [sum(range(1, ranks + 1))] * 3
        assert then == [2 * ranks * in_time[0]] * 3
