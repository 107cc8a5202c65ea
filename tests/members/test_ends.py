"""How a machine ends: nothing native outlives the interpreter, and a machine whose torchrun is gone
ends with it.
"""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("torchft", reason="torchft is not installed")

import commhooks
from commhooks.members.heartbeats import Heartbeats
from commhooks.members.lines import Lines
from tests.support.ddp_steps import process_group_of_one
from tests.support.machines import lighthouse

_JOB = """
import atexit, threading, sys
OURS = ("commhooks heartbeat", "commhooks connect")
names = lambda: sorted(t.name for t in threading.enumerate() if t.name in OURS)
atexit.register(lambda: print("at the end", names()))  # the last to be called
import commhooks, torch
model = torch.nn.Linear(2, 2)
hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=1), members="torchft")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
print("before", names())
"""


def test_no_thread_of_a_native_client_outlives_the_interpreter() -> None:
    """A thread that comes back from native code while the interpreter ends aborts the process."""
    with lighthouse() as address:
        command = [sys.executable, "-c", _JOB]
        environment = os.environ | {"TORCHFT_LIGHTHOUSE": address, "RUST_LOG": "off"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "before ['commhooks heartbeat']\nat the end []\n", done.stdout


def _open() -> tuple[int, int]:
    """Return the number of threads, native ones as well, and of open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _within(most: tuple[int, int]) -> bool:
    return all(now <= limit for now, limit in zip(_open(), most, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_closed_hook_leaves_no_thread_and_no_file_open() -> None:
    """The hook itself is kept for its `stats`, and the model, which another hook may get."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = []
    with lighthouse() as address, process_group_of_one():
        for times in range(3):
            members = commhooks.Torchft(lighthouse=address, timeout_s=20.0)
            hooks.append(commhooks.attach(model, commhooks.DiLoCo(sync_every=1), members=members))
            for _ in range(2):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
            hooks[-1].close()
            if times == 0:  # torch and torchft start some that stay
                time.sleep(0.5)
                before = _open()
        _wait_until(lambda: _within(before))
    assert [hook.stats()["step"] for hook in hooks] == [1] * 3


def test_a_hook_that_the_model_does_not_take_leaves_no_machine_behind() -> None:
    with lighthouse() as address, process_group_of_one():
        model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(commhooks.AttachError, match="has a post-accumulate-grad hook"):
            commhooks.attach(
                model, commhooks.DiLoCo(), members=commhooks.Torchft(lighthouse=address)
            )
        _wait_until(lambda: not _names())


@pytest.mark.parametrize("wrap", [lambda module: module, DistributedDataParallel])
def test_a_machine_whose_model_is_deleted_leaves(wrap: Any) -> None:
    """Otherwise the others would wait for it, as long as for one that hangs."""
    with lighthouse() as address, process_group_of_one():
        module = torch.nn.Linear(2, 2)
        model = wrap(module)
        members = commhooks.Torchft(lighthouse=address)
        hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=1), members=members)
        model(torch.ones(2)).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        assert "commhooks heartbeat" in _names()
        if wrap is DistributedDataParallel:
            del model
        else:
            del model, module
        gc.collect()
        _wait_until(lambda: not _names())
    assert hook.stats()["step"] == 0


def _wait_until(met: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30.0
    while not met():
        assert time.monotonic() < deadline, (_names(), _open())
        time.sleep(0.02)


def _names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "commhooks" in thread.name]


soon = mock.patch("commhooks.members.heartbeats._LOOK_EVERY_S", 0.05)


def _heartbeats() -> Heartbeats:
    return Heartbeats(lambda: 60.0, mock.Mock(), lambda: False, Lines(logs=True))


@soon
@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_machine_knows_when_its_torchrun_is_gone(by_torchrun: bool) -> None:
    """A parent that is not torchrun may end."""
    variables = {"TORCHELASTIC_RUN_ID": "none"} if by_torchrun else {}
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch("os.getppid", side_effect=[7, *[1] * 1000]),
    ):
        heartbeats = _heartbeats()
        passes = heartbeats.passes = mock.Mock(return_value=0)  # called at each look
        _wait_until(lambda: passes.call_count > 2)
        heartbeats.stop()
    assert heartbeats.orphaned is by_torchrun


@soon
@pytest.mark.parametrize("others_train", [False, True])
def test_heartbeats_before_the_first_request(others_train: bool) -> None:
    """A machine that loads data for an hour before its first step is not waited for; while others
    train, not even at first.
    """
    sender, sending, limit_s = mock.Mock(), [], 60.0
    sender.shutdown.side_effect = lambda: sending.append(False)
    new_sender = lambda: (sending.append(True), sender)[1]  # noqa: E731
    others = mock.Mock(return_value=others_train)  # asked at each look
    heartbeats = Heartbeats(lambda: limit_s, new_sender, others, Lines(logs=True))
    _wait_until(lambda: others.call_count > 2)
    limit_s = 0.0
    _wait_until(lambda: sending == ([] if others_train else [True, False]))
    heartbeats.asking(True)
    _wait_until(lambda: sending[-1:] == [True])
    heartbeats.stop()
