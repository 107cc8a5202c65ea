"""Take an outer step that others have taken, from what they have received: its generator runs
again, with the recorded mean in place of an exchange, and writes the same bits.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from commhooks.comm.collectives import Send
from commhooks.compressors.base import Compressor, Exchange, StepInfo, Verdict
from commhooks.engine.backward_pass import RunningExchange
from commhooks.engine.state import LearnedState
from commhooks.engine.task import ExchangeTask
from commhooks.local_steps.outer_step import OuterStepWorkspace


@dataclass
class Record:
    """An outer step.

    Attributes:
        received: for each buffer the result of its last collective: the mean, as it was sent.
        replicas: how many have exchanged.
        fragment: the number of the fragment; None: all weights.
        good: whether it was committed, and not discarded.
    """

    received: list[torch.Tensor] = field(default_factory=list)
    replicas: int = 1
    good: bool = True
    fragment: int | None = 0

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        torch.save(vars(self), file)
        return file.getvalue()

    @classmethod
    def read(cls, content: bytes) -> "Record":
        return cls(**torch.load(io.BytesIO(content), weights_only=True))


class Recorder:
    """Records an outer step. `good`: its verdict, which the commit sets."""

    def __init__(self) -> None:
        self.good = True
        self._received: list[list[torch.Tensor]] = []

    def recorded(self, exchange: Exchange) -> Exchange:
        """Return the exchange of the next buffer, which keeps what it receives."""
        received: list[torch.Tensor] = []
        self._received.append(received)
        return recorded(exchange, received)

    def record(self, replicas: int, fragment: int | None) -> Record:
        received = [part for parts in self._received for part in parts]
        return Record(received, replicas, self.good, fragment)


class Replay:
    """Starts the exchange of each buffer of a recorded outer step, for `OuterExchange`."""

    def __init__(
        self,
        compressor: Compressor[Any],
        state: LearnedState,
        buffers: Sequence[OuterStepWorkspace],
        record: Record,
    ) -> None:
        self._compressor = compressor
        self._state = state
        self._record = record
        self._received = {
            id(work): part for work, part in zip(buffers, record.received, strict=True)
        }

    def __call__(self, work: OuterStepWorkspace, flat: torch.Tensor) -> RunningExchange:
        replicas = self._record.replicas
        info = StepInfo(self._state.step, replicas, rank=0)
        exchange = self._compressor.exchange(flat, work, self._state, info)
        exchange = replayed(exchange, self._received[id(work)], replicas)
        return RunningExchange(
            ExchangeTask(exchange, flat, self._compressor.name), flat, lambda send: None
        )


def recorded(exchange: Exchange, received: list[torch.Tensor]) -> Exchange:
    """Run an exchange, and append a copy of the result of its last collective to `received`."""
    step = next(exchange)
    try:
        while True:
            answer = yield step
            if isinstance(step, Send) and step.last:
                received.append(answer.detach().to("cpu", copy=True))
            step = exchange.send(answer)
    except StopIteration as end:
        return end.value


def replayed(exchange: Exchange, received: torch.Tensor, replicas: int) -> Exchange:
    """Run an exchange without others: its last collective gets `received`, the ones before get
    zeros.
    """
    step = next(exchange)
    try:
        while True:
            if isinstance(step, Verdict):
                answer: Any = yield step
            else:
                assert isinstance(step, Send)
                answer = _answer(step, received, replicas)
            step = exchange.send(answer)
    except StopIteration as end:
        return end.value


def _answer(send: Send, received: torch.Tensor, replicas: int) -> torch.Tensor:
    if send.meanwhile is not None:
        send.meanwhile()
    if send.last and send.reduces:
        return send.tensor.copy_(received)
    if send.last:
        answer = received.to(send.tensor.device)
        return answer if send.into is None else send.into.copy_(answer)
    if send.reduces:
        return send.tensor
    if send.splits is not None:
        size: tuple[int, ...] = (sum(send.splits[1]),)
    else:
        size = tuple(send.tensor.shape)
        size = (replicas, *size) if send.op == "gather" else size
    if send.into is not None:
        return send.into.zero_()
    return torch.zeros(size, dtype=send.tensor.dtype, device=send.tensor.device)
