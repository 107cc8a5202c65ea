"""A run leaves nothing that waits for the garbage collector or hangs in a fork."""

import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.inside import session_of
from tests.support.sweeps import (
    TRAININGS,
    assert_nothing_piles_up,
    loader,
    tensor_bytes,
    thread_count,
    threads_after_each,
)
from tests.support.training import Run

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
HOOKS: dict[str, Any] = {
    "powerSGD": OPTIONS,
    "int8_compress": {},
    "auto": {},
    "drop-in": {},
}


def _works_of(hook: commhooks.CommHook) -> list[weakref.ref[Any]]:
    return [
        weakref.ref(bucket.work)
        for bucket in session_of(hook).consensus.buckets
        if bucket.work is not None
    ]


def _closed() -> None:
    run = Run.new(hook_options=OPTIONS).train(3)
    hook = run.hook
    works = _works_of(run.hook)
    before = hook.stats() | {"last_issued": None}, str(hook.plan()), hook.norms()
    gc.disable()  # what is freed is freed at once
    hook.close()
    hook.close()
    assert len(works) > 1 and not any(work() for work in works)
    gc.enable()
    assert (hook.stats() | {"last_issued": None}, str(hook.plan()), hook.norms()) == before
    saved = hook.state_dict("mean")
    assert saved["exact"] and saved["residual"] == "mean" and saved["step"] == 3
    with pytest.raises(
        commhooks.HookRunError, match=r"after close\(\) of this hook \('powerSGD'\)"
    ):
        run.train(1)
    other = Run.new(hook_options=OPTIONS).train(3)
    if dist.get_rank() == 1:  # no rank waits for one that closes alone
        other.hook.close()
    assert other.hook.state_dict("mean")["exact"]


def test_a_closed_hook_keeps_what_users_read(run_ranks: Any) -> None:
    run_ranks(_closed)


def _trained_again(close: bool) -> tuple[int, bool, list[bool]]:
    """A state serves two trainings of one model, each with a process group of its own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.Linear(32, 24))
    state = commhooks.PowerSGDState(None, 2, start_powerSGD_iter=1)
    same = []
    for _ in range(2):
        group = dist.new_group()
        ddp = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=0.003, find_unused_parameters=True
        )
        hook = commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=state)
        for _ in range(3):
            ddp(torch.randn(8, 24)).square().mean().backward()
        if close:
            hook.close()
        gradients = torch.cat(
            [
                parameter.grad.flatten()
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
        )
        others = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
        dist.all_gather(others, gradients)
        same.append(all(torch.equal(other, gradients) for other in others))
        del ddp, hook
        dist.destroy_process_group(group)
        del group
    return state.iter, state.session.state.has_local(), same


@pytest.mark.parametrize("close", [True, False])
def test_a_state_serves_another_training_after_its_group_was_destroyed(
    run_ranks: Any, close: bool
) -> None:
    assert run_ranks(_trained_again, close) == [(6, True, [True, True])] * 2


def _deleted(hook: str, options: dict[str, Any]) -> list[int]:
    """Bytes of tensors before a training and after each of two."""

    def train() -> int:
        function = hook
        state = None
        if hook == "drop-in":
            function = commhooks.powerSGD_hook
            state = commhooks.PowerSGDState(None, 2, start_powerSGD_iter=1)
        run = Run.new(
            hook=function, hook_state=state, hook_options=options, save_residual="mean"
        ).train(4)
        run.hook.state_dict()
        run.optimizer.zero_grad()
        del run, state
        # gloo's threads may hold a last message, here of all gradients, a moment longer. Nobody
        # collects garbage.
        deadline = time.monotonic() + 20
        while (alive_bytes := tensor_bytes()) >= 5_000 and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive_bytes

    train()  # torch imports modules in the first, whose frames stay until the garbage is collected
    gc.collect()
    gc.disable()
    try:
        return [tensor_bytes(), train(), train()]
    finally:
        gc.enable()


@pytest.mark.parametrize("hook", HOOKS)
def test_buffers_go_with_the_model(run_ranks: Any, hook: str) -> None:
    for before, *after in run_ranks(_deleted, hook, HOOKS[hook]):
        assert max(after) < before + 5_000  # a model has 45,000


def _destroyed(folder: str) -> list[int]:
    """Act as a notebook that destroys the process group after each run and keeps the hooks."""
    kept: list[commhooks.CommHook] = []
    rank = dist.get_rank()

    def train() -> None:
        dist.barrier()  # the first group may not be connected on the other rank yet
        threads = thread_count()
        dist.destroy_process_group()
        # While gloo's three threads close the sockets of a group (torch 2.13), the next one may
        # lose its own.
        deadline = time.monotonic() + 3
        while thread_count() > threads - 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        store = dist.FileStore(os.path.join(folder, str(len(kept))), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        run = Run.new(hook_options=OPTIONS, save_residual="mean").train(3)
        assert run.hook.state_dict()["exact"]
        run.train(1)
        kept.append(run.hook)
        for _ in loader():
            pass

    threads = threads_after_each(train)
    dist.barrier()
    assert [hook.stats()["step"] for hook in kept] == [4] * TRAININGS and kept[0].plan().parameters
    saved = kept[0].state_dict()  # no other rank can be asked for its residuals
    assert not saved["exact"] and saved["step"] == 4
    return threads


def test_a_destroyed_group_ends_though_the_hook_is_kept(run_ranks: Any, tmp_path: Path) -> None:
    for threads in run_ranks(_destroyed, str(tmp_path)):
        assert_nothing_piles_up(threads)


def _swept() -> None:
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = commhooks.attach(model, "powerSGD", hook_options=OPTIONS, save_residual="mean")
    for x, y in loader():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert hook.state_dict()["exact"]
    circle: list[Any] = [model, hook]  # as in a Trainer and its parts
    circle.append(circle)


def _between_nodes() -> None:
    Run.new(hook_options=OPTIONS, ranks_per_node=2).train(3).hook.close()


@pytest.mark.parametrize(("train", "ranks"), [(_swept, 2), (_between_nodes, 4)])
def test_trainings_leave_no_threads_behind(
    run_ranks: Any, train: Callable[[], None], ranks: int
) -> None:
    """Between nodes they share the groups of the nodes."""
    for threads in run_ranks(threads_after_each, train, world_size=ranks):
        assert_nothing_piles_up(threads)


def _order_of_ends(owner: str) -> list[str]:
    group = dist.new_group()
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    gc.collect(0)  # the collector takes what is young first: what `attach` adds to the model
    commhooks.attach(ddp, "bf16_compress")
    ddp(torch.randn(2, 4)).sum().backward()
    ended: list[str] = []
    weakref.finalize(ddp.reducer, ended.append, "Reducer")
    weakref.finalize(group, ended.append, "group")
    if owner == "cycle":
        ddp.itself = [ddp]  # type: ignore[assignment]
    dist.destroy_process_group(group)
    del group, ddp
    gc.collect()
    return ended


@pytest.mark.parametrize("owner", ["name", "cycle"])
def test_the_process_group_ends_after_the_reducer(run_ranks: Any, owner: str) -> None:
    """In the other order the `Reducer` ends the group while it holds Python's lock, and gloo's
    thread may wait for that. An exception that is kept is such a cycle: it refers to the frames,
    and they to it.
    """
    assert run_ranks(_order_of_ends, owner) == [["Reducer", "group"]] * 2
