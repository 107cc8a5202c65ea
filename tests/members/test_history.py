"""A machine that has read the state of another one catches up with its outer steps."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks import DiLoCo, HookRunError
from commhooks.compressors.base import StepInfo
from commhooks.local_steps.compressor import DiLoCoCompressor
from commhooks.local_steps.replay import Record, recorded, replayed
from commhooks.members.catch_up import CatchUp
from commhooks.members.client import Client, NotKept
from commhooks.members.history import History
from commhooks.members.report import Report
from commhooks.members.state_server import StateServer
from tests.support.simulation import SimulatedRanks


def test_outer_steps_are_kept_while_a_machine_reads() -> None:
    history = History(lambda: 60.0)
    history.round = 3
    assert not history.is_kept and history.step(3) is None
    history.begin(10)
    server = StateServer("127.0.0.1", lambda: 60.0, dict, history=history)
    client = Client()
    assert (
        client.outer_step(server.address, 3, 30.0) == b""
        and client.running_round(server.address) == 3
    )
    history.add(Record([torch.ones(2)], 3, good=False))
    history.round = 4
    record = Record.read(client.outer_step(server.address, 3, 30.0))
    assert (record.replicas, record.good) == (3, False) and record.received[0].tolist() == [1, 1]
    for round in (2, 5):
        with pytest.raises(NotKept, match=f"does not keep the outer step of round {round}"):
            client.outer_step(server.address, round, 30.0)
    history.add(Record([torch.zeros(2**22 + 1)]))  # more than 16 MiB
    assert not history.is_kept and history.step(3) is None
    server.close()


def test_a_machine_that_falls_behind_does_not_chase_for_ever() -> None:
    """The others take two outer steps while it reads one."""
    state = SimpleNamespace(step=10, nonfinite_steps=0)
    outer = mock.Mock(state=state)
    outer.replay.side_effect = lambda record: setattr(state, "step", state.step + 1)
    ranks: Any = SimpleNamespace(
        is_first=True, exchanges=True, shard=0, all_agree=bool, first_text=str
    )
    machine: Any = SimpleNamespace(id="c:1", ranks=ranks, lines=mock.Mock())
    source: Any = SimpleNamespace(group=SimpleNamespace(size=lambda: 1), device=None)
    machine.client = SimpleNamespace(
        running_round=lambda server: 15 + 2 * (state.step - 10),
        outer_step=lambda *_: Record([]).to_bytes(),
    )
    with pytest.raises(
        HookRunError, match="c falls behind: it has read outer steps of a at .* MB/s"
    ):
        CatchUp(machine, source, outer).run(Report(id="a:1", servers=("x:1",)), 1.0)
    assert state.step == 15


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("wire", ["int4", "int8", "float32"])
def test_a_replayed_outer_step_writes_the_bits_of_the_others(wire: str, finite: bool) -> None:
    """Anchor, momentum and weights, from what one of three ranks has received."""
    config = DiLoCo(sync_every=2, wire=wire, outer_momentum=0.5, exclude=["bias"])
    parameters = {"weight": torch.empty(37, 11), "bias": torch.empty(11)}
    others = SimulatedRanks(lambda: DiLoCoCompressor(config), 3, parameters)
    alone = SimulatedRanks(lambda: DiLoCoCompressor(config), 3, parameters)
    generator = torch.Generator().manual_seed(0)
    size = 37 * 11 + 11
    for key, scale in (("anchor", 1.0), ("outer_momentum", 0.1)):
        flat = torch.randn(size, generator=generator) * scale
        for state in (*others.states, alone.states[0]):
            state[key].update({"weight": flat[: 37 * 11].clone(), "bias": flat[37 * 11 :].clone()})
    received: list[torch.Tensor] = []
    exchange = DiLoCoCompressor.exchange

    def record(compressor: Any, flat: Any, work: Any, state: Any, info: Any) -> Any:
        running = exchange(compressor, flat, work, state, info)
        return recorded(running, received) if info.rank == 1 else running

    flats = [torch.randn(size, generator=generator) for _ in range(3)]
    flats[2][5] = 1.0 if finite else torch.nan
    with mock.patch.object(DiLoCoCompressor, "exchange", record):
        assert others.step(flats) is finite
    state = alone.states[0]
    flat = torch.cat([state["anchor"]["weight"], state["anchor"]["bias"]])
    running = exchange(alone._compressors[0], flat, alone._works[0], state, StepInfo(0, 3, rank=0))
    (part,) = received
    replay = replayed(running, part, 3)
    next(replay)
    with pytest.raises(StopIteration):
        replay.send(finite)
    assert torch.equal(flat, flats[0])
    for key in ("anchor", "outer_momentum"):
        for name, value in others.states[0][key].items():
            assert torch.equal(state[key][name], value), (key, name)
