"""Replays the weights of torchft's regression fixtures of DiLoCo: two ranks, two fragments.

The fixtures have the weights before every step and those that the replicas share. Without
COMMHOOKS_PEERS_HOOK torchft's own class is trained, with it ours, in float32.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peer_hooks
import pytest
import torch
import torch.distributed as dist
from suites import FIXTURE, SOURCE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.local_steps.compressor import DiLoCoCompressor
from commhooks.local_steps.outer_step import ANCHOR
from tests.support.local_driver import LocalDriver

EVERY, FRAGMENTS, OUTER_LR, GRADIENT = 6, 2, 2.0, 2.0
TURN = EVERY // FRAGMENTS
SETTINGS = [(delay, alpha) for delay in (0, 1) for alpha in (0.0, 0.5, 1.0)]
"""Of the fixtures by number: the delay, and how much of the own weights stays (torchft's alpha)."""

History = list[list[float]]
"""The weights of both layers before each step."""


def fixture(name: str, rank: int) -> tuple[History, dict[int, list[float]]]:
    """Return the weights before each step, and by step those that the replicas share."""
    path = Path(os.environ[SOURCE], f"{FIXTURE}_{name}.json")
    histories = json.loads(path.read_text())[rank][-1]
    steps, shared = (
        {
            int(step): torch.tensor(list(weights.values())).flatten().tolist()
            for step, weights in history.items()
        }
        for history in (histories["history"], histories["global_parameter_history"])
    )
    return [steps[step] for step in sorted(steps)], shared


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(FRAGMENTS))
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self) -> torch.Tensor:
        return torch.stack([layer.weight for layer in self.layers]).sum()


class Manager:
    """What torchft's DiLoCo asks of a manager, on a group that never changes."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.step = 0

    def register_state_dict_fn(self, *_: Any) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def allow_state_dict_read(self) -> None: ...

    def start_quorum(self) -> None: ...

    def current_step(self) -> int:
        return self.step

    def allreduce(self, tensor: torch.Tensor, **_: Any) -> Any:
        tensor.div_(dist.get_world_size())
        return dist.all_reduce(tensor, async_op=True)

    def should_commit(self) -> bool:
        self.step += 1
        return True


def train(model: nn.Module, run: Callable[[], torch.Tensor], optimizer: Any, steps: int) -> History:
    history = []
    for _ in range(steps):
        history.append([float(weight) for weight in model.parameters()])
        optimizer.zero_grad()
        (GRADIENT * run()).backward()
        optimizer.step()
    return [*history, [float(weight) for weight in model.parameters()]]


def trained(delay: int, alpha: float, steps: int) -> History:
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if not peer_hooks.NAME:
        from torchft.local_sgd import DiLoCo

        outer = [torch.optim.SGD(layer.parameters(), lr=OUTER_LR) for layer in model.layers]
        options = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        with DiLoCo(Manager(), list(model.layers), optimizer, outer, EVERY, **options):  # type: ignore[arg-type]
            return train(model, model, optimizer, steps)
    config = commhooks.DiLoCo(
        sync_every=EVERY,
        fragments=FRAGMENTS,
        delay=delay,
        outer_lr=OUTER_LR,
        lr_factor=1.0,
        wire="float32",
    )
    ddp = DistributedDataParallel(model)
    hook = commhooks.attach(ddp, config)
    peer_hooks.keep(hook)
    return train(model, ddp, optimizer, steps)


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_weights_before_every_step(number: int) -> None:
    expected, _ = fixture(f"updates_{number}", dist.get_rank())
    assert trained(*SETTINGS[number], len(expected) - 1) == expected


def test_weights_after_a_failure() -> None:
    """One replica has failed, come back and read the state of the other: the latter's history goes
    on undisturbed, and the former's is equal from there on.
    """
    expected, _ = fixture("failure_recovery_0", 0)
    recovered, _ = fixture("failure_recovery_0", 1)
    ours = trained(0, 0.0, len(expected) - 1)
    assert ours == expected and ours[-len(recovered) + TURN :] == recovered[TURN:]


def outer_step(anchor: float, weight: float) -> float:
    """Return the weight that all replicas share after the outer step of equal replicas."""
    if not peer_hooks.NAME:
        return anchor - OUTER_LR * (anchor - weight)
    compressor = DiLoCoCompressor(commhooks.DiLoCo(wire="float32", outer_lr=OUTER_LR))
    driver = LocalDriver(compressor, [{"w": torch.ones(1)}], torch.device("cpu"))
    driver._state[ANCHOR.key]["w"].fill_(anchor)
    driver._buckets[0][0].fill_(weight)
    driver.step()
    return float(driver._state[ANCHOR.key]["w"])


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_outer_steps_from_the_weights_of_the_fixture(number: int) -> None:
    """Whatever a replica makes of what it receives: the shared weights follow from its weights when
    it sends.
    """
    weights, shared = fixture(f"updates_{number}", dist.get_rank())
    delay, _ = SETTINGS[number]
    turns = sorted(shared)[1:]
    assert len(turns) == 4
    for count, step in enumerate(turns):
        part = count % FRAGMENTS
        # Without a delay the fixture has the weights of this step after the outer step.
        sent = weights[step - delay][part] if delay else weights[step - 1][part] - GRADIENT
        got = outer_step(shared[step - TURN][part], sent)
        assert got == shared[step][part]
