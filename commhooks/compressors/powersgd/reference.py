"""Implement PowerSGD in readable form: simulated ranks, one matrix at a time, float64.

Source: Vogels, Karimireddy, Jaggi: PowerSGD (NeurIPS 2019), Algorithm 1, with the residual of each
rank's own projection. Tests compare `exchange.py` with it, so it shares no code with the package
and is not optimised.
"""

import torch


class ReferenceMatrix:
    """Simulates one parameter on `world_size` ranks.

    `q`: the initial Q, m x r. `torch_residual`: compute the residual as torch's hook does,
    `delta - P Q^T` with the averaged Q.
    """

    def __init__(
        self,
        q: torch.Tensor,
        world_size: int,
        *,
        error_feedback: bool = True,
        torch_residual: bool = False,
    ) -> None:
        self.q = q.double()
        self.world_size = world_size
        self.error_feedback = error_feedback
        self.torch_residual = torch_residual
        self.residuals: list[torch.Tensor] | None = None

    def step(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        deltas = [gradient.double() for gradient in gradients]
        if self.error_feedback and self.residuals is not None:
            deltas = [
                delta + residual for delta, residual in zip(deltas, self.residuals, strict=True)
            ]
        if all(bool((gradient == 0).all()) for gradient in gradients):
            return torch.zeros_like(deltas[0])  # no rank has a gradient: keep the residuals
        p = gram_schmidt(torch.stack([delta @ self.q for delta in deltas]).sum(0))
        local_qs = [delta.T @ p for delta in deltas]
        q = torch.stack(local_qs).mean(0)
        qs = [q] * self.world_size if self.torch_residual else local_qs
        self.residuals = [delta - p @ q.T for delta, q in zip(deltas, qs, strict=True)]
        self.q = q
        return p @ q.T


def plain_mean(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.double() for gradient in gradients]).mean(0)


def gram_schmidt(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the columns (n x r, independent).

    Each column is orthogonalised twice, because once loses digits.
    """
    columns: list[torch.Tensor] = []
    for column in matrix.T:
        for _ in range(2):
            for earlier in columns:
                column = column - (earlier @ column) * earlier
            column = column / column.norm()
        columns.append(column)
    return torch.stack(columns, dim=1)
