"""`commhooks plan`: the same as the attached hook will say and do, before there is a process group."""

from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from commhooks import HookConfigError
from commhooks.plan import ModelPlan, plan_model
from commhooks.request import HookRequest
from tests.support.compilers import needs_compiler
from tests.support.ddp_steps import backward, mlp, process_group_of_one, wrap
from tests.support.inside import session_of
from tests.support.kernels import computing_with
from tests.support.plan_models import Net, needs_an_argument


def plan_of(module: nn.Module, hook: Any, wrapper: str | None = None, **arguments: Any) -> ModelPlan:
    return plan_model(module, HookRequest.parse(hook, wrapper=wrapper), **arguments)


HOOKS: dict[str, Any] = {
    "rank 2": commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0),
    "exclude": commhooks.PowerSGD(start_powerSGD_iter=0, exclude=["2.*", "embed*"]),
    "no error feedback": commhooks.PowerSGD(start_powerSGD_iter=0, use_error_feedback=False),
    "fp16": commhooks.FP16Compress(),
    "allreduce": commhooks.AllReduce(),
    "noop": commhooks.Noop(),
}


# ----------------------------------------------------------------------------------- as the attached hook says and does


@pytest.mark.parametrize("wrapper", [None, "bf16"])
@pytest.mark.parametrize("name", HOOKS)
def test_the_same_as_the_attached_hook(name: str, wrapper: str | None) -> None:
    cap = 0.003
    early = plan_of(mlp(), HOOKS[name], wrapper)
    with process_group_of_one():
        ddp = wrap(mlp(), bucket_cap_mb=cap)
        hook = commhooks.attach(ddp, HOOKS[name], wrapper=wrapper)
        for step in range(2):
            backward(ddp, step)
        sent, late = hook.stats()["bytes_sent_last_pass"], hook.plan()
    assert early.parameters == late.parameters
    for one in ("bytes_before", "bytes_after", "flag_bytes", "start_step", "wire_dtype", "selective", "sends"):
        assert getattr(early, one) == getattr(late, one), one
    assert early.summary() == late.summary()
    assert sent == early.bytes_after + early.flag_bytes
    if name not in ("fp16", "allreduce", "noop"):
        assert early.buckets == () and len(late.buckets) > 2
        assert early.memory.residual == late.memory.residual and early.memory.total >= late.memory.total > 0
        assert sum(b.bytes_after for b in late.buckets) == late.bytes_after
        assert sum(b.bytes_before for b in late.buckets) == late.bytes_before
        assert "Buckets, as in the latest backward pass" in str(late)
    if name == "noop":
        assert early.bytes_after == 0 and "0.000 kB per step" in early.summary()


def test_of_whole_buckets_nothing_is_known_before_ddp_makes_them() -> None:
    plan = plan_of(mlp(), commhooks.BatchedPowerSGD())
    assert str(plan) == "batched_powerSGD: the plan follows DDP's buckets; it is known after the first backward pass"


def test_a_hook_of_the_users_own_is_not_known() -> None:
    with process_group_of_one():
        plan = commhooks.attach(wrap(mlp()), lambda state, bucket: commhooks.allreduce_hook(None, bucket)).plan()
    assert plan.as_dict()["bytes_after"] is None and "?" in str(plan)
    assert plan.summary().endswith("kB -> what the hook sends per step and rank")
    with pytest.raises(HookConfigError, match="only its own code knows"):
        plan_model(mlp(), HookRequest.parse(needs_an_argument))


def _size(tensors: Any) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _trained(config: Any, dtype: torch.dtype = torch.float32, wrapper: str | None = None) -> tuple[Any, Any, list[Any]]:
    """After four steps: the hook, what it has learned, the kernels of its buckets."""
    ddp = wrap(mlp(dtype=dtype))
    hook = commhooks.attach(ddp, config, wrapper=wrapper)
    for step in range(4):
        backward(ddp, step)
    session = session_of(hook)
    return hook, session.state, [known.work for known in session.consensus.buckets if known.work]


FROM_0: dict[str, Any] = {"start_powerSGD_iter": 0}


@pytest.mark.parametrize(
    "config, dtype, wrapper",
    [
        (commhooks.PowerSGD(**FROM_0), torch.float32, None),
        (commhooks.PowerSGD(**FROM_0, matrix_approximation_rank=2), torch.float32, "fp16"),
        (commhooks.PowerSGD(**FROM_0, use_error_feedback=False), torch.float64, None),
        (commhooks.PowerSGD(**FROM_0, matrix_approximation_rank=2), torch.bfloat16, None),
        (commhooks.PowerSGD(**FROM_0, exclude=["0.*"]), torch.float32, "bf16"),
        (commhooks.BatchedPowerSGD(**FROM_0), torch.float32, None),
    ],
)
def test_the_memory_that_is_planned_is_taken(config: Any, dtype: torch.dtype, wrapper: str | None) -> None:
    with process_group_of_one(), computing_with("torch"):  # the native kernel needs less
        hook, state, kernels = _trained(config, dtype, wrapper)
    planned = hook.plan().memory
    assert planned.residual == _size(state["residual"].values())
    kept = _size(state["q"].values())
    assert planned.factors == kept + sum(_size(x.products._p) + _size(x.products._q) for x in kernels)
    assert planned.copies == sum(_size(x.own_deltas) for x in kernels)
    packed = _size(x.work.buffer for x in kernels)
    if isinstance(config, commhooks.BatchedPowerSGD):
        # A bucket that is not compressed is counted with them: an upper bound.
        assert packed <= planned.packed < 2 * packed
    else:
        assert planned.packed == packed
    assert planned.total == planned.residual + planned.factors + planned.copies + planned.packed


@needs_compiler
def test_the_native_kernel_takes_no_more_than_is_planned() -> None:
    """It does not pad the factors of rank 1."""
    for rank in (1, 4):
        with process_group_of_one():
            config = commhooks.PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=0)
            hook, state, kernels = _trained(config)
        assert hook.stats()["kernel"] == "native"
        planned = hook.plan().memory
        assert planned.residual == _size(state["residual"].values())
        taken = _size(state["q"].values()) + sum(_size(x.products.p) + _size(x.products.q) for x in kernels)
        assert planned.factors / 2 < taken <= planned.factors
        assert planned.packed == _size(x.work.buffer for x in kernels)


def test_kinds_of_parameters() -> None:
    plan = plan_of(Net(), commhooks.PowerSGD(start_powerSGD_iter=0, exclude=["head*"]))
    reasons = {p.name: p.reason for p in plan.parameters}
    assert reasons["embed.weight"] == "excluded by 'head*'"  # by its second name
    assert reasons["sparse.weight"] == "sparse gradient" and reasons["imaginary"] == "complex numbers"
    assert not any(name.startswith(("frozen", "head", "mean")) for name in reasons)
    assert reasons["conv.weight"] == reasons["half.weight"] == ""
