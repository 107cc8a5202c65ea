"""`alternate` (one factor per step) and `fused` (a native kernel): what holds for PowerSGD holds with them."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.native import library
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.reference import AlternatingOracleMatrix, OracleMatrix, plain_mean
from tests.support.compilers import needs_compiler
from tests.support.ddp_steps import process_group_of_one
from tests.support.models import (
    EVERY_PARAMETER,
    SHAPES,
    Gradients,
    all_finite,
    backward,
    bits_equal,
    random_gradients,
    relative_error,
    wrap,
)
from tests.support.training import Run

STEPS = 9
COMPRESSED = ("conv", "first", "second", "wide")
IDLE_AT = 4  # "first" has no gradient on any rank
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}
FUSED = pytest.param({"fused": True}, marks=needs_compiler, id="fused")
BOTH = pytest.param({"fused": True, "alternate": True}, marks=needs_compiler, id="both")
ALTERNATE = pytest.param({"alternate": True}, id="alternate")


def _gradients(rank: int, step: int, dtype: torch.dtype) -> Gradients:
    gradients = random_gradients(SHAPES, rank, step, dtype)
    if step == IDLE_AT:
        gradients["first"].zero_()
    return gradients


def _options(approximation_rank: int, variant: dict[str, Any]) -> dict[str, Any]:
    common = {"start_powerSGD_iter": 0, "min_compression_rate": 1.0, "random_seed": 11}
    return {"matrix_approximation_rank": approximation_rank, **common, **variant}


def _run_all(cases: list[tuple[int, float, torch.dtype]], variant: dict[str, Any]) -> list[dict[str, Any]]:
    results = []
    for approximation_rank, cap, dtype in cases:
        ddp = wrap(SHAPES, cap, dtype)
        hook = commhooks.attach(ddp, "powerSGD", hook_options=_options(approximation_rank, variant))
        got = [backward(ddp, _gradients(dist.get_rank(), step, dtype)) for step in range(STEPS)]
        saved = hook.state_dict(residual="per_rank")["parameters"]
        residuals = {name: saved[name]["residual"][0] for name in COMPRESSED}
        results.append({"gradients": got, "residuals": residuals, "stats": hook.stats()})
    return results


def _oracle(approximation_rank: int, dtype: torch.dtype, kind: type) -> tuple[list[Gradients], dict[str, Any]]:
    matrices = {}
    for name in COMPRESSED:
        m = torch.Size(SHAPES[name]).numel() // SHAPES[name][0]
        matrices[name] = kind(codec.draw(11, name, "Q", approximation_rank, m, dtype).T, 2)
    expected: list[Gradients] = []
    for step in range(STEPS):
        ranks = [_gradients(rank, step, dtype) for rank in range(2)]
        expected.append({})
        for name, shape in SHAPES.items():
            each = [gradients[name] for gradients in ranks]
            matrix = matrices.get(name)
            expected[-1][name] = (
                plain_mean(each) if matrix is None else matrix.step([g.flatten(1) for g in each]).view(shape)
            )
    return expected, {name: matrix.residuals for name, matrix in matrices.items()}


@pytest.mark.parametrize("variant", [ALTERNATE, FUSED, BOTH])
def test_gradients_and_residuals_equal_the_oracle(run_ranks: Any, variant: dict[str, Any]) -> None:
    dtypes = [torch.float32, torch.float64]
    cases = list(itertools.product([1, 2, 3, 5], [25, EVERY_PARAMETER], dtypes))
    results = run_ranks(_run_all, cases, variant)
    kind = AlternatingOracleMatrix if "alternate" in variant else OracleMatrix
    for index, (approximation_rank, cap, dtype) in enumerate(cases):
        expected, residuals = _oracle(approximation_rank, dtype, kind)
        for rank, result in enumerate(each[index] for each in results):
            for step, name in itertools.product(range(STEPS), SHAPES):
                got, wanted = result["gradients"][step][name], expected[step][name]
                if not wanted.any():
                    assert step == IDLE_AT and not got.any()
                    continue
                assert relative_error(got, wanted) < TOLERANCE[dtype], (step, name, approximation_rank)
            for name, residual in result["residuals"].items():
                assert relative_error(residual.flatten(1), residuals[name][rank]) < TOLERANCE[dtype], name
            stats = result["stats"]
            assert stats["compressed_steps"] == STEPS
            buckets = 1 if cap == 25 else len(SHAPES)
            more = 0 if "alternate" in variant else 1 if cap == 25 else len(COMPRESSED)
            assert stats["collectives_last_pass"] == buckets + more
        # What a layout or a run changes is not one bit.
        assert all(map(bits_equal, *(each[index]["gradients"] for each in results)))
    for one, many in zip(cases[:: 2 * len(dtypes)], cases[len(dtypes) :: 2 * len(dtypes)], strict=True):
        first, second = (results[0][cases.index(case)]["gradients"] for case in (one, many))
        assert all(map(bits_equal, first, second)), one


def _poisoned(variant: dict[str, Any], wrapper: str | None) -> dict[str, Any]:
    outcome = {}
    for poison in (None, ("first", float("inf")), ("wide_bias", float("nan"))):
        ddp = wrap(SHAPES, EVERY_PARAMETER)
        hook = commhooks.attach(ddp, "powerSGD", hook_options=_options(2, variant), wrapper=wrapper)
        got = []
        for step in range(6):
            if poison is not None and step in (3, 4):  # once before P and once before Q
                gradients = random_gradients(SHAPES, dist.get_rank(), 1000)
                if dist.get_rank() == 1:
                    gradients[poison[0]].view(-1)[3] = poison[1]
                bad = backward(ddp, gradients)
                outcome[f"{poison} is seen"] = not all_finite([bad[poison[0]]])
            got.append(backward(ddp, random_gradients(SHAPES, dist.get_rank(), step)))
        outcome[str(poison)] = got
        outcome[f"{poison} steps"] = (hook.stats()["step"], hook.stats()["nonfinite_steps"])
    return outcome


@pytest.mark.parametrize("variant", [ALTERNATE, FUSED, BOTH])
@pytest.mark.parametrize("wrapper", [None, "fp16", "bf16"])
def test_a_nonfinite_step_did_not_happen(run_ranks: Any, variant: dict[str, Any], wrapper: str | None) -> None:
    for outcome in run_ranks(_poisoned, variant, wrapper):
        clean = outcome["None"]
        for poison in ("('first', inf)", "('wide_bias', nan)"):
            assert outcome[f"{poison} is seen"]
            assert outcome[f"{poison} steps"] == (6, 2)
            assert all(map(bits_equal, outcome[poison], clean))


OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


def _resume(variant: dict[str, Any], save_at: int, how: dict[str, Any]) -> tuple[bool, int, list[str]]:
    whole = Run.new(hook_options={**OPTIONS, **variant}).train(save_at)
    saved = whole.save(**how)
    whole.train(6)
    resumed = Run.new(hook_options={**OPTIONS, **variant}, bucket_cap_mb=25).load(saved).train(6)
    kept = [key for entry in saved["hook"]["parameters"].values() for key in ("p", "q") if entry.get(key) is not None]
    return torch.equal(whole.weights(), resumed.weights()), resumed.hook.stats()["compressed_steps"], kept


@pytest.mark.parametrize("variant", [ALTERNATE, FUSED, BOTH])
@pytest.mark.parametrize("save_at", [0, 4, 5])
def test_resume_is_exact(run_ranks: Any, variant: dict[str, Any], save_at: int) -> None:
    for how in ({"residual": "per_rank"}, {"residual": "mean"}):
        for equal, compressed, kept in run_ranks(_resume, variant, save_at, how):
            assert equal and compressed == (5 if save_at == 0 else 6)
            made_p = "alternate" in variant and save_at == 4
            assert kept == ([] if save_at == 0 else ["p"] * 4 if made_p else ["q"] * 4)


def _change(before: dict[str, Any], after: dict[str, Any]) -> tuple[torch.Tensor, int]:
    saved = Run.new(hook_options={**OPTIONS, **before}).train(4).save(residual="per_rank")
    run = Run.new(hook_options={**OPTIONS, **after}).load(saved).train(4)
    return run.weights(), run.hook.stats()["compressed_steps"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"alternate": True}, {}),
        ({}, {"alternate": True}),
        ({"alternate": True}, {"alternate": True, "matrix_approximation_rank": 4}),
        ({"alternate": True}, {"alternate": True, "matrix_approximation_rank": 1}),
        pytest.param({"fused": True}, {}, marks=needs_compiler),
        pytest.param({}, {"fused": True}, marks=needs_compiler),
    ],
    ids=str,
)
def test_the_option_may_change_with_a_resume(run_ranks: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    (weights, compressed), other = run_ranks(_change, before, after)
    assert torch.equal(weights, other[0]) and weights.isfinite().all()
    assert compressed == other[1] == 4


def _bytes(variant: dict[str, Any]) -> list[int]:
    run = Run.new(hook_options={**OPTIONS, "start_powerSGD_iter": 0, **variant})
    return [run.train(1).hook.stats()["bytes_sent_last_pass"] for _ in range(4)] + [run.hook.plan().bytes_after]


def test_half_the_bytes(run_ranks: Any) -> None:
    for usual, alternate in zip(run_ranks(_bytes, {}), run_ranks(_bytes, {"alternate": True}), strict=True):
        flags = 4 * 4
        matrices = [((12, 9), 2), ((24, 432), 2), ((24, 24), 2), ((10, 24), 2)]
        vectors = 4 * (12 + 24 + 24 + 10)
        p, q = (sum(4 * r * shape[side] for shape, r in matrices) for side in (0, 1))
        assert usual[:4] == [p + q + vectors + flags] * 4
        assert alternate[:4] == [p + vectors + flags, q + vectors + flags] * 2
        assert alternate[4] == (p + q) // 2 + vectors


@pytest.mark.parametrize(
    ("hook", "options", "text"),
    [
        ("powerSGD", {"alternate": True, "warm_start": False}, "alternate=True; expected False where warm_start"),
        ("batched_powerSGD", {"alternate": True}, "alternate=True; expected False: it is for PowerSGD"),
        ("powerSGD", {"fused": "yes, please"}, "fused"),
    ],
)
def test_what_does_not_go_together(hook: str, options: dict[str, Any], text: str) -> None:
    with process_group_of_one(), pytest.raises(commhooks.HookConfigError, match=text):
        commhooks.attach(wrap(SHAPES), hook, hook_options=options)


def test_fused_is_for_the_cpu() -> None:
    with pytest.raises(commhooks.HookConfigError, match="here are gradients in bfloat16 on cuda: leave out fused=True"):
        library.check_supported(torch.device("cuda"), torch.bfloat16)
