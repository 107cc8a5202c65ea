"""No hook call waits for its own first all-reduce. What is sent: test_every_compressor.py; in which
order: test_backward_pass.py.
"""

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import HookCallbacks
from tests.support.models import (
    EVERY_PARAMETER,
    SHAPES,
    Gradients,
    backward,
    bits_equal,
    random_gradients,
    wrap,
)

CAPS = {
    "one bucket": 25,
    "two matrices each": 2000 / 1024**2,
    "a bucket per parameter": EVERY_PARAMETER,
}


@dataclass
class Late:
    """Context manager: the hook's all-reduces happen when they are waited for, not before.

    Attributes:
        issued_by: for each all-reduce, by which hook call.
        open_at_return: for each hook call, which of all all-reduces so far were not complete when
            it returned.
    """

    issued_by: list[int] = field(default_factory=list)
    open_at_return: list[set[int]] = field(default_factory=list)
    complete: set[int] = field(default_factory=set)

    def __enter__(self) -> "Late":
        late = self
        all_reduce = dist.all_reduce
        run = HookCallbacks.reduce

        class LateWork:
            def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
                self._tensor = tensor
                self._group = group
                self._number = len(late.issued_by)

            def wait(self) -> None:
                # The order of the waits is the same on every rank, so the sums still meet.
                all_reduce(self._tensor, group=self._group)
                late.complete.add(self._number)

        def late_all_reduce(
            tensor: torch.Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool
        ) -> Any:
            assert async_op and op == dist.ReduceOp.SUM
            work = LateWork(tensor, group)
            late.issued_by.append(len(late.open_at_return))
            return work

        def recording_run(self: HookCallbacks, bucket: Bucket) -> Any:
            future = run(self, bucket)
            late.open_at_return.append(set(range(len(late.issued_by))) - late.complete)
            return future

        self._patches = [
            mock.patch("commhooks.comm.collectives.dist.all_reduce", late_all_reduce),
            mock.patch.object(HookCallbacks, "reduce", recording_run),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def _late(cap: float) -> tuple[bool, list[Late]]:
    """Whether late all-reduces change no gradient, and what was seen in each step."""
    config = commhooks.PowerSGD(
        matrix_approximation_rank=2, start_powerSGD_iter=0, min_compression_rate=1
    )
    models = [wrap(SHAPES, cap) for _ in range(2)]
    for model in models:
        commhooks.attach(model, config)
    equal = True
    observed = []
    for step in range(3):
        gradients: Gradients = random_gradients(SHAPES, dist.get_rank(), step)
        expected = backward(models[0], gradients)
        with Late() as late:
            equal &= bits_equal(backward(models[1], gradients), expected)
        observed.append(Late(late.issued_by, late.open_at_return, late.complete))
    return equal, observed


@pytest.mark.parametrize("cap", CAPS)
def test_a_hook_call_returns_before_its_own_p_is_complete(run_ranks, cap):
    """The all-reduces complete as late as can be, when someone waits for them: a hook call that
    waits for its own first all-reduce, except in the last bucket, shows itself by that all-reduce
    being complete when it returns.
    """
    for equal, observed in run_ranks(_late, CAPS[cap]):
        assert equal
        for late in observed:
            last = len(late.open_at_return) - 1
            for k, still_open in enumerate(late.open_at_return):
                own_p = late.issued_by.index(k)
                if k < last:
                    assert own_p in still_open, (
                        f"the hook waited for P of bucket {k} in its own call"
                    )
                    # Q of the bucket before, which this call has sent, is waited for at the end of
                    # the pass only.
                    assert {
                        number for number, call in enumerate(late.issued_by) if call == k
                    } <= still_open
            assert not late.open_at_return[last], (
                "nothing is left when the last bucket's call returns"
            )
        assert (last == 0) == (cap == "one bucket")
