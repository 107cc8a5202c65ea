"""A damaged or hostile payload loads, or is refused by an error that names a key.

After a refusal nothing has changed.
"""

import contextlib
import copy
import functools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import omegaconf  # noqa: F401 - once it is imported, options are searched for its containers
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
from tests.support.training import Run, residuals

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


# ---- one defect at a time


def _top(**changes: Any) -> Any:
    return lambda payload: payload.update(changes)


def _entry(**changes: Any) -> Any:
    return lambda payload: payload["parameters"]["5.weight"].update(changes)


def _counter(value: Any) -> Any:
    return lambda payload: payload["counters"].update(bytes_sent=value)


NUMBERS = torch.zeros(24, 24)
RESIDUAL = ["'5.weight'", "['residual']"]
# Other versions: test_golden.py; other hooks and models: test_change.py.
REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], object], list[str]]] = {
    "not a payload": (
        dict.clear,
        ["not the state of a commhooks hook", "To begin with fresh state, leave out this load"],
    ),
    "no step": (lambda p: p.pop("step"), ["'step'"]),
    "negative step": (_top(step=-1), ["'step'", "-1"]),
    "step too large": (_top(step=2**63), ["'step'"]),
    "no rank": (_top(world_size=0), ["'world_size'"]),
    "too many ranks": (_top(world_size=2**20 + 1), ["'world_size'"]),
    "residual of another kind": (_top(residual="mean"), ["residual='mean'"]),
    "no ranks": (_top(residual_ranks=[]), ["one tensor per rank"]),
    "a rank that did not exist": (_top(residual_ranks=[1]), ["'residual_ranks'"]),
    "version of another type": (_top(version=True), ["version True"]),
    "loss scale 0": (_top(loss_scale=0), ["'loss_scale'"]),
    "loss scale NaN": (_top(loss_scale=float("nan")), ["'loss_scale'"]),
    "loss scale beyond float": (_top(loss_scale=10**400), ["'loss_scale'"]),
    "no q": (lambda p: p["parameters"]["5.weight"].pop("q"), ["'5.weight'", "'q'"]),
    "q of another shape": (_entry(q=torch.zeros(2, 3)), ["'5.weight'", "['q']"]),
    "residual sparse": (_entry(residual=[NUMBERS.to_sparse()]), RESIDUAL),
    "residual far below 0": (_entry(residual=[NUMBERS - 1e38]), [*RESIDUAL, "too large"]),
    "residual nan": (_entry(residual=[NUMBERS + float("nan")]), RESIDUAL),
    "batched_q of a name": (_top(batched_q={"5.weight": torch.ones(2, 24)}), ["batched_q"]),
    "batched_q a vector": (_top(batched_q={"batched.1": torch.ones(2)}), ["batched.1"]),
    "counters None": (_top(counters=None), ["'counters'"]),
    "counters a list": (_top(counters=[]), ["'counters'"]),
    "no counters": (_top(counters={}), ["'backward_passes'"]),
    "a counter below 0": (_counter(-1), ["'bytes_sent'", "-1"]),
    "a bool as a counter": (_counter(True), ["'bytes_sent'", "True"]),
    "a tensor as a counter": (_counter(torch.tensor(1)), ["'bytes_sent'", "tensor(1)"]),
    "start": (lambda p: p["options"].update(start_powerSGD_iter="x"), ["start_powerSGD_iter"]),
}


def test_a_refusal_names_what_is_wrong_and_changes_nothing() -> None:
    with process_group_of_one():
        good = Run.new(hook_options=OPTIONS).train(4).save()["hook"]
        run = Run.new(hook_options=OPTIONS).train(3)
        before = residuals(run.hook)
        for name, (damage, texts) in REFUSALS.items():
            saved = copy.deepcopy(good)
            damage(saved)
            with pytest.raises(commhooks.PayloadError) as caught:
                run.hook.load_state_dict(saved)
            assert same(before, residuals(run.hook)) and run.hook.stats()["step"] == 3, name
            assert all(text in str(caught.value) for text in texts), (name, str(caught.value))


# ---- random damage


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
    """A hook that is attached once, and good payloads for it.

    Attributes:
        good: the first of them is what the hook holds before each attempt.
        averages_weights: the payload may hold any finite weights, also weights with which the
            gradients are not finite.
    """

    ddp: DistributedDataParallel
    hook: CommHook
    good: list[dict[str, Any]]
    change: Callable[[Any, Any, random.Random], tuple[Any, str]] = hostile.changed
    averages_weights: bool = False

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
        """What an error can name: the keys of the format, and the parameters."""
        names = {"format", "batched_q", "hook_state", "options", "state"}
        for path in hostile.places(self.good[0]) + hostile.places(self.before):
            names.update(key for key in path if isinstance(key, str))
        return names

    def step(self) -> None:
        """Run a backward pass with what was loaded: it must be finite and count as a step."""
        before = self.hook.stats()
        backward(self.ddp, 0)
        self.hook.synchronize()
        after = self.hook.stats()
        skipped = 0
        if self.averages_weights:
            skipped = after["nonfinite_steps"] - before["nonfinite_steps"]
        assert after["step"] - before["step"] + skipped == 1
        for name, parameter in self.ddp.named_parameters():
            finite = parameter.grad is not None and bool(parameter.grad.isfinite().all())
            assert finite or self.averages_weights, f"gradient of {name}"


def two_ranks(saved: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Make the payload that two ranks save in one file."""
    gathered = copy.deepcopy(saved) | {"world_size": 2, "residual_ranks": [0, 1], **more}
    for entry in gathered["parameters"].values():
        if entry["residual"]:
            (residual,) = entry["residual"]
            entry["residual"] = [residual, residual * 2]
    return gathered


def power_sgd() -> Subject:
    subject = Subject.new("powerSGD", hook_options=OPTIONS)
    subject.good += [subject.hook.state_dict(kind) for kind in ("mean", "drop")]
    subject.good.append(two_ranks(subject.good[0]))
    assert subject.good[0]["residual"] == "per_rank"
    assert subject.hook.stats()["compressed_steps"] == 2
    return subject


def batched() -> Subject:
    subject = Subject.new("batched_powerSGD", hook_options=OPTIONS)
    assert len(subject.good[0]["batched_q"]) > 1
    return subject


def users_hook() -> Subject:
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
    subject.averages_weights = True
    assert subject.good[0]["step"] == 3
    return subject


def auto() -> Subject:
    subject = Subject.new(
        KINDS["auto, chooses powerSGD"].hook, steps=3 + TRIAL, hook_options={"quality": "close"}
    )
    assert subject.good[0]["notes"]
    return subject


def distributed(hook: str) -> Subject:
    """A state for `torch.distributed.checkpoint`, as models sharded by `fully_shard` save it."""
    subject = local_steps(hook) if hook == "diloco" else Subject.new(hook)
    subject.good = [subject.hook.state_dict("distributed")]
    subject.change = hostile.changed_distributed
    subject.restore()
    return subject


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Context manager: silence the warnings of strict=False about payloads that do not fit."""
    logger = logging.getLogger("commhooks")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def try_to_load(subject: Subject, payload: Any, strict: bool, what: str) -> str:
    """Return the text of the error; "" if the payload was loaded."""
    try:
        subject.hook.load_state_dict(payload, strict=strict)
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
    "user's hook": (users_hook, 20),
    "int8": (functools.partial(quantised, "int8"), 30),
    "int4": (functools.partial(quantised, "int4"), 20),
    "auto": (auto, 30),
    "diloco": (functools.partial(local_steps, "diloco"), 30),
    "local_sgd": (functools.partial(local_steps, "local_sgd"), 20),
    "distributed int8": (functools.partial(distributed, "int8"), 20),
    "distributed diloco": (functools.partial(distributed, "diloco"), 20),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_changed_payload_loads_or_is_refused_by_name(name: str) -> None:
    make, usual = SUBJECTS[name]
    with process_group_of_one(), silent():
        subject = make()
        rng = random.Random(20)
        count = usual * hostile.TIMES
        loaded = 0
        for number in range(count):
            payload, what = subject.change(rng.choice(subject.good), rng.choice(subject.good), rng)
            try:
                loaded += not try_to_load(subject, payload, rng.random() < 0.5, what)
            except BaseException as error:
                if isinstance(error, AssertionError):
                    raise
                raise AssertionError(f"number {number}: {what}") from error
        print(f"{name}: {count} changed payloads, {loaded} loaded, the others refused")
        # A test in which nearly all payloads have the same outcome shows nothing.
        assert 0.05 * count < loaded < 0.8 * count


def test_the_q_of_a_bucket_loads_in_any_memory_layout() -> None:
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
def test_a_distributed_state_must_hold_dense_tensors(hook: str, key: str, kind: str) -> None:
    with process_group_of_one():
        subject = distributed(hook)
        good = subject.good[0]
        tensors = good[key]
        changed = good | {key: tensors | {"0.weight": hostile.TENSORS[kind](tensors["0.weight"])}}
        assert f"{key}['0.weight']" in try_to_load(subject, changed, True, kind)
        assert f"'{key}' is None, not a dict of tensors" in try_to_load(
            subject, good | {key: None}, True, "None"
        )
        assert "int is {" in try_to_load(subject, good | {10**5000: tensors}, True, "key")


def test_options_that_contain_themselves_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with process_group_of_one():
        subject = auto()
        payload = copy.deepcopy(subject.good[0])
        payload["notes"]["candidates"][0]["options"]["exclude"] = endless
        assert "exclude=[[...]]" in try_to_load(subject, payload, True, "endless")
