"""Which share of a gradient's energy do the largest singular values keep, as training goes on?

    python benchmarks/energies.py [--steps 1500] [--seeds 0] [--at 10 150 250 600 1500]

The language model of language_model.py, trained with the whole batch, which is what all-reduce of several ranks gives.
The energy of a gradient is the sum of its squares. Of each matrix, at these steps: the share of it in the r largest
squared singular values (torch.linalg.svdvals, so nothing is estimated). A rank-r approximation cannot keep more.
The table has the median of the layers and, in brackets, the layer that keeps least; means over the seeds.
"""

import statistics

import torch
from common import Row, number, parse, parser, report
from language_model import BATCH, ByteTransformer, loss_of, recipe, text, windows
from machine import machine
from torch import nn

RANKS = (1, 2, 4, 8, 16)
STEPS = 1500


def shares(gradient: torch.Tensor) -> list[float]:
    """Of a matrix, for each of `RANKS`."""
    squares = torch.linalg.svdvals(gradient.double()).square()
    kept = squares.cumsum(0) / squares.sum()
    return [kept[min(rank, len(kept)) - 1].item() for rank in RANKS]


def watch(seed: int, steps: int, at: list[int]) -> dict[int, list[list[float]]]:
    """Train; step -> per layer, then per rank, the share. As language_model.py trains `steps` steps."""
    torch.manual_seed(seed)
    source, _ = text()
    model = ByteTransformer()
    optimizer, schedule = recipe(model, steps)
    batches = torch.Generator().manual_seed(seed)
    found = {}
    for step in range(1, max(at) + 1):
        model.zero_grad()
        loss_of(model, windows(source, BATCH, batches)).backward()
        if step in at:
            matrices = [p.grad for p in model.parameters() if p.grad is not None and p.dim() == 2]
            found[step] = [shares(each) for each in matrices]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=STEPS, help="of the schedule")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--at", type=int, nargs="+", default=[10, 150, 250, 600, STEPS], help="steps to look at")
    args = parse(arguments, steps=4, at=[2, 3])
    if not all(1 <= step <= args.steps for step in args.at):
        raise SystemExit(f"--at: steps from 1 to --steps, {args.steps}")
    at = machine()
    runs = [watch(seed, args.steps, args.at) for seed in args.seeds]
    rows: list[Row] = []
    for step in sorted(set(args.at)):
        row: Row = {"step": step}
        for place, rank in enumerate(RANKS):
            layers = [[each[place] for each in run[step]] for run in runs]
            row[f"median_{rank}"] = statistics.fmean(map(statistics.median, layers))
            row[f"lowest_{rank}"] = statistics.fmean(map(min, layers))
        rows.append(row)
    columns = {"step": number("step")}
    for rank in RANKS:
        columns[f"rank {rank}"] = lambda row, rank=rank: f"{row[f'median_{rank}']:.1%} ({row[f'lowest_{rank}']:.1%})"
    report("energies", "energy of gradients that a rank keeps: median layer (lowest)", args, at, rows, columns)


if __name__ == "__main__":
    main()
