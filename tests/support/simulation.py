"""PowerSGD of one matrix on any number of ranks in one process."""

import torch

from commhooks import PowerSGD
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.engine.simulation import SimulatedRanks
from commhooks.engine.state import LearnedState


class SimulatedPowerSGD:
    """`world_size` ranks that compress one n x m matrix, each with learned state of its own.

    Attributes:
        states: per rank, what the package remembers.
    """

    def __init__(self, world_size: int, n: int, m: int, rank: int) -> None:
        config = PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=0, min_compression_rate=1e-3)
        parameters = {"w": torch.empty(n, m)}
        self._ranks = SimulatedRanks(lambda: PowerSGDCompressor(config), world_size, parameters)
        self._rank, self._m = rank, m
        self.states: list[LearnedState] = self._ranks.states

    @property
    def start_q(self) -> torch.Tensor:
        """The first Q, m x r."""
        return codec.draw(0, "w", "Q", self._rank, self._m, torch.float32).T

    def step(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """One n x m gradient per rank in, the gradient that each rank continues with out."""
        buckets = [gradient.flatten().clone() for gradient in gradients]
        assert self._ranks.step(buckets)
        return [bucket.view_as(gradient) for bucket, gradient in zip(buckets, gradients, strict=True)]
