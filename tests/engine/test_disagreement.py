"""`attach` tells all ranks when they ask for different hooks or have different models."""

import contextlib
import io
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support import features
from tests.support.ddp_steps import limit_from_now_on, log_lines
from tests.support.training import SEVERAL_BUCKETS_MB, Run, make_model


def mine(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return commhooks.allreduce_hook(state, bucket)


class Options:
    """Its text holds an address, which is another one on each rank."""


def made(options: dict[str, Any], group: Any) -> tuple[Any, Any]:
    return group, mine


# What rank 0 asks for, what rank 1 asks for, and what the message says of each.
DIFFERENT = {
    "hook": ({"hook": "powerSGD"}, {"hook": "fp16"}, "rank 0: powerSGD;", "rank 1: fp16_compress."),
    "rank": (
        {"hook": commhooks.PowerSGD(matrix_approximation_rank=2)},
        {"hook": "powerSGD", "hook_options": {"matrix_approximation_rank": 4}},
        "rank 0: matrix_approximation_rank=2;",
        "rank 1: matrix_approximation_rank=4.",
    ),
    "length of the run": (
        {"hook": "powerSGD", "total_steps": 100},
        {"hook": "powerSGD", "total_steps": 200},
        "start_powerSGD_iter=10",
        "start_powerSGD_iter=20",
    ),
    "wrapper": (
        {"hook": "powerSGD", "wrapper": "bf16"},
        {"hook": "powerSGD"},
        "wrapper='bf16'",
        "wrapper=None",
    ),
    "own hook": ({"hook": mine}, {"hook": "allreduce"}, "rank 0: mine", "rank 1: allreduce"),
    "check_every": (
        {"hook": "fp16", "check_every": 5},
        {"hook": "fp16"},
        "check_every=5",
        "check_every=None",
    ),
    "loss scale": (
        {"hook": "powerSGD", "loss_scale": lambda: 2.0},
        {"hook": "powerSGD"},
        "rank 0: loss_scale=given;",
        "rank 1: loss_scale=None.",
    ),
}


def _attach(of_rank: tuple[dict[str, Any], ...]) -> tuple[str, int]:
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    with pytest.raises(commhooks.AttachError) as caught:
        commhooks.attach(ddp, **of_rank[dist.get_rank()])
    # Nothing is attached: with the same request everywhere the model takes it.
    hook = commhooks.attach(ddp, "powerSGD", hook_options={"start_powerSGD_iter": 0})
    ddp(torch.randn(4, 1, 8, 8)).sum().backward()
    return str(caught.value), hook.stats()["compressed_steps"]


def _attach_all() -> dict[str, tuple[str, int]]:
    return {name: _attach(pair[:2]) for name, pair in DIFFERENT.items()}


def test_different_requests_are_an_error_on_all_ranks(run_ranks: Any) -> None:
    results = run_ranks(_attach_all)
    for name, (_, _, first, second) in DIFFERENT.items():
        for text, compressed in (result[name] for result in results):
            assert (
                text.startswith("the ranks attach different hooks: ")
                and first in text
                and second in text
            ), name
            assert compressed == 1


def _one_of_three() -> str:
    with pytest.raises(commhooks.AttachError) as caught:
        Run.new(hook="bf16" if dist.get_rank() == 2 else "fp16")
    return str(caught.value)


def test_one_of_three_ranks_that_differs_is_named(run_ranks: Any) -> None:
    for text in run_ranks(_one_of_three, world_size=3):
        assert ": ranks 0, 1: fp16_compress; rank 2: bf16_compress. Give" in text


def _said() -> str:
    with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(commhooks.AttachError):
        Run.new(hook="bf16" if dist.get_rank() else "fp16")
    with contextlib.redirect_stderr(printed), pytest.raises(commhooks.HookConfigError):
        Run.new(hook="fp17")
    return printed.getvalue()


def test_rank_0_says_the_reason_in_a_line_before_the_tracebacks(run_ranks: Any) -> None:
    first, other = run_ranks(_said)
    different, unknown = first.splitlines()
    assert different.startswith(
        "commhooks: error: the ranks attach different hooks: rank 0: fp16_compress; rank 1: "
    )
    assert unknown.startswith("commhooks: error: unknown hook 'fp17'") and other == ""


def _models() -> list[str]:
    """DDP itself compares the shapes of what it reduces, but not names or what is frozen."""
    renamed, frozen = make_model(), make_model()
    if dist.get_rank() == 1:
        renamed = torch.nn.Sequential(*renamed[:7], torch.nn.Identity(), renamed[7])
        frozen.register_parameter("extra", torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    texts = []
    for model in (renamed, frozen):
        ddp = DistributedDataParallel(model)
        with pytest.raises(commhooks.AttachError) as caught:
            commhooks.attach(ddp, "fp16")
        texts.append(str(caught.value))
    return texts


def test_different_models_are_an_error_on_all_ranks(run_ranks: Any) -> None:
    for renamed, extra in run_ranks(_models):
        assert renamed.startswith("the ranks have different models: parameter 6 is ")
        assert "7.weight (10, 24) float32 on rank 0, 8.weight (10, 24) float32 on rank 1" in renamed
        assert (
            "0.weight (12, 1, 3, 3) float32 on rank 0, extra (3,) float32 (frozen) on rank 1"
            in extra
        )


def _frozen_after_the_wrap() -> tuple[str, str]:
    texts = []
    for ranks in ([1], [0, 1]):
        ddp = DistributedDataParallel(make_model())
        if dist.get_rank() in ranks:
            ddp.module.requires_grad_(False)
        with pytest.raises(commhooks.AttachError) as caught:
            commhooks.attach(ddp, "fp16", check_every=1)
        texts.append(str(caught.value))
    return texts[0], texts[1]


def test_a_model_with_nothing_to_reduce_is_refused(run_ranks: Any) -> None:
    for on_one, on_all in run_ranks(_frozen_after_the_wrap):
        assert (
            "0.weight (12, 1, 3, 3) float32 on rank 0, 0.weight (12, 1, 3, 3) float32 (frozen) on"
            " rank 1" in on_one
        )
        assert on_all.startswith(
            "no parameter of this model is reduced by DDP (all are frozen, ignored or delayed)"
        )


def _left_alone() -> tuple[str, float] | None:
    group = dist.new_group()
    ddp = DistributedDataParallel(make_model(), process_group=group)
    limit_from_now_on(group, 2.0)
    if dist.get_rank() == 1:
        return None
    started = time.monotonic()
    with pytest.raises(commhooks.HookRunError) as caught:
        commhooks.attach(ddp, "fp16")
    return str(caught.value), time.monotonic() - started


@features.limit_of_a_group
def test_a_rank_that_does_not_attach_is_named(run_ranks: Any) -> None:
    (text, seconds), _ = run_ranks(_left_alone)
    assert (
        "rank 0 of 2: the exchange of what each rank attaches (attach the hook on every rank, or on"
        " none)" in text
    )
    assert seconds < 20


def _object_options() -> tuple[int, list[str]]:
    """Options that are objects are compared by their type, because their text may differ."""
    if "made_of_objects" not in commhooks.available_hooks():
        commhooks.register_hook("made_of_objects", made)
    with log_lines() as lines:
        run = Run.new(hook="made_of_objects", hook_options={"what": Options()}).train(2)
    return run.hook.stats()["backward_passes"], lines


def test_objects_among_the_options_are_compared_by_their_type(run_ranks: Any) -> None:
    assert [passes for passes, _ in run_ranks(_object_options)] == [2, 2]
