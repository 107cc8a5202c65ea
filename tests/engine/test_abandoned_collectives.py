"""After an exception in a hook nothing writes into a gradient bucket, or a warning is logged."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commhooks import PowerSGD
from commhooks.comm import collectives
from commhooks.comm.collectives import Pending, resolve_group
from commhooks.comm.counters import Counters
from commhooks.compressors import base as base_module
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.engine import session as session_module
from commhooks.engine.consensus import Binding
from commhooks.engine.session import Session
from commhooks.engine.state import LearnedState
from commhooks.gradients.layout import Bucket
from commhooks.gradients.names import ModelNames
from tests.support.ddp_steps import log_lines, process_group_of_one

pytestmark = pytest.mark.timeout(60)


class Training:
    """Two buckets of a model, which are averaged in place: compression has not begun."""

    def __init__(self) -> None:
        self.parameters = {name: torch.nn.Parameter(torch.zeros(6, 4)) for name in "ab"}
        self.gradients = [torch.full((24,), 2.0 + dist.get_rank()) for _ in "ab"]
        compressor = PowerSGDCompressor(PowerSGD(start_powerSGD_iter=9))
        names = ModelNames(self.parameters.items())
        state = LearnedState.of(compressor.state_fields)
        self.session = Session(compressor, Binding(names, resolve_group), state, Counters())

    def run(self, index: int) -> torch.futures.Future[torch.Tensor]:
        parameter = list(self.parameters.values())[index]
        return self.session.run(
            Bucket(self.gradients[index], [parameter], index, is_last=index == 1)
        )

    def fail(self) -> None:
        """The second bucket raises an exception, while the first one is on its way."""
        with (
            mock.patch.object(
                base_module, "average", side_effect=ValueError("of the second bucket")
            ),
            pytest.raises(ValueError, match="of the second bucket"),
        ):
            self.run(1)


class Never:
    """A future of a collective that never ends."""

    def done(self) -> bool:
        return False


def _rank_1_is_late() -> tuple[float, float]:
    """The first bucket as rank 0 has it after the exception, and a while later."""
    training = Training()
    training.run(0).done(), training.run(1).wait()
    training.gradients[0].fill_(2.0 + dist.get_rank())
    if dist.get_rank() == 1:
        time.sleep(1)
    training.run(0)
    training.fail()
    at_once = training.gradients[0].mean().item()
    time.sleep(1)
    return at_once, training.gradients[0].mean().item()


def test_the_host_waits_for_what_writes_into_a_bucket(run_ranks: Any) -> None:
    assert run_ranks(_rank_1_is_late) == [(2.5, 2.5)] * 2


def test_the_wait_is_bounded_and_a_warning_says_that_it_ended() -> None:
    with process_group_of_one(), log_lines("commhooks") as lines:
        training = Training()
        training.run(0)
        started = time.monotonic()
        with (
            mock.patch.object(Pending, "future", Never),
            mock.patch.object(session_module, "ABANDONED_LIMIT_S", 0.3),
        ):
            training.fail()
        assert 0.3 <= time.monotonic() - started < 5
    assert any(
        "1 all-reduces of an abandoned backward pass have not ended within 0.3 s" in line
        for line in lines
    )


def test_what_does_not_write_into_a_bucket_is_not_waited_for() -> None:
    with process_group_of_one():
        bucket, other = torch.ones(4), torch.ones(4)
        group = resolve_group(None)
        for sent, writes in ((bucket, True), (bucket[:2], True), (other, False)):
            pending = collectives.start(collectives.Send(sent), group, None)
            pending.wait()
            assert pending.writes(bucket) == writes
