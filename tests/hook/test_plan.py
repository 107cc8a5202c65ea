"""What is compressed, why not, and the bytes: decided from shapes and options alone."""

import dataclasses

import pytest
import torch
from torch import nn

import commhooks
from commhooks.compressors.cast import AllReduceCompressor
from commhooks.compressors.powersgd.batched import square_side
from commhooks.compressors.powersgd.compressor import MatrixPlan, PowerSGDCompressor
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.plan import ModelPlan
from tests.support.ddp_steps import mlp, process_group_of_one, wrap


def _plan(parameter: torch.Tensor, rank: int = 1, min_rate: float = 2, sparse: bool = False) -> MatrixPlan:
    options = commhooks.PowerSGD(matrix_approximation_rank=rank, min_compression_rate=min_rate)
    (plan,) = PowerSGDCompressor(options).plan([ParameterInfo("w", parameter, sparse)])
    assert isinstance(plan, MatrixPlan)
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
        (torch.zeros(64, 64), {"rank": 2, "min_rate": 16}, "saves only 16x (min_compression_rate=16)"),
        (torch.zeros(64, 64), {"rank": 1000, "min_rate": 0.01}, "saves only 0.5x (min_compression_rate=0.01)"),
        (torch.zeros(1, 1000), {"min_rate": 0.1}, "saves only 1x (min_compression_rate=0.1)"),
    ],
)
def test_reasons(parameter, arguments, reason):
    plan = _plan(parameter, **arguments)
    assert not plan.compressed and plan.reason == reason
    assert plan.numel_sent == plan.numel == parameter.numel() * (2 if parameter.is_complex() else 1)
    assert (plan.n, plan.m, plan.rank) == (0, 0, 0)


@pytest.mark.parametrize(
    "parameter, arguments, matrix",
    [
        (torch.zeros(64, 32), {}, (64, 32, 1)),
        (torch.zeros(64, 32).t(), {"rank": 4}, (64, 32, 4)),  # as it lies in memory
        (torch.zeros(32, 16, 3, 3), {"rank": 2}, (32, 144, 2)),
        (torch.zeros(32, 16, 3, 3).to(memory_format=torch.channels_last), {"rank": 2}, (32, 144, 2)),
        (torch.zeros(2, 1000), {"rank": 5, "min_rate": 0.9}, None),  # at most min(n, m): nothing is saved
        (torch.zeros(64, 64), {"rank": 16, "min_rate": 1.99}, (64, 64, 16)),
        (torch.zeros(64, 64, dtype=torch.bfloat16), {}, (64, 64, 1)),
    ],
)
def test_matrices(parameter, arguments, matrix):
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


def test_square_side():
    assert [square_side(numel) for numel in (0, 1, 2, 4, 5, 9, 10, 10**12, 10**12 + 1)] == [
        0, 1, 2, 2, 3, 3, 4, 10**6, 10**6 + 1,
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ bytes


def test_bytes_of_a_model():
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
    assert half.bytes_after == 192 * 2 + 128 * 2 + 128 * 2 + 20 + 40 + 400  # sparse gradients keep their dtype


def test_a_plan_that_is_not_known_yet():
    empty = ModelPlan("powerSGD", ())
    assert (empty.bytes_before, empty.bytes_after, empty.compressed_share) == (0, 0, 0.0)
    assert str(empty) == "powerSGD: the plan follows DDP's buckets; it is known after the first backward pass"


def test_the_table_shows_every_parameter():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Linear(64, 32))
    with process_group_of_one():
        hook = commhooks.attach(wrap(model), "powerSGD", hook_options={"start_powerSGD_iter": 7})
    text = str(hook.plan())
    assert "powerSGD: compressed from step 7 on" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(("  0.", "  1."))}
    assert rows["0.weight"][1:] == ["32x3x3x3", "32", "x", "27", "1", "3.456", "0.236"]
    assert rows["1.bias"][1:] == ["32", "0.128", "0.128", "vector"]
    assert text.splitlines()[-1].startswith("2 of 4 parameters compressed (")


@pytest.mark.parametrize(
    "compressor", [PowerSGDCompressor(commhooks.PowerSGD()), AllReduceCompressor(commhooks.AllReduce())]
)
def test_names_are_shown_whole_and_as_they_are(compressor):
    deep = ".".join(f"layers_{i}" for i in range(30)) + ".weight"
    names = [deep, "[bold]x", "[/bold]", ":smile:.weight"]
    plans = compressor.plan([ParameterInfo(name, torch.zeros(512, 512)) for name in names])
    text = str(ModelPlan("powerSGD", tuple(plans), selective=compressor.selective))
    assert "…" not in text and max(map(len, text.splitlines())) <= 120
    first_column = [line.split("  ")[1] for line in text.splitlines() if line.startswith("  ")]
    assert deep in "".join(first_column)
    for name in names[1:]:
        assert any(line.split()[0] == name for line in text.splitlines() if line.strip()), name
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["[bold]x"])
    assert row == ["[bold]x", "512x512", *(["512", "x", "512", "1"] if compressor.selective else []), "1.049", row[-1]]


def test_a_hook_of_another_kind_claims_no_compression_by_low_rank():
    with process_group_of_one():
        for name in ("allreduce", "fp16"):
            text = str(commhooks.attach(wrap(mlp()), name).plan())
            assert "from step" not in text and "compressed (" not in text and "because" not in text
            assert text.splitlines()[0].strip() == {"fp16": "fp16_compress"}.get(name, name)
            assert (
                text.splitlines()[-1] == f"6 parameters, 10.592 kB -> {'5.296' if name == 'fp16' else '10.592'} kB "
                "per step and rank"
            )


def test_the_plan_of_batched_powersgd_comes_with_its_buckets():
    with process_group_of_one():
        ddp = wrap(mlp())
        hook = commhooks.attach(ddp, "batched_powerSGD", hook_options={"start_powerSGD_iter": 0})
        assert "known after the first backward pass" in str(hook.plan())
        ddp(torch.randn(4, 24)).sum().backward()
        assert "compressed from step 0 on" in str(hook.plan())
