"""`commhooks.testing.check` accepts our compressors and names each broken rule."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import commhooks
from commhooks import HookRunError, Send, UnitPlan, Verdict, keep_residual, with_residual
from commhooks.testing import check
from tests.compressors.test_every_compressor import made_for
from tests.support.kernels import computing_with, use_own_kernel
from tests.support.kinds import KINDS


@pytest.mark.parametrize("name", KINDS)
def test_our_compressors_keep_the_rules(name: str) -> None:
    with computing_with(KINDS[name].kernel):
        compressor = made_for(KINDS[name])
        use_own_kernel(compressor, torch.device("cpu"), {torch.float32})
        check(compressor)


@dataclass(frozen=True, kw_only=True)
class Options(commhooks.HookConfig):
    """For a compressor that is not registered."""

    hook_name: ClassVar[str] = "checked"


class BF16Feedback(commhooks.Compressor[Options]):
    """Sends bfloat16 and keeps the rounding error; it keeps all rules."""

    Config = Options
    state_fields = (commhooks.RESIDUAL,)

    def __init__(self) -> None:
        super().__init__(Options())

    def plan_parameter(self, info: commhooks.ParameterInfo) -> UnitPlan:
        plan = UnitPlan.uncompressed(info, "")
        return dataclasses.replace(plan, compressed=True, numel_compressed=info.numel)

    def exchange(self, flat: torch.Tensor, work: Any, state: Any, step: commhooks.StepInfo) -> Any:
        layout, _ = work
        deltas = [self.delta(slot, flat, state, step) for slot in layout.slots]
        sent = self.rounded(torch.cat(deltas) / step.world_size)
        mean = yield Send(sent.clone(), op="sum", last=True)
        good = yield Verdict(self.finite(mean))
        flat.copy_(mean)
        for slot, delta in zip(layout.slots, deltas, strict=True):
            self.keep(slot, delta - step.world_size * slot.of(sent), good, state)

    def delta(
        self, slot: Any, flat: torch.Tensor, state: Any, step: commhooks.StepInfo
    ) -> torch.Tensor:
        return with_residual(slot, flat, state, step)

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.bfloat16().float()

    def finite(self, mean: torch.Tensor) -> torch.Tensor:
        return mean.isfinite().all()

    def keep(self, slot: Any, left: torch.Tensor, good: Any, state: Any) -> None:
        keep_residual(slot, left, good, state)


def test_the_example_of_the_tests_keeps_the_rules() -> None:
    check(BF16Feedback())


class Sums(BF16Feedback):
    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return super().rounded(numbers * 4)


class SumsWithoutResidual(commhooks.Compressor[Options]):
    Config = Options
    transactional = False

    def __init__(self) -> None:
        super().__init__(Options())

    def exchange(self, flat: torch.Tensor, work: Any, state: Any, step: commhooks.StepInfo) -> Any:
        yield Send(flat, last=True)


class LosesWhatItRounds(BF16Feedback):
    def keep(self, slot: Any, left: torch.Tensor, good: Any, state: Any) -> None:
        super().keep(slot, torch.zeros_like(left), good, state)


class SeesNoInfinity(BF16Feedback):
    def finite(self, mean: torch.Tensor) -> torch.Tensor:
        return torch.ones((), dtype=torch.bool)


class HidesInfinity(BF16Feedback):
    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return super().rounded(numbers.nan_to_num(0.0, 0.0, 0.0))


class WritesTooEarly(BF16Feedback):
    def keep(self, slot: Any, left: torch.Tensor, good: Any, state: Any) -> None:
        super().keep(slot, left, True, state)


class Forgets(BF16Feedback):
    """Its memory is not in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return numbers.half().float() if self.calls % 2 else super().rounded(numbers)


class SeesTheBucket(BF16Feedback):
    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        scale = numbers.abs().amax()
        return (numbers / scale * 127).round() / 127 * scale


class Draws(BF16Feedback):
    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return super().rounded(numbers)


class Grows(BF16Feedback):
    def keep(self, slot: Any, left: torch.Tensor, good: Any, state: Any) -> None:
        super().keep(slot, left, good, state)
        state["residual"][f"{slot.name} {len(state['residual'])}"] = left


class RanksDiffer(BF16Feedback):
    def exchange(self, flat: torch.Tensor, work: Any, state: Any, step: commhooks.StepInfo) -> Any:
        yield from super().exchange(flat, work, state, step)
        flat[0] += step.rank


BROKEN: dict[Callable[[], BF16Feedback | SumsWithoutResidual], str] = {
    Sums: "is larger than all gradients together",
    SumsWithoutResidual: (
        "the result is longer than the mean: a sum must be divided by step.world_size"
    ),
    LosesWhatItRounds: "of gradient and residual are neither in the result nor kept",
    SeesNoInfinity: "Its Verdict is true although the gradient of 'tall' is inf on one rank",
    HidesInfinity: "The result is finite although the gradient of 'bias' is inf on one rank",
    WritesTooEarly: "It has written learned state in a step that was not committed",
    Forgets: "something that it has learned is not in its state_fields",
    SeesTheBucket: "The result of 'bias' depends on the other parameters in its bucket",
    Draws: "It draws from torch's global generator",
    Grows: "What differs between ranks grows from",
    RanksDiffer: "With 4 ranks their results differ",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_named(broken: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError) as caught:
        check(broken())
    assert BROKEN[broken] in str(caught.value)


@pytest.mark.parametrize("subject", [Options(), BF16Feedback])
def test_something_else_than_a_compressor_is_refused(subject: Any) -> None:
    with pytest.raises(commhooks.HookConfigError, match="expected a compressor, such as"):
        check(subject)


class SendsByRank(BF16Feedback):
    def exchange(self, flat: torch.Tensor, work: Any, state: Any, step: commhooks.StepInfo) -> Any:
        yield Send(torch.zeros(1 + step.rank), last=True)


def test_ranks_that_send_different_things_are_an_error() -> None:
    with pytest.raises(HookRunError, match="the ranks do not send the same"):
        check(SendsByRank())
