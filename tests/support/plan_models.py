"""Models for `commhooks plan`, and objects that are no models."""

import torch
from torch import nn

from tests.support.ddp_steps import mlp


class Net(nn.Module):
    """A model with tied, frozen, sparse, complex and 16-bit parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.sparse = nn.Embedding(40, 16, sparse=True)
        self.conv = nn.Conv2d(8, 16, 3)
        self.half = nn.Linear(32, 32, dtype=torch.bfloat16)
        self.imaginary = nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64))
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(5, dtype=torch.int64))


def build_mlp() -> nn.Module:
    return mlp()


def needs_an_argument(width: int) -> nn.Module:
    return nn.Linear(width, width)


def no_model() -> int:
    return 3


not_callable = 3
