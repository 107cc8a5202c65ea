"""One exchange of weights, in the order of its methods, with a stand-in for what is sent. With real
ranks: test_outer_steps.py and test_mishaps.py.
"""

from typing import Any

import pytest
import torch

from commhooks.comm.counters import Clocks
from commhooks.local_steps.exchange import OuterExchange
from commhooks.local_steps.flat_weights import layouts
from commhooks.local_steps.outer_step import OuterStepWorkspace

ANCHOR = 7.0


class _Running:
    """Stands for a `RunningExchange` whose outer step moves the anchor to 7."""

    has_send_left = False

    def __init__(self, flat: torch.Tensor, log: list[Any], error: Exception | None) -> None:
        self.flat = self.result = flat
        self.finite = torch.tensor(True)
        self._log, self._error = log, error

    def advance(self, verdict: object = None) -> None:
        self._log.append(verdict)
        if self._error is not None:
            raise self._error
        if verdict is not None:
            self.flat.fill_(ANCHOR)

    def finish(self) -> None:
        pass


def _exchange(
    weights: torch.Tensor, error: Exception | None = None
) -> tuple[OuterExchange, list[Any]]:
    log: list[Any] = []
    buffers = [OuterStepWorkspace(layout, [], None) for layout in layouts({"weight": weights})]
    return OuterExchange(buffers, lambda work, flat: _Running(flat, log, error), Clocks()), log  # type: ignore[arg-type,return-value]


def test_nothing_is_written_before_the_commit() -> None:
    weights = torch.ones(4)
    exchange, log = _exchange(weights)
    exchange.begin()
    assert exchange.finite() and exchange.finite() and log == [None]
    assert weights.eq(1).all()
    exchange.commit(True)
    assert weights.eq(1).all() and log == [None, True]
    exchange.write_weights()
    assert weights.eq(ANCHOR).all()


@pytest.mark.parametrize(("keep_training", "expected"), [(True, ANCHOR + 0.5), (False, ANCHOR)])
def test_the_training_goes_on_behind_an_exchange(keep_training: bool, expected: float) -> None:
    weights = torch.ones(4)
    exchange, _ = _exchange(weights)
    exchange.begin_behind(lambda: None)
    weights.add_(0.5)
    assert exchange.finite()
    exchange.commit(True)
    exchange.write_weights(keep_training=keep_training)
    assert weights.eq(expected).all()


def test_an_error_behind_the_training_is_raised_when_the_exchange_is_finished() -> None:
    exchange, log = _exchange(torch.ones(4), RuntimeError("the network is gone"))
    exchange.begin_behind(lambda: None)
    exchange.wait(None)
    with pytest.raises(RuntimeError, match="the network is gone"):
        exchange.finite()
    assert log == [None], "it is not tried again"


def test_a_fragment_without_weights_here_is_finite() -> None:
    exchange = OuterExchange([], lambda work, flat: pytest.fail("there is no buffer"), Clocks())
    exchange.begin()
    assert exchange.finite()
    exchange.commit(True)
    exchange.write_weights()
