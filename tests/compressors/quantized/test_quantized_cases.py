"""The quantised hooks average parameters of every kind and refuse non-finite numbers."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks.compressors.quantized.compressor import Int4Compressor, Int8Compressor
from tests.support.compilers import HAS_COMPILER, needs_compiler
from tests.support.ddp_steps import replicas_equal, residuals
from tests.support.features import complex_on_gloo
from tests.support.kernels import computing_with
from tests.support.models import all_finite
from tests.support.simulation import SimulatedRanks


class Mixed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(50, 32, sparse=True, dtype=dtype)
        self.wide = nn.Linear(32, 40, dtype=dtype)
        self.head = nn.Linear(40, 24, dtype=dtype)
        self.unused = nn.Linear(24, 24, dtype=dtype)
        self.phase = nn.Parameter(torch.randn(24, 24, dtype=dtype.to_complex()))
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.small = nn.Parameter(torch.ones(1, 17, dtype=dtype))  # int8 would send as many bytes

    def forward(self, tokens: torch.Tensor, use_all: bool) -> torch.Tensor:
        hidden = self.head(self.wide(self.rows(tokens)).tanh()) * self.scale
        if use_all:
            hidden = self.unused(hidden)
        turned = hidden.to(self.phase.dtype) @ self.phase
        return turned.real.square().mean() + turned.imag.square().mean() + self.small.sum() * 0.1


def _step(model: nn.Module, step: int, use_all: bool) -> None:
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randint(0, 50, (16,), generator=generator), use_all).backward()


def _mixed(hook: str, kernel: str, wrapper: str | None, dtype: torch.dtype) -> dict[str, Any]:
    options = {"exclude": ["head.weight"], "block_size": 64}
    ddp = nn.parallel.DistributedDataParallel(Mixed(dtype), find_unused_parameters=True)
    plain = nn.parallel.DistributedDataParallel(Mixed(dtype), find_unused_parameters=True)
    with computing_with(kernel):
        attached = commhooks.attach(ddp, hook, hook_options=options, wrapper=wrapper)
    errors: dict[str, float] = {}
    kept = []
    for step in range(4):
        use_all = step < 2
        for model in (ddp, plain):
            _step(model, step, use_all)
        for (name, one), (_, other) in zip(
            ddp.module.named_parameters(), plain.module.named_parameters(), strict=True
        ):
            if one.grad is not None and other.grad is not None:
                ours = one.grad.to_dense()
                theirs = other.grad.to_dense()
                errors[name] = max(
                    errors.get(name, 0.0), float((ours - theirs).abs().max() / theirs.abs().max())
                )
        if step > 0:
            kept.append(residuals(attached)["unused.weight"].clone())
    return {
        "errors": errors,
        "reasons": {plan.name: plan.reason for plan in attached.plan().parameters},
        "equal": replicas_equal(ddp),
        "kept": torch.equal(kept[0], kept[-1]) and bool(kept[0].any()),
    }


@complex_on_gloo
@pytest.mark.parametrize(
    ("hook", "kernel", "wrapper", "exact"),
    [
        pytest.param("int8", "native", None, 1e-6, marks=needs_compiler),
        ("int8", "torch", "bf16", 2e-2),
        pytest.param("int4", "native", "bf16", 2e-2, marks=needs_compiler),
    ],
)
def test_parameters_of_every_kind_are_averaged(
    run_ranks: Any, hook: str, kernel: str, wrapper: str | None, exact: float
) -> None:
    quantised = 0.02 if hook == "int8" else 0.3
    for rank in run_ranks(_mixed, hook, kernel, wrapper, torch.float32, world_size=3):
        reasons = rank["reasons"]
        assert {name for name, reason in reasons.items() if not reason} == {
            "wide.weight",
            "unused.weight",
        }
        assert (
            reasons["small"] == "too small for a block of 64"
            and reasons["phase"] == "complex numbers"
        )
        assert reasons["wide.bias"] == "vector" and reasons["scale"] == "scalar"
        for name, error in rank["errors"].items():
            assert error < (exact if reasons[name] else quantised), name
        assert rank["errors"]["wide.weight"] > 1e-4 and rank["equal"]
        assert rank["kept"], "a parameter that no rank used keeps its residual"


@pytest.mark.parametrize(
    ("compressor", "kernel", "value"),
    [(Int8Compressor, "torch", math.nan), (Int4Compressor, "torch", -math.inf)]
    + [pytest.param(Int8Compressor, "native", -math.inf, marks=needs_compiler)]
    + [pytest.param(Int4Compressor, "native", math.nan, marks=needs_compiler)],
)
def test_one_number_that_is_not_finite_anywhere_stops_the_step(
    compressor: Any, kernel: str, value: float
) -> None:
    """This holds for any rank, block and owner, and for what is not quantised."""
    world_size = 3
    shapes = {"a": (10, 7), "bias": (5,), "b": (6, 16)}
    config = compressor.Config(block_size=16)
    parameters = {n: torch.zeros(s) for n, s in shapes.items()}
    with computing_with(kernel):
        ranks = SimulatedRanks(lambda: compressor(config), world_size, parameters)
    numel = ranks.layout.numel
    with torch.no_grad():
        assert ranks.step([torch.randn(numel) for _ in range(world_size)])
        before = [{n: r.clone() for n, r in state["residual"].items()} for state in ranks.states]
        for place in range(0, numel, 5):
            for rank in range(world_size):
                buckets = [torch.ones(numel) for _ in range(world_size)]
                buckets[rank][place] = value
                assert not ranks.step(buckets), (place, rank)
                assert not any(all_finite([bucket]) for bucket in buckets)
        for state, old in zip(ranks.states, before, strict=True):
            assert all(
                torch.equal(state["residual"][name], residual) for name, residual in old.items()
            )
        assert ranks.step([torch.ones(numel) for _ in range(world_size)]), (
            "nothing is left in the buffers"
        )


def _after_a_step(config: commhooks.Int8Compress, dtype: torch.dtype) -> tuple[Any, ...]:
    """Planned memory, workspace and learned state."""
    shapes = {"a": (10, 7), "bias": (5,), "b": (6, 16)}
    made: list[Int8Compressor] = []

    def compressor() -> Int8Compressor:
        made.append(Int8Compressor(config))
        return made[-1]

    ranks = SimulatedRanks(
        compressor, 1, {n: torch.zeros(s, dtype=dtype) for n, s in shapes.items()}
    )
    with torch.no_grad():
        assert ranks.step([torch.ones(ranks.layout.numel, dtype=dtype)])
    work = ranks._works[0]
    assert sum(plan.flags for plan in ranks.plans) == work._kernel.messages.flags.nbytes
    return made[0].memory_plan(ranks.plans, [ranks.plans]), work, ranks.states[0]


@pytest.mark.parametrize("error_feedback", [True, False])
def test_the_plan_knows_the_memory(error_feedback: bool) -> None:
    config = commhooks.Int8Compress(block_size=32, use_error_feedback=error_feedback)
    with computing_with("torch"):
        planned, work, state = _after_a_step(config, torch.float32)
    assert planned.residual == sum(residual.nbytes for residual in state["residual"].values())
    kernel = work._kernel
    kept = kernel.buffers
    buffers = [kept.delta, kept._unused, *([kept.residuals.whole] if error_feedback else [])]
    # Delta has a block more than the plan knows, the empty one.
    assert (
        planned.residual + planned.copies
        == sum(buffer.nbytes for buffer in buffers) - kept.delta[-1].nbytes
    )
    sent = kernel.messages.sent.nbytes
    assert planned.packed <= kernel.codes.nbytes + kernel.scales.nbytes + 3 * sent + 4 * 5 * 4
    assert planned.packed >= 4 * (kernel.codes[:-1].nbytes + kernel.scales[:-1].nbytes)
    for dtype in (torch.float32, torch.bfloat16) if HAS_COMPILER else ():
        planned, work, state = _after_a_step(config, dtype)
        assert planned.residual == sum(residual.nbytes for residual in state["residual"].values())
        kernel = work._kernel
        blocks = 3 + 3
        plain = 4 * 5 * dtype.itemsize
        assert planned.copies == (0 if dtype == torch.float32 else kernel._copy.nbytes)
        assert planned.packed - plain == 3 * blocks * (32 + 4) <= 3 * kernel.messages.sent.nbytes
