"""`alternate` (one factor per step) and `fused` (a native kernel): what holds for PowerSGD holds with them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.native import library
from tests.support.compilers import needs_compiler
from tests.support.ddp_steps import process_group_of_one
from tests.support.models import (
    EVERY_PARAMETER,
    SHAPES,
    all_finite,
    backward,
    bits_equal,
    random_gradients,
    wrap,
)
from tests.support.training import Run


def _options(approximation_rank: int, variant: dict[str, Any]) -> dict[str, Any]:
    common = {"start_powerSGD_iter": 0, "min_compression_rate": 1.0, "random_seed": 11}
    return {"matrix_approximation_rank": approximation_rank, **common, **variant}


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


@pytest.mark.parametrize(
    ("variant", "wrapper"),
    [({"alternate": True, "fused": False}, None), pytest.param({"alternate": True}, "fp16", marks=needs_compiler)],
)
def test_a_nonfinite_step_did_not_happen(run_ranks: Any, variant: dict[str, Any], wrapper: str | None) -> None:
    for outcome in run_ranks(_poisoned, variant, wrapper):
        clean = outcome["None"]
        for poison in ("('first', inf)", "('wide_bias', nan)"):
            assert outcome[f"{poison} is seen"]
            assert outcome[f"{poison} steps"] == (6, 2)
            assert all(map(bits_equal, outcome[poison], clean))


OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


def _resume(variant: dict[str, Any], save_at: int) -> tuple[bool, int, list[str]]:
    whole = Run.new(hook_options={**OPTIONS, **variant}).train(save_at)
    saved = whole.save(residual="per_rank")
    whole.train(3)
    resumed = Run.new(hook_options={**OPTIONS, **variant}, bucket_cap_mb=25).load(saved).train(3)
    kept = [key for entry in saved["hook"]["parameters"].values() for key in ("p", "q") if entry.get(key) is not None]
    return torch.equal(whole.weights(), resumed.weights()), resumed.hook.stats()["compressed_steps"], kept


@pytest.mark.parametrize(("save_at", "kept"), [(0, []), (4, ["p"] * 4), (5, ["q"] * 4)])
def test_resume_is_exact(run_ranks: Any, save_at: int, kept: list[str]) -> None:
    """Whichever of the factors the step before has left. What does not alternate: `test_every_compressor.py`."""
    for equal, compressed, found in run_ranks(_resume, {"alternate": True, "fused": False}, save_at):
        assert equal and compressed == (2 if save_at == 0 else 3) and found == kept


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
        pytest.param({"fused": True}, {"fused": False}, marks=needs_compiler),
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
