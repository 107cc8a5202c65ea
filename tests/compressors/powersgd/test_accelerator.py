"""The exchange for accelerators works on stacks of matrices and never asks the device."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.powersgd.accelerator import AcceleratorKernel
from commhooks.compressors.powersgd.exchange import BucketPass
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import HookCallbacks
from tests.support.ddp_steps import process_group_of_one
from tests.support.dispatched import Dispatched
from tests.support.inside import session_of
from tests.support.models import (
    SHAPES,
    Gradients,
    backward,
    bits_equal,
    masks,
    mlp,
    random_gradients,
    relative_error,
    wrap,
)

COMPRESSED = ("conv", "first", "second", "wide")


def _options(rank: int, batch: bool, **more: Any) -> dict[str, Any]:
    common = {"start_powerSGD_iter": 0, "min_compression_rate": 1.0, "random_seed": 11}
    return {
        "matrix_approximation_rank": rank,
        "batch_tensors_with_same_shape": batch,
        **common,
        **more,
    }


def _variants(masked: bool, cases: list[Any]) -> list[list[Gradients]]:
    outcomes = []
    for hook, dtype, wrapper, options in cases:
        with masks(masked):
            ddp = wrap(SHAPES, 0.001, dtype)
            attached = commhooks.attach(ddp, hook, hook_options=options, wrapper=wrapper)
            outcomes.append([])
            for step in range(5):
                gradients = random_gradients(SHAPES, dist.get_rank(), step, dtype)
                if step == 3 and dist.get_rank() == 1:
                    gradients["wide"][0, 0] = float("inf")
                outcomes[-1].append(backward(ddp, gradients))
            assert (
                attached.stats()["nonfinite_steps"] == 1
                and attached.stats()["compressed_steps"] == 4
            )
    return outcomes


def test_every_dtype_and_wire_gives_what_the_host_form_gives(run_ranks: Any) -> None:
    common = {"start_powerSGD_iter": 0, "min_compression_rate": 1.0}
    batched = {**common, "matrix_approximation_rank": 2}
    cases = [
        (
            "powerSGD",
            dtype,
            wrapper,
            _options(2, batch, use_error_feedback=feedback, warm_start=warm),
        )
        for dtype, wrapper, batch, feedback, warm in [
            (torch.float32, "fp16", False, True, True),
            (torch.float32, "bf16", True, True, False),
            (torch.bfloat16, None, True, False, True),
        ]
    ]
    cases += [
        ("batched_powerSGD", dtype, None, batched) for dtype in (torch.float32, torch.bfloat16)
    ]
    host = run_ranks(_variants, False, cases)[0]
    masked = run_ranks(_variants, True, cases)
    for case, expected, *both in zip(cases, host, *masked, strict=True):
        assert all(map(bits_equal, *both))
        for step, (wanted, got) in enumerate(zip(expected, both[0], strict=True)):
            coarse = case[1] == torch.bfloat16 or case[2] == "bf16"
            for name in SHAPES:
                assert torch.equal(wanted[name].isfinite().all(), got[name].isfinite().all()), (
                    case,
                    step,
                    name,
                )
                if wanted[name].isfinite().all():
                    assert relative_error(got[name], wanted[name]) < (0.05 if coarse else 5e-3), (
                        case,
                        step,
                        name,
                    )


@pytest.mark.parametrize("loss_scale", [None, lambda: torch.tensor(2.0)])
@pytest.mark.parametrize("batch", [True, False])
def test_operators_are_per_shape_and_nothing_is_waited_for(batch: bool, loss_scale: Any) -> None:
    few, many = (
        _kernels_of_a_step(
            mlp(16, layers, bias=False), "powerSGD", _options(2, batch), loss_scale=loss_scale
        )
        for layers in (4, 12)
    )
    if batch:
        assert few == many <= 85
    else:  # each matrix: flag, residual, P, Q, new residual, mask, gradient
        assert (many - few) / 8 <= 7


@pytest.mark.parametrize(
    ("hook", "options", "per_parameter"),
    [
        ("batched_powerSGD", {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0}, 1),
        ("int8", {}, 0.2),
    ]
    + [("int4", {}, 0.2)],
)
def test_a_whole_bucket_waits_for_nothing(
    hook: str, options: dict[str, Any], per_parameter: float
) -> None:
    """Not even for the flags of its parameters."""
    few, many = (
        _kernels_of_a_step(mlp(16, layers), hook, options, loss_scale=lambda: torch.tensor(2.0))
        for layers in (4, 12)
    )
    assert (many - few) / 16 <= per_parameter


def _kernels_of_a_step(
    model: torch.nn.Module, name: str, options: dict[str, Any], **arguments: Any
) -> int:
    """The kernels of the fourth step, which waits for none of them."""
    counter = Dispatched()
    whole = HookCallbacks.reduce

    def counted(self: HookCallbacks, bucket: Bucket) -> Any:
        with counter:
            return whole(self, bucket)

    with process_group_of_one(), masks():
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        hook = commhooks.attach(ddp, name, hook_options=options, **arguments)
        for step in range(4):
            with mock.patch.object(HookCallbacks, "reduce", counted if step == 3 else whole):
                ddp.zero_grad()
                ddp(torch.randn(3, 16)).sum().backward()
        assert hook.stats()["compressed_steps"] == 4
    assert counter.waits == []
    return sum(counter.operators.values())


@pytest.mark.parametrize(("used", "rank", "batch"), [(3, 4, True), (5, 8, False)])
def test_an_embedding_of_which_few_rows_are_used_comes_through_unchanged(
    used: int, rank: int, batch: bool
) -> None:
    """Its gradient has a lower rank than PowerSGD, so that it comes through as it is."""
    shapes = {"embedding": (64, 32), "other": (64, 32)}
    with process_group_of_one(), masks():
        ddp = wrap(shapes)
        hook = commhooks.attach(ddp, "powerSGD", hook_options=_options(rank, batch))
        for step in range(10):
            gradients = random_gradients(shapes, 0, step)
            gradients["embedding"][used:] = 0
            got = backward(ddp, gradients)["embedding"]
            assert relative_error(got, gradients["embedding"]) < 1e-2, step
        assert hook.stats()["compressed_steps"] == 10


def _resumed(batch: bool, residual: str) -> bool:
    """Straight on, and from what was saved after 4 steps, in another model: bit-equal?"""
    with masks():
        ddp = wrap(SHAPES, 0.001)
        hook = commhooks.attach(ddp, "powerSGD", hook_options=_options(2, batch))
        for step in range(4):
            backward(ddp, random_gradients(SHAPES, dist.get_rank(), step))
        file = io.BytesIO()
        torch.save(hook.state_dict(residual=residual), file)
        straight = [
            backward(ddp, random_gradients(SHAPES, dist.get_rank(), step)) for step in range(5, 8)
        ]
        ddp = wrap(SHAPES, 0.001)
        hook = commhooks.attach(ddp, "powerSGD", hook_options=_options(2, not batch))
        backward(ddp, random_gradients(SHAPES, dist.get_rank(), 0))
        file.seek(0)
        hook.load_state_dict(torch.load(file, weights_only=True))
        again = [
            backward(ddp, random_gradients(SHAPES, dist.get_rank(), step)) for step in range(5, 8)
        ]
    errors = [
        relative_error(a[n], b[n]) for a, b in zip(straight, again, strict=True) for n in SHAPES
    ]
    return max(errors) < 1e-5


def test_a_resume_is_bit_equal(run_ranks: Any) -> None:
    assert run_ranks(_resumed, True, "mean") == [True, True]


def test_a_pickled_state_holds_each_residual_once() -> None:
    with process_group_of_one(), masks():
        ddp = torch.nn.parallel.DistributedDataParallel(mlp(64, 6, bias=False))
        state = commhooks.PowerSGDState(None, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, commhooks.powerSGD_hook)
        for _ in range(4):
            ddp(torch.randn(3, 64)).sum().backward()
        residuals = state.session.state["residual"]
        assert len(residuals) == 6
        assert len(pickle.dumps(state)) < 1.2 * sum(r.nbytes for r in residuals.values())
        copied = copy.deepcopy(state)
        assert all(
            torch.equal(residuals[n], copied.session.state["residual"][n]) for n in residuals
        )


@pytest.mark.parametrize("stacked", [False, True])
def test_only_gradients_of_one_shape_are_copied(stacked: bool) -> None:
    """A gradient that is alone in its shape needs no memory: it is computed in the bucket."""
    shapes = {"alone": (20, 30), "first": (20, 20), "second": (20, 20)}
    with process_group_of_one(), masks():
        ddp = wrap(shapes)
        hook = commhooks.attach(ddp, "powerSGD", hook_options=_options(2, stacked))
        backward(ddp, random_gradients(shapes, 0, 0))
        (bucket,) = session_of(hook).consensus.buckets
        copied = {block.shape: block.delta is not None for block in bucket.work.blocks}
        assert copied == {(1, 20, 30): False, (2 if stacked else 1, 20, 20): stacked}


def test_no_exchange_outlives_its_pass() -> None:
    """It would keep a bucket that DDP has replaced."""
    alive = []
    form_p = AcceleratorKernel.form_p

    def watched(self: AcceleratorKernel, now: BucketPass) -> None:
        alive.append(weakref.ref(now))
        form_p(self, now)

    with process_group_of_one(), masks(), mock.patch.object(AcceleratorKernel, "form_p", watched):
        ddp = wrap(SHAPES)
        commhooks.attach(ddp, "powerSGD", hook_options=_options(2, True))
        for step in range(3):
            backward(ddp, random_gradients(SHAPES, 0, step))
        gc.collect()
        assert len(alive) == 3 and not any(reference() for reference in alive)


@pytest.mark.parametrize("broken", [0.0, float("nan")])
def test_a_scale_of_zero_leaves_nothing_behind(broken: float) -> None:
    """The host cannot refuse what it does not read: the step is as if it had not been."""
    with process_group_of_one(), masks():
        ddp = wrap(SHAPES)
        scale = torch.ones(())
        hook = commhooks.attach(
            ddp, "powerSGD", hook_options=_options(2, True), loss_scale=lambda: scale
        )
        backward(ddp, random_gradients(SHAPES, 0, 0))
        before = hook.state_dict()
        scale.fill_(broken)
        backward(ddp, {name: g * broken for name, g in random_gradients(SHAPES, 0, 1).items()})
        after = hook.state_dict()
        assert after["loss_scale"] == before["loss_scale"] == 1
        for name in COMPRESSED:
            residuals = (saved["parameters"][name]["residual"][0] for saved in (before, after))
            assert torch.equal(*residuals), name
        scale.fill_(1)
        assert all(
            g.isfinite().all() for g in backward(ddp, random_gradients(SHAPES, 0, 2)).values()
        )
