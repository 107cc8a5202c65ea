"""`Send(meanwhile=...)`: work between the start of a collective and the wait for it."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from commhooks.comm import collectives
from commhooks.comm.collectives import Pending, resolve_group
from commhooks.compressors.base import Compressor, Exchange, Send, State, StepInfo, Verdict
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.engine.backward_pass import RunningExchange
from commhooks.engine.consensus import Binding
from commhooks.engine.session import Session
from commhooks.engine.state import LearnedState
from commhooks.engine.task import ExchangeTask
from commhooks.gradients.layout import Bucket
from commhooks.gradients.names import PositionalNames
from commhooks.options import HookConfig
from tests.support.ddp_steps import process_group_of_one
from tests.support.local_driver import LocalDriver
from tests.support.simulation import SimulatedRanks


@dataclass(frozen=True, kw_only=True)
class Options(HookConfig):
    hook_name: ClassVar[str] = "meanwhile"


class Busy(Compressor[Options]):
    """Averages, and writes down when it does what."""

    Config = Options

    def __init__(self, done: list[str]) -> None:
        super().__init__(Options())
        self._done = done

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        plan = UnitPlan.uncompressed(info, "")
        return UnitPlan(plan.name, plan.shape, plan.numel, plan.dtype, compressed=True)

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        for what in ("first", "last"):
            self._done.append(what)
            yield Send(
                flat, what=what, last=what == "last", meanwhile=functools.partial(self._done.append, "meanwhile")
            )
        self._done.append("answer")
        yield Verdict(torch.tensor(True))
        return None


def _session(done: list[str]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    compressor = Busy(done)
    binding = Binding(PositionalNames(), resolve_group)
    session = Session(compressor, binding, LearnedState.of(compressor.state_fields))
    wait = Pending.wait

    def watched(self: Pending) -> torch.Tensor:
        done.append("wait")
        return wait(self)

    with process_group_of_one(), mock.patch.object(Pending, "wait", watched):
        session.run(Bucket(torch.ones(4), [parameter])).wait()


def _loopback(done: list[str]) -> None:
    LocalDriver(Busy(done), [{"w": torch.zeros(4)}], torch.device("cpu")).step()


def _simulation(done: list[str]) -> None:
    assert SimulatedRanks(lambda: Busy(done), 1, {"w": torch.zeros(4)}).step([torch.ones(4)])


@pytest.mark.parametrize("run", [_session, _loopback, _simulation])
def test_it_runs_once_per_collective_before_the_answer(run: Any) -> None:
    done: list[str] = []
    run(done)
    assert [each for each in done if each != "wait"] == ["first", "meanwhile", "last", "meanwhile", "answer"]
    if run is _session:
        assert done == ["first", "meanwhile", "wait", "last", "meanwhile", "wait", "answer"]


def test_its_errors_end_the_pass() -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    def exchange() -> Exchange:
        yield Send(torch.zeros(1), last=True, meanwhile=fail)

    with process_group_of_one():
        group = resolve_group(None)
        task = ExchangeTask(exchange(), torch.zeros(1), "mine")
        running = RunningExchange(task, torch.zeros(1), lambda send: collectives.start(send, group, None))
        with pytest.raises(RuntimeError, match="^mine$"):
            running.advance()
        assert running.has_round_left is False and running.close() is None
