"""What goes to the network, when, and that nobody waits for it too early."""

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import HookCallbacks
from tests.support.models import EVERY_PARAMETER, SHAPES, backward, bits_equal, random_gradients, wrap

RANK = 2
CAPS = {"one bucket": 25, "two matrices each": 2000 / 1024**2, "a bucket per parameter": EVERY_PARAMETER}
WIRES = {None: torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Recorder:
    """Patches the hook's all-reduces and the hook call itself, on this rank.

    Attributes:
        calls: per hook call, the parameters' shapes and the (dtype, bytes) of the all-reduces issued inside it.
        late: all-reduces happen when they are waited for, not before.
        open_at_return: per hook call, which of all all-reduces so far (by number) were not complete when it returned.
    """

    late: bool = False
    calls: list[tuple[list[torch.Size], list[tuple[torch.dtype, int]]]] = field(default_factory=list)
    open_at_return: list[set[int]] = field(default_factory=list)
    issued_by: list[int] = field(default_factory=list)
    complete: set[int] = field(default_factory=set)

    def __enter__(self) -> "Recorder":
        recorder = self
        all_reduce, run = dist.all_reduce, HookCallbacks.reduce

        class LateWork:
            def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, number: int) -> None:
                self._tensor, self._group, self._number = tensor, group, number

            def wait(self) -> None:
                # The order of the waits is the same on every rank, so the sums still meet.
                all_reduce(self._tensor, group=self._group)
                recorder.complete.add(self._number)

        def recording_all_reduce(tensor: torch.Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool) -> Any:
            assert async_op and op == dist.ReduceOp.SUM
            recorder.calls[-1][1].append((tensor.dtype, tensor.numel() * tensor.element_size()))
            recorder.issued_by.append(len(recorder.calls) - 1)
            if recorder.late:
                return LateWork(tensor, group, len(recorder.issued_by) - 1)
            return all_reduce(tensor, group=group, async_op=True)

        def recording_run(self: HookCallbacks, bucket: Bucket) -> Any:
            recorder.calls.append(([p.shape for p in bucket.parameters], []))
            future = run(self, bucket)
            recorder.open_at_return.append(set(range(len(recorder.issued_by))) - recorder.complete)
            return future

        self._patches = [
            mock.patch("commhooks.comm.collectives.dist.all_reduce", recording_all_reduce),
            mock.patch.object(HookCallbacks, "reduce", recording_run),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def take(self) -> list[tuple[list[torch.Size], list[tuple[torch.dtype, int]]]]:
        calls, self.calls = self.calls, []
        self.issued_by.clear()
        self.open_at_return.clear()
        self.complete.clear()
        return calls


def _sizes(shapes: list[torch.Size]) -> tuple[int, int | None]:
    """Elements of the two all-reduces of a compressed bucket; the second None where nothing is compressed."""
    first, second = 0, 0
    for shape in shapes:
        if len(shape) < 2:
            first += shape.numel()
            continue
        n, m = shape[0], shape.numel() // shape[0]
        first += RANK * n + 1  # P and the flag that says whether the gradient is zero
        second += RANK * m
    return first, second or None


def _expected(layout: list[list[torch.Size]], compressing: bool, wire: torch.dtype) -> list[list[tuple[Any, int]]]:
    """Per hook call: P of this bucket, then Q of the one before; at the last bucket its Q too."""
    calls: list[list[tuple[Any, int]]] = [[] for _ in layout]
    for k, shapes in enumerate(layout):
        first, second = _sizes(shapes)
        if not compressing:
            first, second = sum(shape.numel() for shape in shapes), None
        calls[k].insert(0, (wire, first * wire.itemsize))
        if second is not None:
            calls[min(k + 1, len(layout) - 1)].append((wire, second * wire.itemsize))
    return calls


def _attach(cap: float, wrapper: str | None, start: int = 1) -> tuple[Any, commhooks.CommHook]:
    ddp = wrap(SHAPES, cap)
    config = commhooks.PowerSGD(matrix_approximation_rank=RANK, start_powerSGD_iter=start, min_compression_rate=1)
    return ddp, commhooks.attach(ddp, config, wrapper=wrapper)


def _record(cap: float, wrapper: str | None, steps: int) -> dict[str, Any]:
    ddp, hook = _attach(cap, wrapper)
    passes, last_pass = [], []
    with Recorder() as recorder:
        for step in range(steps):
            backward(ddp, random_gradients(SHAPES, dist.get_rank(), step))
            passes.append(recorder.take())
            last_pass.append((hook.stats()["collectives_last_pass"], hook.stats()["bytes_sent_last_pass"]))
    return {"passes": passes, "last_pass": last_pass, "stats": hook.stats(), "plan": hook.plan().bytes_after}


@pytest.mark.parametrize(
    ("cap", "wrapper"), [*((cap, None) for cap in CAPS), ("two matrices each", "fp16"), ("two matrices each", "bf16")]
)
def test_count_dtype_bytes_and_order(run_ranks, cap, wrapper):
    steps = 4
    ranks = run_ranks(_record, CAPS[cap], wrapper, steps)
    assert ranks[0]["passes"] == ranks[1]["passes"], "every rank issues the same sequence"
    total_count = total_bytes = 0
    for step, calls in enumerate(ranks[0]["passes"]):
        layout = [shapes for shapes, _ in calls]
        assert [issued for _, issued in calls] == _expected(layout, step >= 1, WIRES[wrapper])
        count = sum(len(issued) for _, issued in calls)
        sent = sum(size for _, issued in calls for _, size in issued)
        assert ranks[0]["last_pass"][step] == (count, sent)
        total_count, total_bytes = total_count + count, total_bytes + sent
    # The layout that this case is about, from the second pass on.
    assert len(layout) == {"one bucket": 1, "two matrices each": 2, "a bucket per parameter": len(SHAPES)}[cap]
    stats = ranks[0]["stats"]
    assert stats["collectives"] == total_count
    assert stats["bytes_sent"] == total_bytes
    assert stats["bytes_uncompressed"] == steps * 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    flags = 4 * WIRES[wrapper].itemsize
    assert ranks[0]["last_pass"][-1][1] == ranks[0]["plan"] + flags


def _late(cap: float, wrapper: str | None, steps: int) -> dict[str, Any]:
    """Gradients with late all-reduces and with ordinary ones; which were open at the end of each hook call."""
    gradients: dict[bool, Any] = {}
    observed = []
    for late in (False, True):
        ddp, _ = _attach(cap, wrapper, start=0)
        gradients[late] = []
        with Recorder(late) as recorder:
            for step in range(steps):
                gradients[late].append(backward(ddp, random_gradients(SHAPES, dist.get_rank(), step)))
                if late:
                    observed.append((list(recorder.issued_by), list(recorder.open_at_return)))
                recorder.take()
    return {"gradients": gradients, "observed": observed}


@pytest.mark.parametrize(("cap", "wrapper"), [*((cap, None) for cap in CAPS), ("two matrices each", "bf16")])
def test_a_hook_call_returns_before_its_own_p_is_complete(run_ranks, cap, wrapper):
    """The all-reduces complete as late as can be, when someone waits for them: a hook call that waits for its own
    first all-reduce, except in the last bucket, shows itself by that all-reduce being complete when it returns."""
    for result in run_ranks(_late, CAPS[cap], wrapper, 3):
        assert all(map(bits_equal, result["gradients"][True], result["gradients"][False]))
        for issued_by, open_at_return in result["observed"]:
            last = len(open_at_return) - 1
            for k, still_open in enumerate(open_at_return):
                own_p = issued_by.index(k)
                if k < last:
                    assert own_p in still_open, f"the hook waited for P of bucket {k} in its own call"
                    # Q of the bucket before, which this call has sent, is waited for at the end of the pass only.
                    assert {number for number, call in enumerate(issued_by) if call == k} <= still_open
            assert not open_at_return[last], "nothing is left when the last bucket's call returns"
        assert (last == 0) == (cap == "one bucket")
