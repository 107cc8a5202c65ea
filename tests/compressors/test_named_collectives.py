"""`Compressor.collectives`, from which times are predicted, names what is really sent."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.comm import collectives
from commhooks.request import HookRequest
from tests.support.kernels import computing_with
from tests.support.kinds import AUTO, KINDS, Kind

STEPS = 6
ROUNDS = {
    f"{hook}, {more}": Kind(hook, {"sync_every": 2} | more)
    for hook, more in [
        ("local_sgd", {}),
        ("diloco", {"wire": "float32"}),
        ("diloco", {"wire": "int8"}),
        ("diloco", {"wire": "int4"}),
    ]
}
TRIED: dict[str, Kind] = {name: kind for name, kind in KINDS.items() if kind.hook != AUTO} | ROUNDS


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.timeout(60)
def test_the_collectives_are_those_that_are_sent(name: str, alone: None) -> None:
    kind = TRIED[name]
    sent: Counter[str] = Counter()
    start = collectives.start

    def counting(send: collectives.Send, *args: Any) -> Any:
        if send.over == "all":
            sent[send.op] += 1
        return start(send, *args)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    ddp = DistributedDataParallel(model)  # one bucket
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with computing_with(kind.kernel):
        commhooks.attach(ddp, kind.hook, hook_options=kind.options, wrapper=kind.wrapper).quiet()

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(4, 40)).square().mean().backward()
        optimizer.step()

    for _ in range(4):  # compression begins, and DDP orders its bucket anew
        step()
    with mock.patch.object(collectives, "start", counting):
        for _ in range(STEPS):
            step()
    made = HookRequest.parse(
        kind.hook, hook_options=kind.options, wrapper=kind.wrapper
    ).new_compressor(None)
    assert made is not None
    exchanges = STEPS // getattr(made.config, "sync_every", 1)
    assert sent == {op: count * exchanges for op, count in Counter(made.collectives).items()}
