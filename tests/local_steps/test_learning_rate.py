"""The learning rate that the optimizers have in local steps."""

import math
from typing import Any

import pytest
import torch

from tests.support.ddp_steps import log_lines
from tests.support.training import Run, batch

OPTIMIZERS = {
    "AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
    "Adam": lambda parameters, lr: torch.optim.Adam(
        [{"params": p, "lr": lr} for p in parameters], lr=1.0
    ),
    "tensor": lambda parameters, lr: torch.optim.AdamW(
        parameters, lr=torch.tensor(lr, dtype=torch.float64)
    ),
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
}


def _trained(
    kind: str, lr: float, options: dict[str, Any], steps: int, **attach: Any
) -> tuple[Any, ...]:
    run = Run.new(hook="diloco", hook_options={"sync_every": 2, **options}, **attach)
    run.optimizer = OPTIMIZERS[kind](list(run.ddp.parameters()), lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    rates = []
    with log_lines() as lines:
        for _ in range(steps):
            run.train(1)
            rates.append(float(run.optimizer.param_groups[-1]["lr"]))
            schedule.step()
    return run.weights(), rates, [line for line in lines if "learning rate" in line]


def _beside_its_oracle(
    kind: str, options: dict[str, Any], factor: float, **attach: Any
) -> tuple[Any, ...]:
    """A training, and one in which the user multiplies the learning rate."""
    steps = 5
    found, rates, lines = _trained(kind, 0.01, options, steps, **attach)
    oracle, multiplied, none = _trained(
        kind, 0.01 * factor, {**options, "lr_factor": 1.0}, steps, **attach
    )
    return found, oracle, rates, multiplied, lines, none


@pytest.mark.parametrize(
    ("kind", "options", "ranks", "attach", "factor"),
    [
        ("AdamW", {}, 2, {}, math.sqrt(2)),
        ("Adam", {"wire": "float32", "fragments": 2}, 3, {}, math.sqrt(3)),
        ("tensor", {}, 2, {}, math.sqrt(2)),
        ("AdamW", {}, 4, {"ranks_per_node": 2}, math.sqrt(2)),
        ("SGD", {}, 2, {}, 1.0),
        ("SGD", {"lr_factor": 2.0}, 2, {}, 2.0),
        ("AdamW", {"lr_factor": 3.0}, 2, {}, 3.0),
        ("AdamW", {"outer_momentum": 0.9}, 2, {}, 1.0),
        ("AdamW", {"outer_lr": 0.7}, 2, {}, 1.0),
    ],
)
def test_a_step_is_that_of_a_multiplied_learning_rate(
    run_ranks, kind, options, ranks, attach, factor
):
    results = run_ranks(_beside_its_oracle, kind, options, factor, world_size=ranks, **attach)
    for rank, (found, oracle, rates, multiplied, lines, none) in enumerate(results):
        torch.testing.assert_close(found, oracle, rtol=1e-6, atol=1e-7)
        assert rates == pytest.approx([0.01 * 0.9**step for step in range(5)])
        assert multiplied == pytest.approx([factor * rate for rate in rates])
        assert len(lines) == (factor != 1 and rank == 0) and not none


def _first_steps_and_a_step_that_raises() -> list[Any]:
    run = Run.new(hook="diloco", hook_options={"sync_every": 2, "start_iter": 1})
    run.optimizer = torch.optim.AdamW(run.ddp.parameters(), lr=0.01)
    seen: list[float] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(optimizer.param_groups[0]["lr"])
        if len(seen) == 3:
            raise RuntimeError("in the third step")

    run.optimizer.register_step_pre_hook(look)
    run.train(2)
    with pytest.raises(RuntimeError, match="third"):
        run.train(1)
    run.train(1)
    return [*seen, run.optimizer.param_groups[0]["lr"]]


def test_exact_first_steps_and_a_step_that_raises(run_ranks):
    own, multiplied = 0.01, 0.01 * math.sqrt(2)
    for seen in run_ranks(_first_steps_and_a_step_that_raises):
        assert seen == pytest.approx([own, multiplied, multiplied, multiplied, own])


def _steps_that_raise() -> list[float]:
    """The first step and a later one raise. Returns the rate of the user, in the exception in a
    save, and in a step after a schedule has halved it.
    """
    run = Run.new(hook="diloco", hook_options={"sync_every": 2, "lr_factor": 3.0})
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    inside: list[float] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        inside.append(optimizer.param_groups[0]["lr"])
        if len(inside) in (1, 3):
            raise MemoryError

    run.optimizer.register_step_pre_hook(look)
    rates: list[float] = []
    for _ in range(2):
        try:
            run.train(1)
        except MemoryError:
            rates.append(run.optimizer.state_dict()["param_groups"][0]["lr"])
        schedule.step()
        rates.append(run.optimizer.param_groups[0]["lr"])
        run.train(1)
        rates.append(inside[-1])
    run.optimizer.register_step_pre_hook(lambda _, arguments, keywords: (arguments, {**keywords}))
    run.optimizer.register_step_pre_hook(look)
    run.train(1)  # another hook replaces the arguments of the step
    return [*rates, inside[-1]]


def test_a_schedule_sees_the_users_rate_after_a_step_that_has_raised(run_ranks):
    (rates,) = run_ranks(_steps_that_raise, world_size=1)
    assert rates == pytest.approx([0.05, 0.025, 0.075, 0.025, 0.0125, 0.0375, 0.0375])


def _a_step_that_sets_its_own() -> float:
    run = Run.new(hook="diloco", hook_options={"sync_every": 2})
    run.optimizer = torch.optim.AdamW(run.ddp.parameters(), lr=0.01)
    run.optimizer.register_step_pre_hook(
        lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.5)
    )
    return float(run.train(1).optimizer.param_groups[0]["lr"])


def test_a_learning_rate_that_the_step_sets_stays(run_ranks):
    assert run_ranks(_a_step_that_sets_its_own) == [0.5, 0.5]


def _of_two_models(
    factors: tuple[float, float], kind: str
) -> list[tuple[list[float], list[float]]]:
    """The rates of all groups in each step, and after it. One optimizer steps two models that have
    hooks, and a weight that has none.
    """
    runs = [
        Run.new(hook="diloco", hook_options={"sync_every": 2, "lr_factor": factor})
        for factor in factors
    ]
    parts = [list(run.ddp.parameters()) for run in runs]
    groups = {"one group": [[*parts[0], *parts[1]]], "a group each": parts}[kind]
    alone = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.AdamW([{"params": group} for group in [*groups, [alone]]], lr=0.01)
    found = []
    inside: list[float] = []

    def rates() -> list[float]:
        return [group["lr"] for group in optimizer.param_groups]

    optimizer.register_step_pre_hook(lambda *_: inside.extend(rates()))
    for step in range(3):
        for run in runs:
            images, labels = batch(step, 0)
            torch.nn.functional.cross_entropy(run.ddp(images), labels).backward()
        optimizer.step()
        found.append((list(inside), rates()))
        inside.clear()
    return found


@pytest.mark.parametrize(
    ("kind", "factors", "multiplied"),
    [
        ("one group", (3.0, 3.0), [0.03, 0.01]),
        ("a group each", (3.0, 2.0), [0.03, 0.02, 0.01]),
        ("a group each", (1.0, 2.0), [0.01, 0.02, 0.01]),
    ],
)
def test_one_optimizer_may_step_two_models_with_hooks(run_ranks, kind, factors, multiplied):
    """The rate of a group is multiplied once, by the factor of the model whose weights it has."""
    (found,) = run_ranks(_of_two_models, factors, kind, world_size=1)
    for inside, after in found:
        assert inside == pytest.approx(multiplied) and after == [0.01] * len(multiplied)


def test_two_models_may_not_multiply_the_rate_of_one_group_by_two_factors(run_ranks):
    with pytest.raises(AssertionError, match="give each model a parameter group of its own"):
        run_ranks(_of_two_models, (3.0, 2.0), "one group", world_size=1)


class _Around(torch.optim.Optimizer):
    """Shares its groups with the optimizer that does its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


class _Noting(torch.optim.SGD):
    """Notes its rate after the closure."""

    def step(self, closure: Any = None) -> None:
        closure()
        self.noted = self.param_groups[0]["lr"]


def _with_a_schedule_in_the_closure(kind: str) -> list[tuple[float, float, float]]:
    """The rate in the closure, in the rest of the step and after it, in each of three steps."""
    run = Run.new(hook="diloco", hook_options={"sync_every": 2, "lr_factor": 3.0})
    inner = _Noting(run.ddp.parameters(), lr=0.08)
    optimizer = _Around(inner) if kind == "nested" else inner
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    inside: list[float] = []

    def closure() -> None:
        images, labels = batch(0, 0)
        torch.nn.functional.cross_entropy(run.ddp(images), labels).backward()
        inside.append(inner.param_groups[0]["lr"])
        schedule.step()

    rates = []
    for number in range(3):
        if kind == "by name":
            optimizer.step(closure=closure)
        else:
            optimizer.step(closure)
        rates.append((inside[number], inner.noted, inner.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("kind", ["by place", "by name", "nested"])
def test_a_closure_runs_with_the_users_rate_and_may_set_it(run_ranks, kind):
    (rates,) = run_ranks(_with_a_schedule_in_the_closure, kind, world_size=1)
    assert rates == [(0.08, 0.12, 0.04), (0.04, 0.06, 0.02), (0.02, 0.03, 0.01)]


def _with_an_odd_optimizer(kind: str) -> tuple[list[float], float]:
    run = Run.new(hook="diloco", hook_options={"sync_every": 2, "lr_factor": 3.0})
    inner = torch.optim.AdamW(run.ddp.parameters(), lr=0.01)
    inside: list[float] = []
    inner.register_step_pre_hook(lambda *_: inside.append(inner.param_groups[0]["lr"]))
    run.optimizer = _Around(inner)
    if kind == "no rate":
        inner.param_groups[0]["lr"] = None
    run.train(2)
    return inside, inner.param_groups[0]["lr"]


def test_the_rate_of_a_step_within_another_one_is_multiplied_once(run_ranks):
    (found,) = run_ranks(_with_an_odd_optimizer, "nested", world_size=1)
    assert found == ([0.03, 0.03], 0.01)


def test_an_optimizer_without_a_learning_rate_is_refused(run_ranks):
    with pytest.raises(AssertionError, match=r"the optimizer has none \(lr=None\)"):
        run_ranks(_with_an_odd_optimizer, "no rate", world_size=1)
