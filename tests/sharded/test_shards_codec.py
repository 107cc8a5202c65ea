"""Messages of rows: both kernels and the oracle agree to the bit, also for hard numbers; and what
crosses between nodes.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks import Shards
from commhooks.comm.collectives import PointToPoint
from commhooks.compressors.quantized.mean import BlockCode
from commhooks.sharded import blocks, parts
from commhooks.sharded.codec import Codec
from commhooks.sharded.gather import GatherWeights
from commhooks.sharded.layout import RowLayout, UnitParameter, row_layout
from commhooks.sharded.memory import Memory
from commhooks.sharded.routes import Direct
from commhooks.sharded.scatter import weighing
from commhooks.sharded.traffic import Traffic
from tests.sharded.shards_models import backward, sharded
from tests.sharded.shards_oracle import coded, decoded, real_dtype
from tests.support.features import custom_collectives

pytestmark = custom_collectives

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BLOCK = 32
SIZES = {"a": ((5, 33), 165), "bias": ((7,), 7), "b": ((64, 2), 128), "c": ((1, 9), 9)}
"""Shapes, and elements of the padded shard. `c` is too small for a block."""


def _layout(dtype: torch.dtype, exclude: tuple[str, ...] = ()) -> RowLayout:
    parameters = [
        UnitParameter((name,), shape, dtype, dtype, dtype, numel)
        for name, (shape, numel) in SIZES.items()
    ]
    layout = row_layout(parameters, [dtype] * len(SIZES), "int8", BlockCode(8, BLOCK), exclude)
    assert layout is not None
    return layout


def _hard_row(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Blocks of ordinary, zero, huge, denormal and non-finite numbers."""
    generator = torch.Generator().manual_seed(seed)
    numel = sum(numel for _, numel in SIZES.values())
    row = torch.randn(numel, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    row[32:64] = 0
    row[64:96] *= info.tiny
    row[96:110] = info.max * torch.sign(row[96:110])
    row[130 + seed] = (float("inf"), float("nan"), -float("inf"))[seed % 3]
    return row.clamp(-info.max, info.max).where(row.isfinite(), row).to(dtype)


def _codec(layout: RowLayout, native: bool) -> Codec:
    return Codec(layout, Memory(torch.device("cpu")), rows=3, native=native)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("kernel", ["torch", "torch, two rows at once", "native"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_numbers_equal_the_oracle(
    dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "two" in kernel:  # as on an accelerator
        for module in (blocks, parts):
            monkeypatch.setattr(module, "together", lambda *_: 2)
    assert differing_from_oracle(dtype, native=kernel == "native") == []


def differing_from_oracle(dtype: torch.dtype, *, native: bool) -> list[str]:
    """Encode, decode and add hard rows, and return the pieces that differ from the oracle."""
    layout = _layout(dtype)
    rows = [_hard_row(dtype, seed) for seed in range(3)]
    codec = _codec(layout, native)
    messages = torch.zeros(len(rows), codec.message_bytes, dtype=torch.uint8)
    codec.encode(torch.stack(rows), messages)
    all_decoded = torch.full_like(torch.stack(rows), 7)
    codec.decode(messages, all_decoded)
    differing = []
    for number, row in enumerate(rows):
        for piece in layout.pieces:
            form = "exact" if piece.exact else "int8"
            if not _same(piece.of(all_decoded[number]), decoded(piece.of(row), form, BLOCK)):
                differing.append(f"{piece.name} of row {number}")
    total = rows[0].clone()
    codec.add(total, messages, 0, weighing(dist.ReduceOp.AVG, 3))
    three = torch.tensor(3.0, dtype=real_dtype(dtype))
    for piece in layout.pieces:
        expected = piece.of(rows[0]).to(three.dtype) / three
        for row in rows[1:]:
            codes, scales = coded(piece.of(row), "exact" if piece.exact else "int8", BLOCK)
            expected = expected + (codes / three if piece.exact else codes * (scales / three))
        if not _same(piece.of(total), expected.to(dtype)):
            differing.append(f"{piece.name} of the sum")
    return differing


def test_what_is_sent_exactly() -> None:
    reasons = {piece.name: piece.exact for piece in _layout(torch.float32, ("b*",)).pieces}
    small = "too small for a block"
    assert reasons == {"a": "", "bias": "vector", "b": "excluded by 'b*'", "c": small}


@pytest.mark.parametrize(
    ("rows", "row_bytes", "device", "expected"),
    [
        (4, 2**20, "meta", 4),
        (100, 2**20, "meta", 64),
        (4, 100 * 2**20, "meta", 1),
        (4, 0, "meta", 4),
        (4, 2**20, "cpu", 1),
    ],
)
def test_how_many_rows_are_computed_at_once(
    rows: int, row_bytes: int, device: str, expected: int
) -> None:
    """64 MiB on an accelerator, but at least one row."""
    assert parts.together(rows, row_bytes, torch.device(device)) == expected


def test_a_buffer_is_used_again_and_not_while_it_is_lent() -> None:
    memory = Memory(torch.device("cpu"))
    memory.reserve(100)
    first = memory.take()
    second = memory.take()
    assert first.data_ptr() != second.data_ptr() and memory.allocated == 200
    memory.give_back(first)
    assert memory.take().data_ptr() == first.data_ptr() and memory.allocated == 200
    with torch.inference_mode():
        assert not memory.take().is_inference()


def test_an_op_that_is_no_sum_is_refused() -> None:
    with pytest.raises(commhooks.HookRunError, match="fully_shard reduces by .*MAX"):
        weighing(dist.ReduceOp.MAX, 2)


def _gathered_from_elsewhere() -> bool:
    """The interface does not promise that the input is a part of the output, as in torch 2.13. On
    the CPU the messages travel until FSDP2 waits for the result.
    """
    codec = _codec(_layout(torch.float32), native=False)
    traffic, rank = Traffic(), dist.get_rank()
    route = Direct(2, rank, traffic)
    memory = Memory(torch.device("cpu"))
    memory.reserve(2 * codec.message_bytes)
    gather = GatherWeights("unit", 2, codec, route, memory, traffic)
    rows = [_hard_row(torch.float32, seed)[: codec.layout.numel] for seed in range(2)]
    output = gather.allocate((2 * codec.layout.numel,), dtype=torch.float32, device=rows[0].device)
    group = dist.group.WORLD
    assert group is not None
    returned = torch.zeros(1)
    if rank == 1:  # rank 0 returns although rank 1 has sent nothing
        dist.recv(returned, src=0)
    result = gather(output, rows[rank].clone(), group)
    if rank == 0:
        dist.send(returned, dst=1)
    result.wait()
    expected = []
    for row in rows:
        message = torch.zeros(1, codec.message_bytes, dtype=torch.uint8)
        codec.encode(row.unsqueeze(0), message)
        codec.decode(message, row.unsqueeze(0))
        expected.append(row)
    abandoned = gather(output.clone(), rows[rank].clone(), group)
    del abandoned  # as in a backward pass that ends in an exception
    gather(output.clone(), rows[rank].clone(), group).wait()
    assert PointToPoint.in_flight(group)
    traffic.end_step()
    assert not PointToPoint.in_flight(group)
    return _same(output, torch.cat(expected))


def test_a_gather_travels_until_it_is_waited_for_and_its_input_may_be_elsewhere(
    run_ranks: Any,
) -> None:
    assert run_ranks(_gathered_from_elsewhere) == [True, True]


def _spoilt_weight() -> tuple[list[bool], bool]:
    model = sharded()
    commhooks.attach(model, None, shards=Shards(block_size=32))
    with torch.no_grad():
        model.blocks[0].up.weight.to_local()[0, 0] = float("inf")  # type: ignore[operator]
    loss = backward(model, 0)
    grads = [p.grad.to_local().isfinite().all().item() for p in model.parameters()]  # type: ignore[union-attr]
    return grads, bool(loss.isfinite())


def test_a_weight_that_is_not_finite_is_seen(run_ranks: Any) -> None:
    for finite, loss_is_finite in run_ranks(_spoilt_weight):
        assert not loss_is_finite and not any(finite)
