"""How many times fewer bytes travel: the ratios that the PowerSGD paper prints (Vogels et al. 2019, arXiv 1905.13727).

    python benchmarks/paper.py

For the paper's own models, ResNet-18 on CIFAR-10 and a 3-layer LSTM with tied embeddings on WikiText-2 (random weights
and data: bytes do not depend on them), it runs backward passes of DDP and records the tensors of each call of
torch.distributed.all_reduce, all_to_all_single and all_gather; of the last two half, which is what an all-reduce with
as many bytes on the network would take. The ratio is that of the gradients' bytes to the bytes recorded in one
compressed pass. All options are the defaults: with min_compression_rate=2 every matrix of both models is compressed, as
in the paper, and vectors travel as they are.

One number per compressed matrix is ours and not the paper's: a flag that tells the ranks whether anyone had a gradient.
The table shows the recorded ratio, and the ratio less those flags, which is the one to compare.

The rows with a wrapper go beyond the paper: factors and vectors travel as 8-bit or 4-bit integers with scales.

It exits with 1 where a ratio differs from the paper's, where rank 1 with the wrapper int8 sends more than 1/800, or
where `hook.stats()` counted something else than was recorded.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from common import Row, number, one_rank, parse, parser, report, steady
from hooks import wrap
from machine import machine
from models import forward_loss, make, numel

from commhooks.comm.wire import WIRE_BITS

PAPER = {"resnet18_cifar": {1: 243.3, 2: 135.8, 4: 72.1}, "lstm": {1: 309.7, 2: 203.1, 4: 120.3}}
BATCH_SIZE = {"resnet18_cifar": 2, "lstm": 8}
START, STEPS = 2, 4
AT_LEAST = {(1, "int8"): 800.0}


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Record the bytes of the tensors passed to collectives from Python, in order."""
    sent: list[int] = []

    def watched(name: str, share: int) -> Any:
        original = getattr(dist, name)

        def collective(first: Any, *args: Any, **kwargs: Any) -> Any:
            whole = sum(each.nbytes for each in (first if isinstance(first, list) else [first]))
            sent.append(-(-whole // share))
            return original(first, *args, **kwargs)

        return mock.patch.object(dist, name, collective)

    with watched("all_reduce", 1), watched("all_to_all_single", 2), watched("all_gather", 2):
        yield sent


def measure(name: str, rank: int, wrapper: str | None = None) -> Row:
    model, task = make(name)
    before = 4 * numel(model)
    # Several buckets, with DDP's default sizes.
    ddp_model, hook = wrap(model, f"powersgd-{rank}", start=START, wrapper=wrapper)
    assert hook is not None
    for _ in range(STEPS):
        with recorded() as sent:
            forward_loss(ddp_model, task, task.batch(BATCH_SIZE[name])).backward()
    stats = hook.stats()
    flags = hook.plan().flag_bytes
    expected = PAPER[name][rank] if wrapper is None else None
    ratio, less_flags = before / sum(sent), before / (sum(sent) - flags)
    least = AT_LEAST.get((rank, wrapper or ""), 0.0)
    return {
        "section": name,
        "model": name,
        "rank": rank,
        "wrapper": wrapper or "",
        "gradient_bytes": before,
        "recorded_bytes": sum(sent),
        "collectives": len(sent),
        "flag_bytes": flags,
        "recorded_ratio": ratio,
        "ratio_less_flags": less_flags,
        "paper_ratio": expected,
        "at_least": least or None,
        "as_expected": ratio >= least if expected is None else round(less_flags, 1) == expected,
        "stats_agree": stats["bytes_sent_last_pass"] == sum(sent) and stats["compressed_steps"] == STEPS - START,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", choices=[1, 2, 4], default=[1, 2, 4], help="of the factors")
    args = parse(arguments, ranks=[1])
    at = machine()
    with steady(), one_rank():
        rows = [measure(name, rank, wrapper) for name in PAPER for rank in args.ranks for wrapper in (None, *WIRE_BITS)]
    columns = {
        "model": number("model"),
        "rank": number("rank"),
        "wrapper": lambda row: row["wrapper"],
        "gradients, bytes": number("gradient_bytes", "{:,}"),
        "recorded, bytes": number("recorded_bytes", "{:,}"),
        "collectives": number("collectives"),
        "recorded ratio": number("recorded_ratio", "{:.2f}x"),
        "less the flags": number("ratio_less_flags", "{:.2f}x"),
        "paper": number("paper_ratio", "{:.1f}x"),
        "at least": number("at_least", "{:.0f}x"),
        "as expected": lambda row: "yes" if row["as_expected"] else "NO",
        "stats() agree": lambda row: "yes" if row["stats_agree"] else "NO",
    }
    report("paper", "paper: bytes per step, without a hook against recorded ones", args, at, rows, columns)
    sys.exit(0 if all(row["as_expected"] and row["stats_agree"] for row in rows) else 1)


if __name__ == "__main__":
    main()
