"""The local residual stays bounded, where torch's (`delta - P Q^T` with the averaged Q) grows like a random walk.

The difference is the part of a rank's residual in which it differs from the mean of the ranks: what lies in the span
of P is taken out of it at each step by the local projection and never by torch's form.
"""

import torch

from commhooks.compressors.powersgd.reference import OracleMatrix
from tests.support.simulation import SimulatedPowerSGD

SIDE, RANK, WORLD_SIZE = 32, 2, 4
EARLY, LATE = 60, 900


def _gradients(generator: torch.Generator) -> list[torch.Tensor]:
    """A part that all ranks have and noise of each rank's own, of full rank both."""
    common = torch.randn(SIDE, SIDE, generator=generator)
    return [common + torch.randn(SIDE, SIDE, generator=generator) for _ in range(WORLD_SIZE)]


def _norm(residuals: list[torch.Tensor]) -> float:
    return float(torch.stack([r.flatten().double() for r in residuals]).norm())


def test_the_norm_of_the_residual_stays_where_torchs_grows():
    generator = torch.Generator().manual_seed(0)
    ranks = SimulatedPowerSGD(WORLD_SIZE, SIDE, SIDE, RANK)
    torchs_form = OracleMatrix(ranks.start_q, WORLD_SIZE, torch_residual=True)
    ours, torchs = {}, {}
    for step in range(1, LATE + 1):
        gradients = _gradients(generator)
        ranks.step(gradients)
        torchs_form.step(gradients)
        if step in (EARLY, LATE):
            ours[step] = _norm([memory["residual"]["w"] for memory in ranks.states])
            assert torchs_form.residuals is not None
            torchs[step] = _norm(torchs_form.residuals)
    assert ours[LATE] <= 1.1 * ours[EARLY]
    assert torchs[LATE] >= 3 * torchs[EARLY]
