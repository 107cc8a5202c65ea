"""After an exception in a backward pass a new DDP goes on from the last committed step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import PowerSGDState, powerSGD_hook
from commhooks.comm.collectives import MessageWork, PointToPoint
from tests.support.models import EVERY_PARAMETER, bits_equal, mlp

WIDTH, LAYERS = 24, 6
BEFORE, AFTER = 3, 4
OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


class UserError(Exception):
    pass


def _wrap(model: torch.nn.Module) -> DistributedDataParallel:
    # With find_unused_parameters a new DDP packs its buckets from the first pass on as the old one
    # did, so that buffers kept for a layout would be used again.
    return DistributedDataParallel(
        model, bucket_cap_mb=EVERY_PARAMETER, find_unused_parameters=True
    )


def _by_register() -> Callable[[DistributedDataParallel], None]:
    state = PowerSGDState(None, **OPTIONS)
    return lambda ddp: ddp.register_comm_hook(state, powerSGD_hook)


def _by_loading(
    name: str = "powerSGD", options: dict[str, int] = OPTIONS
) -> Callable[[DistributedDataParallel], None]:
    hooks: list[commhooks.CommHook] = []

    def attach(ddp: DistributedDataParallel) -> None:
        hooks.append(commhooks.attach(ddp, name, hook_options=options))
        if len(hooks) > 1:
            hooks[-1].load_state_dict(hooks[-2].state_dict())

    return attach


WAYS = {
    "register": _by_register,
    "load int8": functools.partial(_by_loading, "int8", {"start_iter": 1}),
}


def _train(way: str, fail: bool) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Gradients of all steps; and collectives begun in the pass that failed. A new DDP after
    `BEFORE` steps.
    """
    torch.manual_seed(2)
    model = mlp(WIDTH, LAYERS)
    attach = WAYS[way]()
    ddp = _wrap(model)
    attach(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: list[dict[str, torch.Tensor]] = []

    def loss(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        return ddp(torch.randn(4, WIDTH, generator=generator)).square().mean()

    def train(steps: range) -> None:
        for step in steps:
            loss(step).backward()
            gradients.append(
                {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            )
            optimizer.step()

    train(range(BEFORE))
    begun = _fail_in_mid_backward(model, lambda: loss(1000)) if fail else []
    number = len(begun)
    ddp = _wrap(model)
    attach(ddp)
    with _finish_late(begun):
        train(range(BEFORE, BEFORE + AFTER))
    return gradients, number


def _fail_in_mid_backward(
    model: torch.nn.Sequential, loss: Callable[[], torch.Tensor]
) -> list[torch.Tensor]:
    """Raise in user code on all ranks, and return the buffers and answers still in flight."""
    begun: list[torch.Tensor] = []
    original = dist.all_reduce
    exchange = PointToPoint.exchange

    def recording_exchange(
        self: PointToPoint,
        sent: Sequence[torch.Tensor],
        arriving: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> MessageWork:
        begun.extend(arriving)
        return exchange(self, sent, arriving, group)

    def recording(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        begun.append(tensor)
        return original(tensor, *args, **kwargs)

    def explode(*_: object) -> None:
        raise UserError("in the middle of the backward pass")

    handle = model[4].register_full_backward_hook(explode)
    with (
        mock.patch("commhooks.comm.collectives.dist.all_reduce", recording),
        mock.patch.object(PointToPoint, "exchange", recording_exchange),
        pytest.raises(UserError),
    ):
        loss().backward()
    handle.remove()
    return begun


def _finish_late(begun: list[torch.Tensor]) -> Any:
    """The network may write the abandoned pass's answers at any time, here in the next pass."""

    class Late:
        def __init__(self, work: dist.Work) -> None:
            self._work = work

        def wait(self) -> None:
            self._work.wait()
            for tensor in begun:
                tensor.fill_(100)
            begun.clear()

    all_reduce = dist.all_reduce
    return mock.patch(
        "commhooks.comm.collectives.dist.all_reduce",
        lambda *args, **kwargs: Late(all_reduce(*args, **kwargs)),
    )


def _with_and_without(way: str) -> tuple[Any, Any]:
    return _train(way, fail=True), _train(way, fail=False)


@pytest.mark.parametrize("way", WAYS)
def test_a_new_ddp_goes_on_as_if_nothing_had_happened(run_ranks, way):
    ranks = run_ranks(_with_and_without, way)
    for (failed, begun), (clean, _) in ranks:
        assert begun > 2
        assert len(failed) == BEFORE + AFTER
        assert all(map(bits_equal, failed, clean))
    assert all(map(bits_equal, ranks[0][0][0], ranks[1][0][0]))
