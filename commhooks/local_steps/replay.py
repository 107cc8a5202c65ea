"""Take an outer step that others have taken, from what they have received: its generator runs
again, with the recorded mean in place of an exchange, and writes the same bits.
"""

import io
from dataclasses import dataclass, field
from typing import Any

import torch

from commhooks.comm.collectives import Send
from commhooks.compressors.base import Exchange, Verdict


@dataclass
class Record:
    """An outer step.

    Attributes:
        received: for each buffer the result of its last collective: the mean, as it was sent.
        replicas: how many have exchanged.
        good: whether it was committed, and not discarded.
    """

    received: list[torch.Tensor] = field(default_factory=list)
    replicas: int = 1
    good: bool = True

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        torch.save(vars(self), file)
        return file.getvalue()

    @classmethod
    def read(cls, content: bytes) -> "Record":
        return cls(**torch.load(io.BytesIO(content), weights_only=True))


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
