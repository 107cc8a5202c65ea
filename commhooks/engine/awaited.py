"""Run a compressor without learned state like one with: between nodes, where other collectives follow its own."""

from dataclasses import replace
from typing import Any

import torch

from commhooks.compressors.base import Compressor, Exchange, State, StepInfo, Verdict
from commhooks.compressors.cast import Stateless
from commhooks.compressors.plan import ParameterInfo, UnitPlan
from commhooks.engine.at_once import NO_STATE


class Awaited(Stateless[Any]):
    """A compressor without learned state for whose collectives the engine waits. Numbers that are not finite arrive as
    they are. Sparse gradients, which cannot be shared out, are averaged by the engine, among all ranks.

    Args:
        inner: a compressor that is not transactional.
    """

    transactional = True
    judges_averages = False

    def __init__(self, inner: Compressor[Any]) -> None:
        super().__init__(inner.config, inner.wire_dtype)
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        plan = self._inner.plan_one(info)
        return plan if info.sparse else replace(plan, compressed=True, numel_compressed=plan.numel)

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        averaged = yield from self._inner.exchange(flat, None, NO_STATE, step)
        yield Verdict(torch.ones((), dtype=torch.bool, device=flat.device))
        return averaged
