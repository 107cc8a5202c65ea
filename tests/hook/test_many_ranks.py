"""Messages of runs with many ranks are short, and true for a dry run with a fake group."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import commhooks
from commhooks.engine import consensus
from commhooks.engine.kernel_choice import KernelSupport, choose
from commhooks.errors import CommHookError, HookRunError, listed
from commhooks.gradients.names import ModelNames
from commhooks.hook import replica_check, request_check

RANKS = 64


def test_a_list_shows_eight_values():
    assert listed(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(range(RANKS), " and ").endswith(" and 6 and 7 and 56 more")


def _supports(*differing: KernelSupport) -> list[KernelSupport]:
    return [KernelSupport(build="a") for _ in range(RANKS - len(differing) * 20)] + [
        offer for offer in differing * 20
    ]


def _raised(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(CommHookError) as error:
        function(*arguments)
    return str(error.value)


MESSAGES: dict[str, Callable[[], str]] = {
    "steps": lambda: _raised(consensus._check_steps, list(range(100, 100 + RANKS))),
    "configurations": lambda: _raised(consensus._check_configurations, [0] * 32 + [1] * 32),
    "no kernel": lambda: _raised(
        choose, _supports(KernelSupport(cannot="no compiler")), 0, HookRunError
    ),
    "slower": lambda: (
        choose(_supports(KernelSupport(missing="no compiler")), 0, HookRunError).slower
    ),
    "kernels": lambda: choose(_supports(KernelSupport(build="b")), 0, HookRunError).slower,
    "hooks": lambda: request_check._different_hooks([["a"]] * 32 + [["b"]] * 32),
    "models": lambda: request_check._different_models(
        [[f"shape {rank % 2}"] for rank in range(RANKS)]
    ),
    "replicas": lambda: _raised(
        replica_check._raise_where_different,
        3,
        ["the plan"],
        {rank: [rank % 2] for rank in range(RANKS)},
    ),
    "parameters": lambda: _raised(
        ModelNames([]).of_bucket, [torch.empty(2) for _ in range(RANKS)], True
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_about_many_ranks_shows_eight_of_a_list(name):
    text = MESSAGES[name]()
    assert " more" in text and len(re.findall(r"\d+", text)) < RANKS / 2, text


def _dry_run(rank: int) -> list[str]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        ddp = DistributedDataParallel(torch.nn.Linear(30, 30))
        return [
            _raised(commhooks.attach, ddp, hook) for hook in ("powerSGD", "bf16", "diloco", None)
        ]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 5])
def test_a_fake_process_group_is_named_as_such(run_ranks, rank):
    (texts,) = run_ranks(_dry_run, rank, init=False, world_size=1)
    for text in texts:
        assert text.startswith(
            "a gather over this process group of 64 ranks has returned nothing from the other ranks"
        )
        assert (
            "fake process group" in text
            and "torchft" not in text
            and len(re.findall(r"\d+", text)) == 1
        )
