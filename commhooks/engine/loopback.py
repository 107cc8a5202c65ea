"""The exchange of a compressor without other ranks: every collective returns its own input.

Used to time a codec on this machine. Nothing is sent, and no process group is needed.
"""

from collections.abc import Sequence
from typing import Any

import torch

from commhooks.comm.collective import Send
from commhooks.compressors.base import Compressor, Exchange, StepInfo, Verdict
from commhooks.compressors.plan import ParameterInfo
from commhooks.engine.kernel_choice import use_own_kernel
from commhooks.engine.state import LearnedState
from commhooks.gradients import precision
from commhooks.gradients.layout import read_layout


class Loopback:
    """Buckets of random gradients, with their own learned state. Computes with the preferred kernel of this machine.

    Args:
        buckets: the parameters of each bucket; only their shapes, strides and dtypes are read.
        device: the device on which to compute.

    Attributes:
        choice: the kernel, and why not a faster one.
    """

    def __init__(
        self, compressor: Compressor[Any], buckets: Sequence[Sequence[torch.Tensor]], device: torch.device
    ) -> None:
        self._compressor = compressor
        self.choice = use_own_kernel(compressor, device, {p.dtype for parameters in buckets for p in parameters})
        self._state = LearnedState.of(compressor.state_fields)
        self._buckets: list[tuple[torch.Tensor, Any]] = []
        for number, parameters in enumerate(buckets):
            names = [f"{number}.{i}" for i in range(len(parameters))]
            numel = sum(p.numel() for p in parameters)
            flat = torch.empty(numel, dtype=parameters[0].dtype, device=device)
            layout = read_layout(flat, parameters, names)
            plans = compressor.plan([ParameterInfo(n, p) for n, p in zip(names, parameters, strict=True)])
            self._buckets.append((flat, compressor.workspace(layout, plans)))

    def fill(self) -> None:
        """Fill the buckets with new random gradients."""
        for flat, _ in self._buckets:
            flat.normal_()

    def step(self) -> None:
        """Run one step over all buckets, one round of all buckets after the other."""
        info = StepInfo(self._state.step, world_size=1)
        device = self._buckets[0][0].device
        with precision.full_precision(device):
            run_alone(
                [self._compressor.exchange(flat, work, self._state, info) for flat, work in self._buckets], device
            )
        self._state.step += 1


def run_alone(exchanges: Sequence[Exchange], device: torch.device) -> None:
    """Run the exchanges of several buckets on `device` to their ends, one round of all after the other."""
    answers: list[Any] = [None] * len(exchanges)
    while exchanges:
        going_on, next_answers = [], []
        for exchange, answer in zip(exchanges, answers, strict=True):
            yielded = _resumed(exchange, answer)
            if yielded is not None:
                going_on.append(exchange)
                next_answers.append(_answer(yielded, device))
        exchanges, answers = going_on, next_answers


def _resumed(exchange: Exchange, answer: Any) -> Send | Verdict | None:
    try:
        return exchange.send(answer)
    except StopIteration:
        return None


def _answer(yielded: Send | Verdict, device: torch.device) -> Any:
    if isinstance(yielded, Verdict):
        return True if precision.is_host_readable(device) else yielded.finite
    if yielded.meanwhile is not None:
        yielded.meanwhile()
    return yielded.tensor[None] if yielded.op == "gather" else yielded.tensor
