"""Check a compressor of your own: `check` runs it on simulated ranks, without processes or a
model.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from commhooks.compressors.base import RESIDUAL, Compressor
from commhooks.errors import HookConfigError
from commhooks.testing.simulated_ranks import SimulatedRanks

__all__ = ["SimulatedRanks", "check"]

SHAPES = {"wide": (24, 40), "bias": (40,), "tall": (60, 16)}


def check(compressor: Compressor[Any], shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
    """Run `compressor` on 1 to 4 simulated ranks, on float32 gradients of parameters with these
    shapes on the CPU, compressing from the first step on. Needs no process group.

    Raises:
        HookConfigError: `compressor` is not a compressor, but for example its config or its class.
        AssertionError: with one sentence for each rule of docs/own_hook.md that the compressor
            breaks.
        HookRunError: the ranks send different things, or the exchange yields or returns something
            else than it must.
    """
    if not isinstance(compressor, Compressor):
        raise HookConfigError(
            f"check({compressor!r}): expected a compressor, such as MyCompressor(MyConfig())"
        )
    rules = _Rules(
        compressor.with_start(0), {name: torch.zeros(shape) for name, shape in shapes.items()}
    )
    with torch.no_grad():
        broken = [
            *rules.averages(),
            *rules.skips(),
            *rules.resumes(),
            *rules.sees_parameters(),
            *rules.is_bounded(),
        ]
    if broken:
        raise AssertionError(f"{compressor.display_name}: " + "\n".join(broken))


class _Rules:
    """Each method runs some steps, and yields a sentence for each rule that does not hold."""

    def __init__(self, compressor: Compressor[Any], parameters: dict[str, torch.Tensor]) -> None:
        self._compressor = compressor
        self._parameters = parameters
        self._keeps_residual = any(field.key == RESIDUAL.key for field in compressor.state_fields)
        self._tolerance = 1e-5 if compressor.wire_dtype is None else 3e-3

    def averages(self) -> Iterator[str]:
        ranks = self._ranks(4)
        random_state = torch.get_rng_state()
        total = 0.0
        for step in range(4):
            yield from self._averaged(ranks, step, 4)
            total += float(torch.stack(self._gradients(step, 4)).mean(0).norm())
        if (kept := float(self._mean_residual(ranks).norm())) > total:
            yield (
                f"Its mean residual (norm {kept:.3g}) is larger than all gradients together (norm"
                f" {total:.3g})."
            )
        if not torch.equal(random_state, torch.get_rng_state()):
            yield "It draws from torch's global generator, and changes the user's random numbers."

    def skips(self) -> Iterator[str]:
        """A step in which a number is not finite on one rank must change nothing."""
        ranks = self._trained(2, steps=2)
        before = copy.deepcopy([state.entries for state in ranks.states])
        for slot in ranks.layout.slots:
            buckets = self._gradients(2, 2)
            slot.of(buckets[1])[slot.numel // 2] = torch.inf
            committed = ranks.step(buckets)
            if committed and self._compressor.transactional:
                yield (
                    f"Its Verdict is true although the gradient of {slot.name!r} is inf on one"
                    " rank."
                )
            if any(bool(bucket.isfinite().all()) for bucket in buckets):
                yield (
                    f"The result is finite although the gradient of {slot.name!r} is inf on one"
                    " rank."
                )
        if not _same(before, [state.entries for state in ranks.states]):
            yield "It has written learned state in a step that was not committed."

    def resumes(self) -> Iterator[str]:
        """The learned state must be all that a run needs to go on, also on more or fewer ranks."""
        whole = self._trained(2, steps=3)
        resumed = self._ranks(2)
        resumed.states = copy.deepcopy(whole.states)
        straight = self._gradients(3, 2)
        again = self._gradients(3, 2)
        whole.step(straight)
        resumed.step(again)
        if not _same(straight, again):
            yield (
                "A resumed run gives other gradients: something that it has learned is not in its"
                " state_fields."
            )
        for count in (1, 3):
            ranks = self._ranks(count)
            ranks.states = [copy.deepcopy(whole.states[0]) for _ in range(count)]
            for key in ranks.states[0].local:
                for name in whole.states[0][key]:
                    mean = torch.stack([state[key][name] for state in whole.states]).mean(0)
                    for state in ranks.states:
                        state[key][name] = mean.clone()
            yield from self._averaged(ranks, 4, count)

    def sees_parameters(self) -> Iterator[str]:
        """No bit may depend on the buckets, which DDP changes, unless whole buckets are planned."""
        ranks = self._ranks(2)
        if any(plan.state_name for plan in ranks.plans):
            return
        alone = {
            name: self._ranks(2, {name: parameter}) for name, parameter in self._parameters.items()
        }
        for step in range(3):
            together = self._gradients(step, 2)
            buckets = self._gradients(step, 2)
            ranks.step(together)
            for slot in ranks.layout.slots:
                slices = [slot.of(bucket).clone() for bucket in buckets]
                alone[slot.name].step(slices)
                if not _same(slices, [slot.of(bucket) for bucket in together]):
                    yield (
                        f"The result of {slot.name!r} depends on the other parameters in its"
                        " bucket."
                    )
                    return

    def is_bounded(self) -> Iterator[str]:
        sizes = [self._residual_bytes(self._trained(2, steps)) for steps in (2, 6)]
        plans = self._ranks(2).plans
        planned = self._compressor.memory_plan(plans, [plans]).residual
        if sizes[0] != sizes[1]:
            yield (
                f"What differs between ranks grows from {sizes[0]} bytes after 2 steps to"
                f" {sizes[1]} after 6."
            )
        elif sizes[0] > planned:
            yield (
                f"It keeps {sizes[0]} bytes that differ between ranks, but its memory_plan says"
                f" {planned}."
            )

    # ---- helpers
    # ----------------------------------------------------------------------------------------------

    def _averaged(self, ranks: SimulatedRanks, step: int, count: int) -> Iterator[str]:
        buckets = self._gradients(step, count)
        wanted = torch.stack(buckets).double().mean(0)
        kept = self._mean_residual(ranks)
        if not ranks.step(buckets):
            yield f"Its Verdict is false in step {step}, in which all gradients are finite."
        result = buckets[0].double()
        if not _same(buckets, [buckets[0]] * count):
            yield f"With {count} ranks their results differ: replicas would drift apart."
        if not bool(result.isfinite().all()):
            yield f"The result of step {step} is not finite, but all gradients are."
        elif self._keeps_residual:
            sent = wanted + kept
            lost = (sent - result - self._mean_residual(ranks)).norm() / sent.norm()
            if lost > self._tolerance:
                yield (
                    f"With {count} ranks {lost:.1%} of gradient and residual are neither in the"
                    " result nor kept."
                )
        elif result.dot(wanted) > 2 * wanted.square().sum():
            yield (
                f"With {count} ranks the result is longer than the mean: a sum must be divided by"
                " step.world_size."
            )

    def _ranks(
        self, count: int, parameters: dict[str, torch.Tensor] | None = None
    ) -> SimulatedRanks:
        return SimulatedRanks(
            lambda: copy.deepcopy(self._compressor), count, parameters or self._parameters
        )

    def _trained(self, count: int, steps: int) -> SimulatedRanks:
        ranks = self._ranks(count)
        for step in range(steps):
            ranks.step(self._gradients(step, count))
        return ranks

    def _gradients(self, step: int, count: int) -> list[torch.Tensor]:
        """Return a bucket per rank, the same ones for each call with this step."""
        numel = sum(parameter.numel() for parameter in self._parameters.values())
        seeds = [torch.Generator().manual_seed(64 * step + rank) for rank in range(count)]
        return [torch.randn(numel, generator=seed) for seed in seeds]

    def _mean_residual(self, ranks: SimulatedRanks) -> torch.Tensor:
        total = torch.zeros(ranks.layout.numel, dtype=torch.float64)
        for slot in ranks.layout.slots:
            for state in ranks.states if self._keeps_residual else ():
                if slot.name in state[RESIDUAL.key]:
                    slot.of(total).add_(state[RESIDUAL.key][slot.name], alpha=1 / len(ranks.states))
        return total

    def _residual_bytes(self, ranks: SimulatedRanks) -> int:
        state = ranks.states[0]
        return sum(tensor.nbytes for key in state.local for tensor in state[key].values())


def _same(one: Any, other: Any) -> bool:
    """Return whether lists or dicts of tensors have the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(1e30), other.nan_to_num(1e30))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _same(value, other[key]) for key, value in one.items()
        )
    return len(one) == len(other) and all(map(_same, one, other))
