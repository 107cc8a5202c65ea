"""What damaged and hostile payloads end in: success, or a `CommHookError` that names a key and has
changed nothing.
"""

import contextlib
import copy
import functools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import omegaconf  # noqa: F401 - where it is imported, options are searched for its containers
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import CommHook, CommHookError
from tests.checkpoint import hostile
from tests.support.ddp_steps import backward, mlp, process_group_of_one, wrap
from tests.support.kinds import KINDS
from tests.support.models import same
from tests.support.prescribed_auto import TRIAL

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
    change: Callable[[Any, Any, random.Random], tuple[Any, str]] = hostile.changed
    on_weights: bool = False
    """It averages weights: any finite ones may be in a payload, also such with which gradients are
    not finite.
    """

    @classmethod
    def new(cls, hook: Any, steps: int = 3, **options: Any) -> "Subject":
        ddp = wrap(mlp())
        attached = commhooks.attach(ddp, hook, **options)
        for step in range(steps):
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
        keys = {
            key
            for payload in (self.good[0], self.before)
            for path in hostile.places(payload)
            for key in path
        }
        return {key for key in keys if isinstance(key, str)} | {
            "format",
            "batched_q",
            "hook_state",
            "options",
            "state",
        }

    def step(self) -> None:
        """A backward pass on top of what was loaded: it runs, is finite and counts."""
        before = self.hook.stats()
        backward(self.ddp, 0)
        self.hook.synchronize()
        after = self.hook.stats()
        skipped = after["nonfinite_steps"] - before["nonfinite_steps"] if self.on_weights else 0
        assert after["step"] - before["step"] + skipped == 1
        for name, parameter in self.ddp.named_parameters():
            finite = parameter.grad is not None and bool(parameter.grad.isfinite().all())
            assert finite or self.on_weights, f"gradient of {name}"


def two_ranks(saved: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As two ranks save it in one file."""
    gathered = copy.deepcopy(saved) | {"world_size": 2, "residual_ranks": [0, 1], **more}
    for entry in gathered["parameters"].values():
        entry["residual"] = entry["residual"] and [entry["residual"][0], entry["residual"][0] * 2]
    return gathered


def power_sgd() -> Subject:
    subject = Subject.new("powerSGD", hook_options=OPTIONS)
    subject.good += [subject.hook.state_dict(kind) for kind in ("mean", "drop")]
    subject.good.append(two_ranks(subject.good[0]))
    assert (
        subject.good[0]["residual"] == "per_rank" and subject.hook.stats()["compressed_steps"] == 2
    )
    return subject


def batched() -> Subject:
    subject = Subject.new("batched_powerSGD", hook_options=OPTIONS)
    assert len(subject.good[0]["batched_q"]) > 1
    return subject


def own_hook() -> Subject:
    return Subject.new(averages, hook_state=Averages())


def quantised(hook: str) -> Subject:
    subject = Subject.new(hook)
    subject.good += [subject.hook.state_dict("mean"), two_ranks(subject.good[0])]
    subject.good.append(two_ranks(subject.good[0], residual_shares=True))  # of two nodes
    assert subject.hook.stats()["compressed_steps"] == 3
    return subject


def local_steps(hook: str) -> Subject:
    options = {"sync_every": 1} | ({"outer_momentum": 0.5} if hook == "diloco" else {})
    subject = Subject.new(hook, hook_options=options)
    subject.on_weights = True
    assert subject.good[0]["step"] == 3
    return subject


def auto() -> Subject:
    subject = Subject.new(
        KINDS["auto, chooses powerSGD"].hook, steps=3 + TRIAL, hook_options={"quality": "close"}
    )
    assert subject.good[0]["notes"]
    return subject


def distributed(hook: str) -> Subject:
    """For `torch.distributed.checkpoint`, as models sharded by `fully_shard` save it."""
    subject = local_steps(hook) if hook == "diloco" else Subject.new(hook)
    subject.good = [subject.hook.state_dict("distributed")]
    subject.change = hostile.changed_distributed
    subject.restore()
    return subject


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


def try_to_load(
    subject: Subject, payload: Any, strict: bool, what: str, load: Callable[..., Any] | None = None
) -> str:
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


SUBJECTS: dict[str, tuple[Callable[[], Subject], int]] = {
    "powerSGD": (power_sgd, 75),
    "batched": (batched, 30),
    "own hook": (own_hook, 20),
    "int8": (functools.partial(quantised, "int8"), 30),
    "int4": (functools.partial(quantised, "int4"), 20),
    "auto": (auto, 30),
    "diloco": (functools.partial(local_steps, "diloco"), 30),
    "local_sgd": (functools.partial(local_steps, "local_sgd"), 20),
    "distributed int8": (functools.partial(distributed, "int8"), 20),
    "distributed diloco": (functools.partial(distributed, "diloco"), 20),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_changed_payloads(name: str) -> None:
    make, usual = SUBJECTS[name]
    with process_group_of_one(), silent():
        subject, rng, count = make(), random.Random(20), usual * hostile.TIMES
        loaded = 0
        for number in range(count):
            good, donor = rng.choice(subject.good), rng.choice(subject.good)
            payload, what = subject.change(good, donor, rng)
            try:
                loaded += not try_to_load(subject, payload, rng.random() < 0.5, what)
            except BaseException as error:
                if isinstance(error, AssertionError):
                    raise
                raise AssertionError(f"number {number}: {what}") from error
        print(f"{name}: {count} changed payloads, {loaded} loaded, the others refused")
        # a test in which nearly all ends alike sees nothing
        assert 0.05 * count < loaded < 0.8 * count


def test_the_q_of_a_bucket_may_lie_otherwise_in_memory() -> None:
    with process_group_of_one():
        subject = batched()
        good = subject.good[0]
        turned = {name: q.t().contiguous().t() for name, q in good["batched_q"].items()}
        assert not any(q.is_contiguous() for q in turned.values())
        subject.hook.load_state_dict(good | {"batched_q": turned})
        assert same(subject.hook.state_dict(), subject.before)
        subject.step()


@pytest.mark.parametrize("kind", ["nested", "meta", "NaN", "one row, expanded to 2^40"])
@pytest.mark.parametrize(("hook", "key"), [("int8", "residual"), ("diloco", "anchor")])
def test_distributed_states_hold_dense_tensors(hook: str, key: str, kind: str) -> None:
    with process_group_of_one():
        subject = distributed(hook)
        good, tensors = subject.good[0], subject.good[0][key]
        changed = good | {key: tensors | {"0.weight": hostile.TENSORS[kind](tensors["0.weight"])}}
        assert f"{key}['0.weight']" in try_to_load(subject, changed, True, kind)
        assert f"'{key}' is None, not a dict of tensors" in try_to_load(
            subject, good | {key: None}, True, "None"
        )
        assert "int is {" in try_to_load(subject, good | {10**5000: tensors}, True, "key")


def test_options_of_candidates_may_hold_themselves() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with process_group_of_one():
        subject = auto()
        payload = copy.deepcopy(subject.good[0])
        payload["notes"]["candidates"][0]["options"]["exclude"] = endless
        assert "exclude=[[...]]" in try_to_load(subject, payload, True, "endless")
