"""Compressors that learn nothing run at once, with one collective per bucket and nothing more."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from commhooks.comm.collectives import resolve_group
from commhooks.comm.counters import Counters
from commhooks.compressors.base import Exchange, Send, State, StepInfo, Verdict
from commhooks.compressors.cast import Stateless
from commhooks.engine.immediate import reduce_immediately
from commhooks.errors import HookRunError
from commhooks.gradients.layout import Bucket
from commhooks.options import HookConfig
from tests.support.ddp_steps import process_group_of_one


@dataclass(frozen=True, kw_only=True)
class Steps(HookConfig):
    hook_name: ClassVar[str] = "steps"


class Greedy(Stateless[Steps]):
    """Sends and asks what it is told to."""

    Config = Steps

    def __init__(self, script: list[str]) -> None:
        super().__init__(Steps())
        self._script = script
        self.steps: list[int] = []

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        self.steps.append(step.number)
        for item in self._script:
            yield (
                Verdict(torch.tensor(True))
                if item == "verdict"
                else Send(flat, what=item, last=item == "last")
            )
        return flat * 2


def _run(*script: str) -> tuple[torch.Tensor, int]:
    """The result, and the number of collectives."""
    counters = Counters()
    with process_group_of_one():
        flat = torch.arange(4.0)
        future = reduce_immediately(
            Greedy(list(script)), Bucket(flat, [flat]), resolve_group(None), counters
        )
        return future.wait(), counters.collectives


@pytest.mark.parametrize(("script", "collectives"), [([], 0), (["last"], 1)])
def test_what_the_exchange_returns_is_the_result(script: list[str], collectives: int) -> None:
    result, sent = _run(*script)
    assert torch.equal(result, 2 * torch.arange(4.0)) and sent == collectives


def test_the_step_is_the_number_of_passes_before_and_the_bucket_is_named() -> None:
    compressor = Greedy(["last"])
    counters = Counters()
    with process_group_of_one():
        for _ in range(3):
            counters.begin_pass()
            flat = torch.arange(4.0)
            reduce_immediately(
                compressor, Bucket(flat, [flat], 5), resolve_group(None), counters
            ).wait()
    assert compressor.steps == [0, 1, 2]
    assert counters.last_issued == "last of bucket 5"


def test_more_than_one_collective_is_refused() -> None:
    with pytest.raises(HookRunError, match="the exchange of steps: .* sends once"):
        _run("first", "last")
    with pytest.raises(RuntimeError, match="the exchange of steps sends again after its last Send"):
        _run("last", "last")


def test_a_verdict_is_refused() -> None:
    with pytest.raises(HookRunError, match="the exchange of steps asks for a verdict"):
        _run("verdict")


class Gathers(Stateless[Steps]):
    """Uses, behind its collective, the answer and a tensor from before."""

    Config = Steps

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        return (yield from self._delegate(flat, flat / 2))

    def _delegate(self, flat: torch.Tensor, half: torch.Tensor) -> Exchange:
        rows = yield Send(flat, op="gather", last=True)
        return rows.sum(0) + half


def _gathered() -> torch.Tensor:
    flat = torch.arange(4.0) + 10 * dist.get_rank()
    return reduce_immediately(Gathers(Steps()), Bucket(flat, [flat]), resolve_group(None)).wait()


def test_a_gather_has_a_row_of_each_rank(run_ranks: Any) -> None:
    for rank, gathered in enumerate(run_ranks(_gathered)):
        assert torch.equal(
            gathered, 2 * torch.arange(4.0) + 10 + (torch.arange(4.0) + 10 * rank) / 2
        )
