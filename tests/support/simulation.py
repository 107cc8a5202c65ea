"""Any number of ranks in one process, which compute with the preferred kernel of this machine."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from commhooks import PowerSGD, testing
from commhooks.compressors.base import Compressor
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.powersgd.exchange import draw
from commhooks.engine.state import LearnedState
from tests.support.kernels import use_own_kernel


class SimulatedRanks(testing.SimulatedRanks):
    def __init__(
        self,
        new_compressor: Callable[[], Compressor[Any]],
        world_size: int,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        first = next(iter(parameters.values()))
        dtypes = {parameter.dtype for parameter in parameters.values()}

        def with_kernel() -> Compressor[Any]:
            compressor = new_compressor()
            use_own_kernel(compressor, first.device, dtypes)
            return compressor

        super().__init__(with_kernel, world_size, parameters)


class SimulatedPowerSGD:
    """`world_size` ranks that compress one n x m matrix, each with a learned state in `states`."""

    def __init__(self, world_size: int, n: int, m: int, rank: int) -> None:
        config = PowerSGD(
            matrix_approximation_rank=rank, start_powerSGD_iter=0, min_compression_rate=1e-3
        )
        parameters = {"w": torch.empty(n, m)}
        self._ranks = SimulatedRanks(lambda: PowerSGDCompressor(config), world_size, parameters)
        self._rank = rank
        self._m = m
        self.states: list[LearnedState] = self._ranks.states

    @property
    def start_q(self) -> torch.Tensor:
        """The initial Q, m x r."""
        return draw(0, "w", "Q", self._rank, self._m, torch.float32).T

    def step(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run one step on each rank's n x m gradient, and return what each continues with."""
        buckets = [gradient.flatten().clone() for gradient in gradients]
        assert self._ranks.step(buckets)
        return [
            bucket.view_as(gradient) for bucket, gradient in zip(buckets, gradients, strict=True)
        ]
