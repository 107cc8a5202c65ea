"""How many times fewer bytes travel: the ratios that the PowerSGD paper prints (Vogels et al. 2019, arXiv 1905.13727).

    python benchmarks/paper.py

For the paper's own models, ResNet-18 on CIFAR-10 and a 3-layer LSTM with tied embeddings on WikiText-2 (random weights
and data: bytes do not depend on them), it runs backward passes of DDP and records the tensors of each call of
torch.distributed.all_reduce. The ratio is that of the gradients' bytes to the bytes recorded in one
compressed pass. All options are the defaults: with min_compression_rate=2 every matrix of both models is compressed, as
in the paper, and vectors travel as they are.

One number per compressed matrix is not in the paper: a flag for whether any rank had a gradient. The table shows the
recorded ratio, and the ratio without those flags, which is the one to compare.

It exits with 1 if a ratio differs from the paper's, or if `hook.stats()` differs from the recorded bytes.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import Row, number, one_rank, parse, parser, report, steady
from hooks import wrap
from machine import machine
from models import forward_loss, make, numel

PAPER = {"resnet18_cifar": {1: 243.3, 2: 135.8, 4: 72.1}, "lstm": {1: 309.7, 2: 203.1, 4: 120.3}}
BATCH_SIZE = {"resnet18_cifar": 2, "lstm": 8}
START, STEPS = 1, 2


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Context manager: record the bytes of the tensors that are all-reduced from Python, in order."""
    sent: list[int] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield sent


def measure(name: str, rank: int) -> Row:
    model, task = make(name)
    before = 4 * numel(model)
    # Several buckets, with DDP's default sizes.
    ddp_model, hook = wrap(model, f"powersgd-{rank}", start=START)
    assert hook is not None
    for _ in range(STEPS):
        with recorded() as sent:
            forward_loss(ddp_model, task, task.batch(BATCH_SIZE[name])).backward()
    stats = hook.stats()
    flags = hook.plan().flag_bytes
    expected = PAPER[name][rank]
    ratio, less_flags = before / sum(sent), before / (sum(sent) - flags)
    return {
        "section": name,
        "model": name,
        "rank": rank,
        "gradient_bytes": before,
        "recorded_bytes": sum(sent),
        "collectives": len(sent),
        "flag_bytes": flags,
        "recorded_ratio": ratio,
        "ratio_less_flags": less_flags,
        "paper_ratio": expected,
        "as_expected": round(less_flags, 1) == expected,
        "stats_agree": stats["bytes_sent_last_pass"] == sum(sent) and stats["compressed_steps"] == STEPS - START,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", choices=[1, 2, 4], default=[1, 2, 4], help="of the factors")
    args = parse(arguments, ranks=[1])
    at = machine()
    with steady(), one_rank():
        rows = [measure(name, rank) for name in PAPER for rank in args.ranks]
    columns = {
        "model": number("model"),
        "rank": number("rank"),
        "gradients, bytes": number("gradient_bytes", "{:,}"),
        "recorded, bytes": number("recorded_bytes", "{:,}"),
        "collectives": number("collectives"),
        "recorded ratio": number("recorded_ratio", "{:.2f}x"),
        "less the flags": number("ratio_less_flags", "{:.2f}x"),
        "paper": number("paper_ratio", "{:.1f}x"),
        "as expected": lambda row: "yes" if row["as_expected"] else "NO",
        "stats() agree": lambda row: "yes" if row["stats_agree"] else "NO",
    }
    report("paper", "paper: bytes per step, without a hook against recorded ones", args, at, rows, columns)
    sys.exit(0 if all(row["as_expected"] and row["stats_agree"] for row in rows) else 1)


if __name__ == "__main__":
    main()
