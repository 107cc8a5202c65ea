"""PowerSGD with `wrapper="int8"` and `"int4"`: what it computes, what is fed back, and what is never rounded."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.base import Compressor
from commhooks.compressors.powersgd import codec
from commhooks.hook.request import HookRequest
from tests.support.compilers import needs_compiler
from tests.support.models import EVERY_PARAMETER, all_finite, backward, masks, random_gradients, same_bits, wrap
from tests.support.models import SHAPES as LAYERS
from tests.support.quantised_factors_oracle import BLOCK, QuantisedAlternatingOracleMatrix, QuantisedOracleMatrix
from tests.support.quantized_oracle import OracleRanks
from tests.support.simulation import SimulatedRanks
from tests.support.training import Run, residuals

LEVELS = {"int8": 127, "int4": 7}
MATRICES = {"tall": (60, 30), "wide": (33, 70), "quiet": (40, 40)}
BESIDE = {"vector": (130,), "low": (5, 30), "quiet vector": (70,)}
"""Quantised as they are: vectors, and a matrix that PowerSGD would not shrink enough."""
PLAIN = {"number": (), "short": (4,)}
"""Too small for a block."""
SHAPES: dict[str, tuple[int, ...]] = {
    "vector": BESIDE["vector"], "tall": MATRICES["tall"], "number": (), "low": BESIDE["low"], "wide": MATRICES["wide"],
    "quiet": MATRICES["quiet"], "short": PLAIN["short"], "quiet vector": BESIDE["quiet vector"],
}  # fmt: skip
RANK = 3
QUIET_AT = (0, 2)
"""At these steps no rank has a gradient for two of them."""
VARIANTS = [
    pytest.param({"fused": False}, False, id="torch"),
    pytest.param({"fused": False}, True, id="masked"),
    pytest.param({"fused": True}, False, marks=needs_compiler, id="native"),
    pytest.param({"fused": False, "alternate": True}, False, id="alternate"),
    pytest.param({"fused": False, "alternate": True}, True, id="alternate-masked"),
]
"""Options, and whether the host must not look at the tensors, as on an accelerator."""


OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


def compressor(wrapper: str, hook: str = "powerSGD", **options: Any) -> Compressor[Any]:
    options = {"matrix_approximation_rank": RANK, "start_powerSGD_iter": 0} | options
    made = HookRequest.parse(hook, hook_options=options, wrapper=wrapper).new_compressor()
    assert made is not None
    return made


def simulated(
    wrapper: str, world_size: int, dtype: torch.dtype = torch.float64, hook: str = "powerSGD", **options: Any
) -> SimulatedRanks:
    parameters = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    return SimulatedRanks(lambda: compressor(wrapper, hook, **options), world_size, parameters)


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(100 * step + rank)
    found = {name: torch.randn(shape, generator=noise, dtype=torch.float64) for name, shape in SHAPES.items()}
    if step in QUIET_AT:
        found["quiet"].zero_()
        found["quiet vector"].zero_()
    return found


def flat(each: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in each.values()])


@pytest.mark.parametrize(("options", "masked"), VARIANTS)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("wrapper", LEVELS)
def test_averages_and_residuals_are_those_of_the_oracle(
    wrapper: str, world_size: int, options: dict[str, Any], masked: bool
) -> None:
    kind = QuantisedAlternatingOracleMatrix if "alternate" in options else QuantisedOracleMatrix
    levels = LEVELS[wrapper]
    matrices = {
        name: kind(name, codec.draw(0, name, "Q", RANK, m, torch.float64).T, world_size, levels)
        for name, (_, m) in MATRICES.items()
    }
    beside = OracleRanks(world_size, levels, BLOCK, {name: math.prod(shape) for name, shape in BESIDE.items()})
    with masks(masked), torch.no_grad():
        ranks = simulated(wrapper, world_size, **options)
        assert {plan.name for plan in ranks.plans if plan.compressed} == MATRICES.keys() | BESIDE.keys()
        for step in range(6):
            own = [gradients(rank, step) for rank in range(world_size)]
            buckets = [flat(each) for each in own]
            assert ranks.step(buckets)
            assert all(same_bits(bucket, buckets[0]) for bucket in buckets)
            expected = {name: matrix.step([each[name] for each in own]) for name, matrix in matrices.items()}
            others = [{n: each[n].flatten().tolist() for n in SHAPES if n not in MATRICES} for each in own]
            expected |= {n: torch.tensor(each, dtype=torch.float64) for n, each in beside.step(others).items()}
            wanted = flat({name: expected[name] for name in SHAPES})
            torch.testing.assert_close(buckets[0], wanted, rtol=0, atol=1e-9)
            for rank, state in enumerate(ranks.states):
                for name, matrix in matrices.items():
                    if name in state["residual"]:
                        found = state["residual"][name].view(SHAPES[name])
                        torch.testing.assert_close(found, matrix.residuals[rank] + 0 * found, rtol=0, atol=1e-9)
                for name in BESIDE:
                    wanted = torch.tensor(beside.residuals[rank][name], dtype=torch.float64)
                    torch.testing.assert_close(state["residual"][name], wanted, rtol=0, atol=1e-9)


CASES = [
    *itertools.product(["powerSGD"], LEVELS, [1, 16], [3], [{}, {"alternate": True}]),
    *itertools.product(["batched_powerSGD"], LEVELS, [2], [1], [{}]),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("hook", "wrapper", "rank", "world_size", "variant"), CASES)
def test_nothing_is_lost(
    hook: str, wrapper: str, rank: int, world_size: int, variant: dict[str, Any], masked: bool
) -> None:
    """The sum of all averages plus the mean residual is the sum of all mean gradients: what rounding Q and the vectors
    loses is only delayed, and what rounding P loses does not matter."""
    applied, expected = [torch.zeros(sum(math.prod(shape) for shape in SHAPES.values()), dtype=torch.float64)] * 2
    with masks(masked), torch.no_grad():
        ranks = simulated(
            wrapper,
            world_size,
            hook=hook,
            matrix_approximation_rank=rank,
            min_compression_rate=1,
            fused=False,
            **variant,
        )
        for step in range(8):
            buckets = [flat(gradients(each, step)) for each in range(world_size)]
            expected = expected + torch.stack(buckets).mean(0)
            assert ranks.step(buckets)
            assert all(same_bits(bucket, buckets[0]) for bucket in buckets)
            applied = applied + buckets[0]
    left: Any = sum(_residuals(ranks, rank) for rank in range(world_size)) / world_size
    torch.testing.assert_close(applied + left, expected, rtol=0, atol=1e-10)
    assert float(left.abs().max()) > 0.1


def _residuals(ranks: SimulatedRanks, rank: int) -> torch.Tensor:
    found = torch.zeros(ranks.layout.numel, dtype=torch.float64)
    for slot in ranks.layout.slots:
        if slot.name in ranks.states[rank]["residual"]:
            slot.of(found).copy_(ranks.states[rank]["residual"][slot.name])
    return found


@pytest.mark.parametrize("wrapper", LEVELS)
def test_nothing_but_factors_is_rounded_without_error_feedback(wrapper: str) -> None:
    ranks = simulated(wrapper, 2, use_error_feedback=False)
    assert {plan.name for plan in ranks.plans if plan.compressed} == MATRICES.keys()
    own = [gradients(rank, 1) for rank in range(2)]
    buckets = [flat(each) for each in own]
    with torch.no_grad():
        assert ranks.step(buckets)
    for slot in ranks.layout.slots:
        if slot.name not in MATRICES:
            exact = sum(each[slot.name] for each in own) / 2
            torch.testing.assert_close(slot.of(buckets[0]), exact.flatten(), rtol=0, atol=1e-15)
    assert not any(state["residual"] for state in ranks.states)


def _trained(wrapper: str | None) -> dict[str, Any]:
    """Gradients before the start (two steps) and after it, with one matrix and one vector excluded."""
    options = {"start_powerSGD_iter": 2, "exclude": ["first", "wide_bias"], "fused": False}
    ddp = wrap(LAYERS, EVERY_PARAMETER)
    hook = commhooks.attach(ddp, "powerSGD", hook_options=options, wrapper=wrapper)
    found = [backward(ddp, random_gradients(LAYERS, dist.get_rank(), step)) for step in range(4)]
    return {"gradients": found, "compressed": {plan.name for plan in hook.plan().compressed}}


@pytest.mark.parametrize("wrapper", LEVELS)
def test_the_warm_up_and_excluded_parameters_are_as_without_a_wrapper(run_ranks: Any, wrapper: str) -> None:
    for plain, quantised in zip(run_ranks(_trained, None), run_ranks(_trained, wrapper), strict=True):
        compressed = quantised["compressed"]
        assert compressed > plain["compressed"] and not compressed & {"first", "wide_bias"}
        for step, (one, other) in enumerate(zip(plain["gradients"], quantised["gradients"], strict=True)):
            same = {name for name in LAYERS if same_bits(one[name], other[name])}
            assert same == LAYERS.keys() - (compressed if step >= 2 else set()), step


def _resumed_with_another_wrapper() -> list[dict[str, bool]]:
    """From no wrapper to int8, and from int8 to none: which parameters have residuals."""
    found = []
    for before, after in ((None, "int8"), ("int8", None)):
        saved = Run.new(hook="powerSGD", hook_options=OPTIONS, wrapper=before).train(4).save(residual="mean")
        run = Run.new(hook="powerSGD", hook_options=OPTIONS, wrapper=after).load(saved)
        loaded = set(residuals(run.hook))
        weights = run.train(3).weights()
        rows = torch.stack([torch.empty_like(weights) for _ in range(dist.get_world_size())])
        dist.all_gather(list(rows), weights)
        compressed = {plan.name for plan in run.hook.plan().compressed}
        found.append(
            {
                "kept are those of matrices": loaded < compressed if after else loaded == compressed,
                "all have them": set(residuals(run.hook)) == compressed,
                "equal": all(same_bits(row, weights) for row in rows),
            }
        )
    return found


def test_another_wrapper_on_resume(run_ranks: Any) -> None:
    for rank in run_ranks(_resumed_with_another_wrapper):
        assert all(all(each.values()) for each in rank), rank


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("options", "masked"), VARIANTS)
def test_one_number_that_is_not_finite_anywhere_stops_the_step(
    options: dict[str, Any], value: float, masked: bool
) -> None:
    """On any rank, in any tensor: no state changes, all ranks see it, and nothing is left in the buffers."""
    world_size = 3
    with masks(masked), torch.no_grad():
        ranks = simulated("int8", world_size, torch.float32, **options)
        clean = simulated("int8", world_size, torch.float32, **options)
        for step in (1, 3):
            assert ranks.step([flat(gradients(r, step)).float() for r in range(world_size)])
            assert clean.step([flat(gradients(r, step)).float() for r in range(world_size)])
        for i, slot in enumerate(ranks.layout.slots):
            buckets = [flat(gradients(r, 9)).float() for r in range(world_size)]
            buckets[i % world_size][slot.offset + slot.numel // 2] = value
            assert not ranks.step(buckets), slot.name
            assert not any(all_finite([bucket]) for bucket in buckets)
        for one, other in zip(ranks.states, clean.states, strict=True):
            for key in ("q", "p", "residual"):
                assert one[key].keys() == other[key].keys()
                assert all(same_bits(one[key][name], other[key][name]) for name in one[key])
        after, wanted = ([flat(gradients(r, 4)).float() for r in range(world_size)] for _ in range(2))
        assert ranks.step(after) and clean.step(wanted)
        assert all(map(same_bits, after, wanted))


HARD = {
    "zero": lambda x, dtype: x * 0,
    "denormal": lambda x, dtype: x * (1e-7 if dtype == torch.float16 else 1e-40),
    "small": lambda x, dtype: x * (6e-5 if dtype == torch.float16 else 1e-30),
    "huge": lambda x, dtype: x.sign() * min(1e30, 0.9 * torch.finfo(dtype).max),
}


@pytest.mark.parametrize(("dtype", "masked"), [(torch.float32, True), (torch.float16, False)])
@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("wrapper", LEVELS)
def test_hard_gradients_stay_finite_and_are_worked_off(
    wrapper: str, kind: str, dtype: torch.dtype, masked: bool
) -> None:
    world_size, total, steps = 2, 0.0, 60
    fixed = flat(gradients(7, 1))
    with masks(masked), torch.no_grad():
        ranks = simulated(wrapper, world_size, dtype, matrix_approximation_rank=16, fused=False)
        hard = [HARD[kind](flat(gradients(rank, 3)), dtype).to(dtype) for rank in range(world_size)]
        for step in range(3 + steps):
            buckets = [each.clone() for each in hard] if step < 3 else [fixed.to(dtype)] * world_size
            buckets = [bucket.clone() for bucket in buckets]
            assert ranks.step(buckets), step
            assert all_finite(buckets) and same_bits(*buckets)
            if step >= 3 + steps - 20:
                total += buckets[0].double() / 20
    error = float((total - fixed).norm() / fixed.norm())
    assert error < 0.3, "the ordinary gradients come through"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wrapper", LEVELS)
def test_what_a_committed_step_gives_fits_into_a_bucket_of_float16(wrapper: str, world_size: int, masked: bool) -> None:
    """Two rows of nearly the largest float16, alike: their residual grows beyond it, because Q is clamped. Then their
    signs differ, and the sum of r products is larger than each."""
    signs = torch.Generator().manual_seed(4)
    with masks(masked), torch.no_grad():
        parameters = {"w": torch.zeros(60, 30, dtype=torch.float16)}
        ranks = SimulatedRanks(
            lambda: compressor(wrapper, matrix_approximation_rank=2, fused=False), world_size, parameters
        )
        for step in range(16):
            gradient = torch.zeros(60, 30)
            gradient[:2] = 0.99 * torch.finfo(torch.float16).max
            if step >= 8:
                gradient[:2] *= torch.randint(0, 2, (2, 30), generator=signs) * 2 - 1
            buckets = [gradient.flatten().half() for _ in range(world_size)]
            assert ranks.step(buckets) and all_finite(buckets), step
            assert float(buckets[0].abs().max()) > 30_000


def test_the_plan_knows_bytes_and_memory() -> None:
    ranks = simulated("int8", 1, torch.float32, fused=False)
    with torch.no_grad():
        assert ranks.step([flat(gradients(0, 1)).float()])
    made = ranks._compressors[0]
    planned = made.memory_plan(ranks.plans, [ranks.plans])
    assert {plan.name: plan.flags for plan in ranks.plans} == {name: int(name not in PLAIN) for name in SHAPES}
    (work,) = ranks._works
    messages = work.work.messages
    sent = sum(plan.sent_bytes(None) + plan.flags * plan.wire_itemsize(None) for plan in ranks.plans)
    assert 0 <= ranks.bytes_sent - sent <= 2 * 4 * 8  # sections begin at multiples of 8
    assert planned.residual == sum(each.nbytes for each in ranks.states[0]["residual"].values())
    buffers = sum(x.buffer.nbytes + x._kernel.delta.nbytes + x._decoded.nbytes for x in messages)
    kernels = [x._kernel for x in messages]
    coded = sum(x.codes.nbytes + x.scales.nbytes + 3 * x.messages.sent.nbytes for x in kernels)
    assert abs(planned.packed - buffers - coded) < 0.05 * planned.packed
