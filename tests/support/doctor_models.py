"""A model and a loss with everything that the doctor could change by accident."""

import random

import torch
from torch import nn

from tests.support.ddp_steps import mlp


class Net(nn.Module):
    """A model with everything that could be changed by accident: weights, buffers, random numbers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.norm = nn.BatchNorm1d(24)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.norm(self.body(x)))


def loss_of(model: nn.Module) -> torch.Tensor:
    """Compute a loss that draws from every global generator."""
    return (model(torch.randn(8, 24)) * random.random()).square().mean()
