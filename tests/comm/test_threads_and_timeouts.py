"""Waits are bounded and say what they waited for; a saving thread never mixes two steps."""

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support import features
from tests.support.ddp_steps import limit_from_now_on
from tests.support.training import Run, batch, make_model

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0}


def _leaves() -> tuple[str, float] | None:
    """Rank 1 stops taking part after two steps, as if it hung."""
    group = dist.new_group([0, 1])
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.001, process_group=group)
    hook = commhooks.attach(ddp, "powerSGD", hook_options=OPTIONS)
    for step in range(3):
        images, labels = batch(step, dist.get_rank())
        if step == 2 and dist.get_rank() == 1:
            return None
        loss = torch.nn.functional.cross_entropy(ddp(images), labels)
        limit_from_now_on(group, 2.5 if step == 2 else 60.0)
        started = time.monotonic()
        try:
            loss.backward()
        except commhooks.HookRunError as error:
            assert hook.stats()["step"] == 2  # nothing of the third step was committed
            assert "bucket" in hook.stats()["last_issued"]
            return str(error), time.monotonic() - started
    raise AssertionError("the third backward pass came to its end without rank 1")


@features.limit_of_a_group
def test_a_rank_that_does_not_come_is_named(run_ranks: Any) -> None:
    (text, seconds), _ = run_ranks(_leaves)
    assert "rank 0 of 2" in text
    assert "P of bucket 0 at step 2 failed: rank 1 has ended or hangs" in text
    assert seconds < 20


def _saving_thread() -> tuple[int, int, list[str]]:
    """Save again and again in another thread during training: each Q must be that of its step."""
    run = Run.new(hook_options=OPTIONS)
    q_at: dict[int, torch.Tensor] = {}
    saved: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    done = threading.Event()

    def take() -> tuple[int, torch.Tensor, torch.Tensor]:
        payload = run.hook.state_dict(residual="per_rank")
        first, last = payload["parameters"]["0.weight"]["q"], payload["parameters"]["7.weight"]["q"]
        return payload["step"], first, last

    def save() -> None:
        while not done.is_set():
            saved.append(take())

    run.train(1)
    thread = threading.Thread(target=save)
    thread.start()
    enough = torch.zeros(1)
    for _ in range(2000):
        run.train(1)
        step, first, last = take()
        q_at[step] = torch.cat([first.flatten(), last.flatten()])
        enough.fill_(len(saved) > 10 and len({step for step, _, _ in saved}) > 3)
        dist.all_reduce(enough, dist.ReduceOp.MIN)
        if enough:
            break
    done.set()
    thread.join()
    mixed = [
        f"step {step}"
        for step, first, last in saved
        if step in q_at
        and not torch.equal(q_at[step], torch.cat([first.flatten(), last.flatten()]))
    ]
    return len(saved), len({step for step, _, _ in saved}), mixed


def test_a_saving_thread_sees_whole_steps(run_ranks: Any) -> None:
    for count, steps, mixed in run_ranks(_saving_thread):
        assert count > 10 and steps > 3
        assert mixed == []
