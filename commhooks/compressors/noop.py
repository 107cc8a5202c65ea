"""A hook without communication, to measure the cost of the network."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from commhooks.compressors.base import Exchange, State, StepInfo
from commhooks.compressors.cast import Stateless
from commhooks.options import HookConfig


@dataclass(frozen=True, kw_only=True)
class Noop(HookConfig):
    """No communication at all: shows how fast training would be without a network. Never train with it."""

    hook_name: ClassVar[str] = "noop"
    sends: ClassVar[bool] = False


class NoopCompressor(Stateless[Noop]):
    """Every rank keeps its own gradients."""

    Config = Noop
    title = "no communication"

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        if self.wire_dtype is None or flat.is_sparse:
            return flat
        return flat.copy_(flat.to(self.wire_dtype))
        yield  # a generator that sends nothing
