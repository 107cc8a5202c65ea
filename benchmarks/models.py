"""The models of the benchmarks, defined here so that nothing has to be downloaded. All have random
weights.

`make` returns a model and its task, which makes batches and computes the loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WORDS = 4096


@dataclass(frozen=True)
class Task:
    """A model with functions that make a batch and compute the loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    """size -> inputs, targets"""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# ---- transformers --------------------------------------------------------------------------------


def transformer_blocks(width: int = 512, blocks: int = 8) -> nn.Module:
    """Transformer blocks. 8 blocks of width 512 have 101 MB of gradients and 25.2 M parameters in
    matrices.
    """
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)


class Transformer(nn.Module):
    """Token embedding, blocks, output layer: 29.4 M parameters with the defaults."""

    def __init__(self, width: int = 512, blocks: int = 8, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = transformer_blocks(width, blocks)
        self.output = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.blocks(self.embedding(tokens)))


class Attention(nn.Module):
    """Causal self-attention, with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.inputs(x).chunk(3, dim=-1)
        ]
        mixed = functional.scaled_dot_product_attention(*apart, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class GPT2(nn.Module):
    """The shapes of GPT-2 small (Radford et al. 2019): 124,439,808 parameters, embedding and output
    layer tied.
    """

    def __init__(
        self,
        words: int = 50_257,
        context: int = 1024,
        width: int = 768,
        blocks: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, words, bias=False)
        self.output.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.output(self.norm(self.blocks(x)))


# ---- a residual network --------------------------------------------------------------------------


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    # Without running statistics: DDP would broadcast these buffers before each forward pass.
    return [convolution, nn.BatchNorm2d(outputs, track_running_stats=False)]


class Bottleneck(nn.Module):
    """Convolutions 1 x 1, 3 x 3 and 1 x 1, the last one with four times as many outputs."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        layers = [*_conv(inputs, width, 1), nn.ReLU(), *_conv(width, width, 3, stride), nn.ReLU()]
        self.body = nn.Sequential(*layers, *_conv(width, 4 * width, 1))
        same = stride == 1 and inputs == 4 * width
        self.shortcut: nn.Module = (
            nn.Identity() if same else nn.Sequential(*_conv(inputs, 4 * width, 1, stride))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """The shapes of He et al. 2015."""
    layers: list[nn.Module] = [*_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        width = 64 * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride=2 if stage > 0 and block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


# ---- as tasks ------------------------------------------------------------------------------------


def _images(side: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda size: (torch.randn(size, 3, side, side), torch.randint(0, 1000, (size,)))


def _tokens(words: int, length: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that makes `size` tokens in sequences of `length`."""
    return lambda size: (
        torch.randint(0, words, (size // length, length)),
        torch.randint(0, words, (size // length, length)),
    )


def _next_token(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _vectors(width: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda size: (torch.randn(size // 16, 16, width), torch.randn(size // 16, 16, width))


def _project(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute a linear loss. The mean square would be constant and have no gradient, because of the
    last layer norm.
    """
    return (output * target).mean()


TASKS: dict[str, Task] = {
    "blocks": Task(transformer_blocks, _vectors(512), _project),
    "transformer": Task(Transformer, _tokens(WORDS, 16), _next_token),
    # 2.9 M parameters
    "small_transformer": Task(lambda: Transformer(256, 3, 1024), _tokens(1024, 16), _next_token),
    "resnet50": Task(resnet50, _images(64), functional.cross_entropy),
    "resnet50_224": Task(resnet50, _images(224), functional.cross_entropy),
    "gpt2": Task(GPT2, _tokens(50_257, 1024), _next_token),
    # Small models of the same kinds, for --quick.
    "tiny": Task(lambda: transformer_blocks(64, 2), _vectors(64), _project),
    "tiny_gpt2": Task(lambda: GPT2(512, 32, 64, 2, 4), _tokens(512, 32), _next_token),
    "tiny_transformer": Task(lambda: Transformer(64, 2, 512), _tokens(512, 16), _next_token),
}


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def make(name: str) -> tuple[nn.Module, Task]:
    """Return the model with this name and its task. The weights are equal in all processes."""
    torch.manual_seed(0)
    task = TASKS[name]
    return task.make(), task


def forward_loss(model: Any, task: Task, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return task.loss(model(batch[0]), batch[1])
