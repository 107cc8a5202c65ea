"""Run the doctor on a small language model that is trained on two processes of this machine:

    torchrun --nproc-per-node 2 -m commhooks doctor examples.doctor_transformer:build

or from Python, with an existing model:

    torchrun --nproc-per-node 2 examples/doctor_transformer.py
"""

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, LENGTH, BATCH = 1024, 128, 32, 8


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


def build():
    """For `commhooks doctor`: returns the model on its device and `batch_fn`, which computes a loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LanguageModel().to(device)

    def batch_fn(model: nn.Module) -> torch.Tensor:
        # Your own: a batch from your data loader, the forward pass, the loss.
        tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), device=device)
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return model, batch_fn


def main() -> None:
    import os

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import commhooks

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    model, batch_fn = build()
    ddp_model = DistributedDataParallel(model)
    report = commhooks.doctor(ddp_model, batch_fn, steps=6)
    if dist.get_rank() == 0:
        print(report)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
