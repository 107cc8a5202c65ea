"""The hook's own time per step: backward with the hook minus backward with `noop`, one rank, one bucket.

    python benchmarks/codec.py [--ranks 1 2 4] [--rounds 15]

One bucket and one rank, because torch's own hook does not run on gloo with more. Ours, torch's and `noop` alternate in
one process on one thread; the table shows medians, with the quartiles behind them, and ours as a multiple of torch's.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import commhooks

WIDTH, BLOCKS, WARM_UP = 512, 8, 3


def make_model() -> torch.nn.Module:
    """8 transformer blocks of width 512: 101 MB of gradients, 25.2 M of its parameters in matrices."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, dropout=0.0)
    return torch.nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)


def wrap(hook: str, rank: int) -> DistributedDataParallel:
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=1000)
    if hook == "torch":
        state = torch_hooks.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, torch_hooks.powerSGD_hook)
    elif hook == "commhooks":
        commhooks.attach(ddp, commhooks.PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=2))
    else:
        commhooks.attach(ddp, hook)
    return ddp


def backward_s(ddp: DistributedDataParallel, batch: torch.Tensor) -> float:
    loss = ddp(batch).square().mean()
    started = time.perf_counter()
    loss.backward()
    return time.perf_counter() - started


def measure(rank: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds over `noop`, per hook and round."""
    models = {hook: wrap(hook, rank) for hook in ("noop", "torch", "commhooks")}
    batch = torch.randn(1, 4, WIDTH)
    times: dict[str, list[float]] = {hook: [] for hook in models}
    for _ in range(WARM_UP + rounds):
        for hook, ddp in models.items():
            times[hook].append(1000 * backward_s(ddp, batch))
    noop = statistics.median(times["noop"][WARM_UP:])
    return {hook: [t - noop for t in times[hook][WARM_UP:]] for hook in ("torch", "commhooks")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="ranks of the factors")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        results = {rank: measure(rank, arguments.rounds) for rank in arguments.ranks}
        dist.destroy_process_group()
    table = Table(title="codec time per step, ms: median (quartiles)")
    for column in ("rank", "torch", "commhooks", "commhooks / torch"):
        table.add_column(column, justify="right")
    for rank, times in results.items():
        medians = {hook: statistics.median(values) for hook, values in times.items()}
        cells = []
        for hook, values in times.items():
            low, _, high = statistics.quantiles(values, n=4)
            cells.append(f"{medians[hook]:.0f} ({low:.0f} .. {high:.0f})")
        table.add_row(str(rank), *cells, f"{medians['commhooks'] / medians['torch']:.2f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": 1, "cpus": os.cpu_count(), "ms_over_noop": results}, indent=1))


if __name__ == "__main__":
    main()
