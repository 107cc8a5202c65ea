"""A step with an inf or a NaN on one rank did not happen: not for the residuals, not for Q, not for the step count."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from tests.support.models import Gradients, all_finite, backward, bits_equal, random_gradients, wrap

# Per bucket one compressed matrix and, behind a cap that ends a bucket with each matrix, one vector. Buckets are filled
# from the last parameter on.
SHAPES = {
    "first": (24, 16),
    "first_bias": (24,),
    "conv": (8, 3, 3, 3),
    "conv_bias": (8,),
    "middle": (24, 16),
    "middle_bias": (24,),
    "last": (10, 40),
    "last_bias": (10,),
}
CAPS = {"one bucket": 25, "buckets of two": 120 / 1024**2}
STEPS, BAD_STEP = 5, 2


def _make(cap: float, start: int, wrapper: str | None) -> tuple[Any, commhooks.CommHook]:
    ddp = wrap(SHAPES, cap)
    config = commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=start, min_compression_rate=1)
    return ddp, commhooks.attach(ddp, config, wrapper=wrapper)


def _state(hook: commhooks.CommHook) -> Gradients:
    """Everything learned, as tensors."""
    saved = hook.state_dict(residual="per_rank")
    state = {"step": torch.tensor(saved["step"]), "loss scale": torch.tensor(saved["loss_scale"])}
    for name, entry in saved["parameters"].items():
        for key, value in (("Q", entry["q"]), ("residual", entry["residual"])):
            if value is not None:
                state[f"{key} of {name}"] = value[0] if isinstance(value, list) else value
    return state


def _run(cap: float, start: int, wrapper: str | None) -> dict[str, Any]:
    """A clean run, and for each of `POISON` one with a bad step in between, on rank 1 only."""
    rank = dist.get_rank()
    ddp, hook = _make(cap, start, wrapper)
    clean = [backward(ddp, random_gradients(SHAPES, rank, step)) for step in range(STEPS)]
    clean_state = _state(hook)
    outcomes = []
    for name, number in POISON:
        ddp, hook = _make(cap, start, wrapper)
        got, before, after, bad = [], {}, {}, {}
        for step in range(STEPS):
            if step == BAD_STEP:
                gradients = random_gradients(SHAPES, rank, 1000)
                if rank == 1:
                    gradients[name].view(-1)[3] = number
                before = _state(hook)
                bad = backward(ddp, gradients)
                after = _state(hook)
            got.append(backward(ddp, random_gradients(SHAPES, rank, step)))
        outcomes.append(
            {
                "committed nothing": bits_equal(before, after),
                "bad": bad,
                "as if skipped": all(map(bits_equal, got, clean)) and bits_equal(_state(hook), clean_state),
                "all finite": all_finite(tensor for each in got for tensor in each.values()),
                "nonfinite steps": hook.stats()["nonfinite_steps"],
                "step": hook.stats()["step"],
                "compressed": hook.stats()["compressed_steps"],
                "remembers": len(before),
                "collectives": hook.stats()["collectives_last_pass"],
            }
        )
    return {"outcomes": outcomes, "clean": clean}


INF, NAN = float("inf"), float("nan")
POISON = [("first", INF), ("conv_bias", NAN), ("middle", NAN), ("last_bias", INF)]  # one in each bucket of two
CASES = [("one bucket", 0, None), ("buckets of two", BAD_STEP + 2, None), ("buckets of two", 0, "fp16")]
BUCKETS = {"one bucket": 1, "buckets of two": 4}


@pytest.mark.parametrize(("cap", "start", "wrapper"), CASES)
def test_a_bad_step_did_not_happen(run_ranks, cap, start, wrapper):
    ranks = run_ranks(_run, CAPS[cap], start, wrapper)
    for index, (name, number) in enumerate(POISON):
        outcomes = [each["outcomes"][index] for each in ranks]
        for outcome in outcomes:
            assert outcome["committed nothing"], (name, number)
            assert outcome["as if skipped"], (name, number)
            assert outcome["all finite"], (name, number)
            assert outcome["nonfinite steps"] == 1
            assert outcome["step"] == STEPS
            assert outcome["compressed"] == STEPS - start
            # Step and loss scale, and once it compresses Q and residual of four matrices.
            assert outcome["remembers"] == (10 if start == 0 else 2)
            # A second all-reduce for each bucket with a matrix in it.
            assert outcome["collectives"] == 2 * BUCKETS[cap]
            bad = outcome["bad"][name]
            # A compressed gradient is lost as a whole; an uncompressed one where the number is.
            compressed = start == 0 and bad.dim() > 1
            assert torch.isfinite(bad).sum() <= (0 if compressed else bad.numel() - 1), (name, number)
        assert bits_equal(outcomes[0]["bad"], outcomes[1]["bad"]), (name, number)
    assert all(map(bits_equal, ranks[0]["clean"], ranks[1]["clean"]))
