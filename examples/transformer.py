"""A small language model, whose plan can be shown before training:

commhooks plan examples.transformer:LanguageModel --exclude "*embed*"
"""

import torch
from torch import nn

WORDS, WIDTH = 1024, 128


class LanguageModel(nn.Module):
    """Token embedding, two transformer blocks, output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.blocks(self.embedding(tokens)))
