"""PowerSGD with quantised factors, plainly: as in `powersgd/reference.py`, each mean by `quantized_oracle.py`."""

import torch

from commhooks.compressors.powersgd.reference import gram_schmidt
from tests.support.quantized_oracle import OracleRanks

BLOCK = 64


def quantised_mean(name: str, local: list[torch.Tensor], levels: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The mean of `local`, one matrix per rank, as it arrives, and what each rank contributed to it. Factors travel
    transposed."""
    shape, world_size = local[0].T.shape, len(local)
    ranks = OracleRanks(world_size, levels, BLOCK, {name: shape.numel()})
    arrived = ranks.step([{name: each.T.flatten().tolist()} for each in local])[name]
    lost = [torch.tensor(each[name], dtype=torch.float64).view(shape).T for each in ranks.residuals]
    mean = torch.tensor(arrived, dtype=torch.float64).view(shape).T
    return mean, [each - part for each, part in zip(local, lost, strict=True)]


class QuantisedOracleMatrix:
    """One parameter on `world_size` simulated ranks. `q`: the Q to start from, m x r."""

    def __init__(self, name: str, q: torch.Tensor, world_size: int, levels: int) -> None:
        self.name = name
        self.q = q.double()
        self.levels = levels
        self.residuals = [torch.zeros(())] * world_size

    def step(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """One n x m matrix per rank in, the gradient that every rank continues with out."""
        if not any(bool(gradient.any()) for gradient in gradients):
            return torch.zeros_like(gradients[0])
        deltas = [gradient + residual for gradient, residual in zip(gradients, self.residuals, strict=True)]
        unit = self.q / self.q.norm(dim=0)
        arrived, _ = quantised_mean(self.name, [delta @ unit for delta in deltas], self.levels)
        p = gram_schmidt(arrived)
        self.q, contributed = quantised_mean(self.name, [delta.T @ p for delta in deltas], self.levels)
        self.residuals = [delta - p @ q.T for delta, q in zip(deltas, contributed, strict=True)]
        return p @ self.q.T
