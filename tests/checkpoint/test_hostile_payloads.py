"""What damaged and hostile payloads end in: success, or a `CommHookError` that names a key and has changed nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import CommHook, CommHookError
from tests.support import hostile
from tests.support.ddp_steps import backward, mlp, process_group_of_one, wrap
from tests.support.models import same_bits

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


class Averages:
    """A user's hook with a state of its own."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.seen = int(saved["seen"])


def averages(state: Averages, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.seen = (state.seen + 1) % 10**6
    return commhooks.allreduce_hook(None, bucket)


@dataclass
class Subject:
    """A hook that is attached once, and good payloads for it."""

    ddp: DistributedDataParallel
    hook: CommHook
    good: list[dict[str, Any]]
    """The first of them is what the hook holds before each attempt."""

    @classmethod
    def new(cls, hook: Any, **options: Any) -> Subject:
        ddp = wrap(mlp())
        attached = commhooks.attach(ddp, hook, **options)
        for step in range(3):
            backward(ddp, step)
        subject = cls(ddp, attached, [attached.state_dict()])
        subject.restore()
        return subject

    def restore(self) -> None:
        self.hook.load_state_dict(self.good[0])
        self.before = self.hook.state_dict()

    @functools.cached_property
    def names(self) -> set[str]:
        """What an error can name: the keys of the format and the parameters."""
        keys = {key for path in hostile.places(self.good[0]) for key in path if isinstance(key, str)}
        return keys | {"format", "batched_q", "hook_state", "options"}

    def step(self) -> None:
        """A backward pass on top of what was loaded: it runs, is finite and counts."""
        before = self.hook.stats()["step"]
        backward(self.ddp, 0)
        for name, parameter in self.ddp.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), f"gradient of {name}"
        assert self.hook.stats()["step"] == before + 1


def power_sgd() -> Subject:
    subject = Subject.new("powerSGD", hook_options=OPTIONS)
    subject.good += [subject.hook.state_dict(kind) for kind in ("mean", "drop")]
    gathered = copy.deepcopy(subject.good[0])  # as two ranks save it in one file
    gathered |= {"world_size": 2, "residual_ranks": [0, 1]}
    for entry in gathered["parameters"].values():
        entry["residual"] = entry["residual"] and [entry["residual"][0], entry["residual"][0] * 2]
    subject.good.append(gathered)
    assert subject.good[0]["residual"] == "per_rank" and subject.hook.stats()["compressed_steps"] == 2
    return subject


def batched() -> Subject:
    subject = Subject.new("batched_powerSGD", hook_options=OPTIONS)
    assert len(subject.good[0]["batched_q"]) > 1
    return subject


def own_hook() -> Subject:
    return Subject.new(averages, hook_state=Averages())


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """strict=False warns of each payload that does not fit."""
    logger = logging.getLogger("commhooks")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def same(one: Any, other: Any) -> bool:
    """The same types, keys and bits."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def try_to_load(subject: Subject, payload: Any, strict: bool, what: str, load: Callable[..., Any] | None = None) -> str:
    """The text of the error; "" if the payload was taken."""
    try:
        (load or subject.hook.load_state_dict)(payload, strict=strict)
    except CommHookError as error:
        text = str(error)
        assert len(text) < 5000, what
        assert any(name in text for name in subject.names), (what, text)
        assert same(subject.hook.state_dict(), subject.before), f"half-loaded: {what}"
        return text
    subject.step()
    subject.restore()
    return ""


@pytest.mark.parametrize(("make", "count"), [(power_sgd, 400), (batched, 150), (own_hook, 100)])
def test_changed_payloads(make: Callable[[], Subject], count: int) -> None:
    with process_group_of_one(), silent():
        subject, rng = make(), random.Random(20)
        loaded = 0
        for number in range(count):
            good, donor = rng.choice(subject.good), rng.choice(subject.good)
            payload, what = hostile.changed(good, donor, rng)
            try:
                loaded += not try_to_load(subject, payload, rng.random() < 0.5, what)
            except BaseException as error:
                if isinstance(error, AssertionError):
                    raise
                raise AssertionError(f"number {number}: {what}") from error
        assert 0.05 * count < loaded < 0.7 * count  # a test in which nearly all ends alike sees nothing
