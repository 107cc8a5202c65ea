"""A plan says from shapes and options alone what is compressed, why not, bytes and memory."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from commhooks import HookConfigError
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.plan import ModelPlan, plan_model
from commhooks.request import HookRequest
from tests.support.compilers import needs_compiler
from tests.support.ddp_steps import backward, mlp, process_group_of_one, wrap
from tests.support.inside import session_of
from tests.support.kernels import computing_with
from tests.support.plan_models import Net, needs_an_argument


def _resnet18_of_cifar() -> list[tuple[int, ...]]:
    """The shapes of its parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    inputs = 64
    for width in (64, 128, 256, 512):
        for block_inputs in (inputs, width):
            shapes += [
                (width, block_inputs, 3, 3),
                (width,),
                (width,),
                (width, width, 3, 3),
                (width,),
                (width,),
            ]
            if block_inputs != width:
                shapes += [(width, block_inputs, 1, 1), (width,), (width,)]
        inputs = width
    return [*shapes, (10, 512), (10,)]


def _lstm_of_wikitext() -> list[tuple[int, ...]]:
    """The shapes of 3 layers of 650, with embedding and output layer tied."""
    layer: list[tuple[int, ...]] = [(2600, 650), (2600, 650), (2600,), (2600,)]
    return [(28_869, 650), *layer, *layer, *layer, (28_869,)]


@pytest.mark.parametrize(
    ("shapes", "ratios"),
    [
        (_resnet18_of_cifar(), {1: 243.3, 2: 135.8, 4: 72.1}),
        (_lstm_of_wikitext(), {1: 309.7, 2: 203.1, 4: 120.3}),
    ],
    ids=["ResNet-18", "LSTM"],
)
def test_as_many_times_fewer_bytes_are_sent_as_in_the_paper(
    shapes: list[tuple[int, ...]], ratios: dict[int, float]
) -> None:
    """Vogels et al. 2019, arXiv 1905.13727. The paper has no flag per matrix, which the plan counts
    apart.
    """
    model = nn.ParameterList(torch.empty(shape, device="meta") for shape in shapes)
    for rank, ratio in ratios.items():
        plan = plan_model(
            model, HookRequest.parse("powerSGD", hook_options={"matrix_approximation_rank": rank})
        )
        assert round(plan.bytes_before / plan.bytes_after, 1) == ratio


def _plan(parameter: torch.Tensor, rank: int = 1, min_rate: float = 2, sparse: bool = False) -> Any:
    options = commhooks.PowerSGD(matrix_approximation_rank=rank, min_compression_rate=min_rate)
    (plan,) = PowerSGDCompressor(options).plan([ParameterInfo("w", parameter, sparse)])
    return plan


@pytest.mark.parametrize(
    "parameter, arguments, reason",
    [
        (torch.tensor(1.0), {}, "scalar"),
        (torch.zeros(1000), {}, "vector"),
        (torch.zeros(0, 5), {}, "empty"),
        (torch.zeros(5, 0), {}, "empty"),
        (torch.zeros(64, 64, dtype=torch.complex64), {}, "complex numbers"),
        (torch.zeros(64, 64), {"sparse": True}, "sparse gradient"),
        (torch.zeros(4, 4), {}, "saves only 2x (min_compression_rate=2)"),
        (torch.zeros(64, 64), {"rank": 16}, "saves only 2x (min_compression_rate=2)"),
        (
            torch.zeros(64, 64),
            {"rank": 2, "min_rate": 16},
            "saves only 16x (min_compression_rate=16)",
        ),
        (
            torch.zeros(64, 64),
            {"rank": 1000, "min_rate": 0.01},
            "saves only 0.5x (min_compression_rate=0.01)",
        ),
        (torch.zeros(1, 1000), {"min_rate": 0.1}, "saves only 1x (min_compression_rate=0.1)"),
    ],
)
def test_a_reason_is_given_for_what_is_not_compressed(parameter, arguments, reason):
    plan = _plan(parameter, **arguments)
    assert not plan.compressed and plan.reason == reason
    assert plan.numel_sent == plan.numel == parameter.numel() * (2 if parameter.is_complex() else 1)
    assert not plan.details.get("rank")


@pytest.mark.parametrize(
    "parameter, arguments, matrix",
    [
        (torch.zeros(64, 32), {}, (64, 32, 1)),
        (torch.zeros(64, 32).t(), {"rank": 4}, (64, 32, 4)),  # as it lies in memory
        (torch.zeros(32, 16, 3, 3), {"rank": 2}, (32, 144, 2)),
        (
            torch.zeros(32, 16, 3, 3).to(memory_format=torch.channels_last),
            {"rank": 2},
            (32, 144, 2),
        ),
        (
            torch.zeros(2, 1000),
            {"rank": 5, "min_rate": 0.9},
            None,
        ),  # at most min(n, m): nothing is saved
        (torch.zeros(64, 64), {"rank": 16, "min_rate": 1.99}, (64, 64, 16)),
        (torch.zeros(64, 64, dtype=torch.bfloat16), {}, (64, 64, 1)),
    ],
)
def test_parameters_are_seen_as_matrices(parameter, arguments, matrix):
    plan = _plan(parameter, **arguments)
    assert (plan.n, plan.m, plan.rank) == (matrix or (0, 0, 0))
    assert plan.compressed == (matrix is not None) == (plan.reason == "")
    if matrix:
        n, m, rank = matrix
        assert plan.numel_sent == (n + m) * rank < plan.numel


def test_the_limit_is_that_of_torch():
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

    for n, m in ((4, 4), (8, 8), (16, 3), (64, 64), (100, 7)):
        for rank in (1, 2, 4, 8):
            for rate in (1, 2, 3.5, 8):
                theirs = _should_compress(n, m, min(n, m, rank), rate)[0]
                assert _plan(torch.zeros(n, m), rank, rate).compressed == theirs, (n, m, rank, rate)


# ---- bytes ---------------------------------------------------------------------------------------


def test_the_bytes_of_a_model_are_counted():
    plan = ModelPlan(
        "powerSGD",
        (
            _plan(torch.zeros(64, 32), rank=2),  # 8192 bytes -> 192 numbers
            _plan(torch.zeros(64, 64, dtype=torch.bfloat16)),  # 8192 bytes -> 128 numbers
            _plan(torch.zeros(64, 64, dtype=torch.float64)),  # 32768 bytes -> 128 numbers
            _plan(torch.zeros(10)),
            _plan(torch.zeros(10, dtype=torch.complex64)),  # 20 numbers of 4 bytes
            _plan(torch.zeros(10, 10), sparse=True),
        ),
    )
    assert plan.bytes_before == 8192 + 8192 + 32768 + 40 + 80 + 400
    assert plan.bytes_after == 192 * 4 + 128 * 2 + 128 * 8 + 40 + 80 + 400
    assert plan.compressed_share == pytest.approx((8192 + 8192 + 32768) / plan.bytes_before)
    half = dataclasses.replace(plan, wire_dtype=torch.float16)
    assert half.bytes_before == plan.bytes_before
    # sparse gradients keep their dtype
    assert half.bytes_after == 192 * 2 + 128 * 2 + 128 * 2 + 20 + 40 + 400


def test_the_table_shows_every_parameter():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Linear(64, 32))
    with process_group_of_one():
        hook = commhooks.attach(wrap(model), "powerSGD", hook_options={"start_powerSGD_iter": 7})
    text = str(hook.plan())
    assert "powerSGD: compressed from step 7 on" in text
    rows = {
        line.split()[0]: line.split()
        for line in text.splitlines()
        if line.startswith(("  0.", "  1."))
    }
    assert rows["0.weight"][1:] == ["32x3x3x3", "32", "x", "27", "1", "3.456", "0.236"]
    assert rows["1.bias"][1:] == ["32", "0.128", "0.128", "vector"]
    assert text.splitlines()[-1].startswith("2 of 4 parameters compressed (")


def test_names_are_shown_whole_and_as_they_are():
    compressor = PowerSGDCompressor(commhooks.PowerSGD())
    deep = ".".join(f"layers_{i}" for i in range(30)) + ".weight"
    names = [deep, "[bold]x", "[/bold]", ":smile:.weight"]
    plans = compressor.plan([ParameterInfo(name, torch.zeros(512, 512)) for name in names])
    text = str(ModelPlan("powerSGD", tuple(plans)))
    assert "…" not in text and max(map(len, text.splitlines())) <= 120
    first_column = [line.split("  ")[1] for line in text.splitlines() if line.startswith("  ")]
    assert deep in "".join(first_column)
    for name in names[1:]:
        assert any(line.split()[0] == name for line in text.splitlines() if line.strip()), name
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["[bold]x"])
    assert row == ["[bold]x", "512x512", "512", "x", "512", "1", "1.049", row[-1]]


# ---- before there is a process group, as for `commhooks plan` ------------------------------------


def plan_of(
    module: nn.Module, hook: Any, wrapper: str | None = None, **arguments: Any
) -> ModelPlan:
    return plan_model(module, HookRequest.parse(hook, wrapper=wrapper), **arguments)


HOOKS: dict[str, Any] = {
    "rank 2": commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0),
    "exclude": commhooks.PowerSGD(start_powerSGD_iter=0, exclude=["2.*", "embed*"]),
    "no error feedback": commhooks.PowerSGD(start_powerSGD_iter=0, use_error_feedback=False),
    "fp16": commhooks.FP16Compress(),
    "allreduce": commhooks.AllReduce(),
    "noop": commhooks.Noop(),
}


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [*((name, None) for name in HOOKS), ("rank 2", "bf16"), ("allreduce", "bf16")],
)
def test_a_plan_is_that_of_the_attached_hook(name: str, wrapper: str | None) -> None:
    cap = 0.003
    early = plan_of(mlp(), HOOKS[name], wrapper)
    with process_group_of_one():
        ddp = wrap(mlp(), bucket_cap_mb=cap)
        hook = commhooks.attach(ddp, HOOKS[name], wrapper=wrapper)
        for step in range(2):
            backward(ddp, step)
        sent = hook.stats()["bytes_sent_last_pass"]
        late = hook.plan()
    assert early.parameters == late.parameters
    for one in (
        "bytes_before",
        "bytes_after",
        "flag_bytes",
        "start_step",
        "wire_dtype",
        "selective",
        "sends",
    ):
        assert getattr(early, one) == getattr(late, one), one
    assert early.summary() == late.summary()
    assert sent == early.bytes_after + early.flag_bytes
    if name not in ("fp16", "allreduce", "noop"):
        assert early.buckets == () and len(late.buckets) > 2
        assert (
            early.memory.residual == late.memory.residual
            and early.memory.total >= late.memory.total > 0
        )
        assert sum(b.bytes_after for b in late.buckets) == late.bytes_after
        assert sum(b.bytes_before for b in late.buckets) == late.bytes_before
        assert "Buckets, as in the latest backward pass" in str(late)
    if name == "noop":
        assert early.bytes_after == 0 and "0.000 kB per step" in early.summary()


def test_of_whole_buckets_nothing_is_known_before_ddp_makes_them() -> None:
    unknown = (
        "batched_powerSGD: the plan follows DDP's buckets; it is known after the first backward"
        " pass"
    )
    early = plan_of(mlp(), commhooks.BatchedPowerSGD())
    assert (early.bytes_before, early.bytes_after, early.compressed_share, str(early)) == (
        0,
        0,
        0.0,
        unknown,
    )
    with process_group_of_one():
        ddp = wrap(mlp())
        hook = commhooks.attach(ddp, commhooks.BatchedPowerSGD(start_powerSGD_iter=0))
        assert str(hook.plan()) == unknown
        backward(ddp, 0)
        assert "compressed from step 0 on" in str(hook.plan())


def test_a_hook_of_the_users_own_is_not_known() -> None:
    with process_group_of_one():
        plan = commhooks.attach(
            wrap(mlp()), lambda state, bucket: commhooks.allreduce_hook(None, bucket)
        ).plan()
    assert plan.as_dict()["bytes_after"] is None and "?" in str(plan)
    assert plan.summary().endswith("kB -> what the hook sends per step and rank")
    with pytest.raises(HookConfigError, match="is a function, whose traffic cannot be planned"):
        plan_model(mlp(), HookRequest.parse(needs_an_argument))


def _size(tensors: Any) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _trained(
    config: Any, dtype: torch.dtype = torch.float32, wrapper: str | None = None
) -> tuple[Any, Any, list[Any]]:
    """After four steps: the hook, what it has learned, the kernels of its buckets."""
    ddp = wrap(mlp(dtype=dtype))
    hook = commhooks.attach(ddp, config, wrapper=wrapper)
    for step in range(4):
        backward(ddp, step)
    session = session_of(hook)
    return hook, session.state, [bucket.work for bucket in session.consensus.buckets if bucket.work]


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
def test_the_memory_that_is_planned_is_taken(
    config: Any, dtype: torch.dtype, wrapper: str | None
) -> None:
    with process_group_of_one(), computing_with("torch"):  # the native kernel needs less
        hook, state, kernels = _trained(config, dtype, wrapper)
    planned = hook.plan().memory
    assert planned.residual == _size(state["residual"].values())
    kept = _size(state["q"].values())
    assert planned.factors == kept + sum(
        _size(x.products._p) + _size(x.products._q) for x in kernels
    )
    assert planned.copies == sum(_size(x.copies) for x in kernels)
    packed = _size(x.work.buffer for x in kernels)
    if isinstance(config, commhooks.BatchedPowerSGD):
        # A bucket that is not compressed is counted with them: an upper bound.
        assert packed <= planned.packed < 2 * packed
    else:
        assert planned.packed == packed
    assert planned.total == planned.residual + planned.factors + planned.copies + planned.packed


@needs_compiler
@pytest.mark.parametrize("rank", [1, 4])
def test_the_native_kernel_takes_no_more_than_is_planned(rank: int) -> None:
    """It does not pad the factors of rank 1."""
    with process_group_of_one():
        hook, state, kernels = _trained(
            commhooks.PowerSGD(**FROM_0, matrix_approximation_rank=rank)
        )
    assert hook.stats()["kernel"] == "native"
    planned = hook.plan().memory
    taken = _size(state["q"].values()) + sum(
        _size(x.products.p) + _size(x.products.q) for x in kernels
    )
    assert (
        planned.residual == _size(state["residual"].values())
        and planned.factors / 2 < taken <= planned.factors
    )
    assert planned.packed == _size(x.work.buffer for x in kernels)


def test_reasons_fit_every_kind_of_parameter() -> None:
    plan = plan_of(Net(), commhooks.PowerSGD(start_powerSGD_iter=0, exclude=["head*"]))
    reasons = {p.name: p.reason for p in plan.parameters}
    assert reasons["embed.weight"] == "excluded by 'head*'"  # by its second name
    assert (
        reasons["sparse.weight"] == "sparse gradient" and reasons["imaginary"] == "complex numbers"
    )
    assert not any(name.startswith(("frozen", "head", "mean")) for name in reasons)
    assert reasons["conv.weight"] == reasons["half.weight"] == ""
