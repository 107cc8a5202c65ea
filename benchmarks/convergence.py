"""A real task: how good is the model at the end, and how many bytes did that take?

    python benchmarks/convergence.py [--epochs 20] [--seeds 0 1 2] [--plot convergence.png]

A small convolutional network trains on scikit-learn's bundled digits (1,437 images of 8 x 8 to train, 360 to test), on
two ranks with 16 images each per step, by SGD with momentum and a cosine schedule. All hooks have the same settings,
and nothing is tuned. The split is fixed; a seed determines weights and order. PowerSGD begins after 10 % of the steps,
as by default. Bytes are counted by `hook.stats()`, per rank over the whole run. Needs scikit-learn, and matplotlib for
--plot.
"""

import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from common import Row, number, parse, parser, report, run_ranks
from hooks import LABELS, wrap
from machine import machine
from torch import nn
from torch.nn import functional

HOOKS = ["allreduce", "fp16", "bf16", "powersgd-1", "powersgd-2", "powersgd-4", "batched-1", "batched-4"]
PER_RANK = 16


def network() -> nn.Module:
    """A convolutional network with 63,000 parameters, nearly all in matrices."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 112),
        nn.ReLU(),
        nn.Linear(112, 10),
    )


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images and labels, test images and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def train(label: str, seed: int, epochs: int) -> Row:
    """Train once. All ranks must call this."""
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(seed)
    per_epoch = len(labels) // (PER_RANK * dist.get_world_size())
    # Several buckets, even for this small model.
    ddp_model, hook = wrap(network(), label, start=epochs * per_epoch // 10, bucket_cap_mb=0.1)
    assert hook is not None
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        mine = torch.randperm(len(labels), generator=order)[dist.get_rank() :: dist.get_world_size()]
        for batch in mine[: per_epoch * PER_RANK].split(PER_RANK):
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(ddp_model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        output = ddp_model.module(test_images)
    stats = hook.stats()
    return {
        "loss": functional.cross_entropy(output, test_labels).item(),
        "error": 100 * (output.argmax(1) != test_labels).float().mean().item(),
        "bytes": stats["bytes_sent"],
        "steps": epochs * per_epoch,
        "compressed_steps": stats["compressed_steps"],
    }


def measure(hooks: list[str], seeds: list[int], epochs: int) -> dict[str, list[Row]]:
    """Run all trainings. All ranks must call this. Seeds are the outer loop, so that changes of the machine's load
    affect all hooks."""
    runs: dict[str, list[Row]] = {label: [] for label in hooks}
    for seed in seeds:
        for label in hooks:
            runs[label].append(train(label, seed, epochs))
    return runs


def row_of(hook: str, runs: list[Row]) -> Row:
    """Make a row from the runs of a hook, one for each seed."""
    row: Row = {"hook": hook, "steps": runs[0]["steps"], "compressed_steps": runs[0]["compressed_steps"]}
    row["megabytes"] = runs[0]["bytes"] / 1e6
    for name in ("loss", "error"):
        values = [run[name] for run in runs]
        row |= {name: statistics.fmean(values), f"lowest_{name}": min(values), f"highest_{name}": max(values)}
    return row


def draw(rows: list[Row], seeds: int, file: Path) -> None:
    """Draw loss and error against bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True)
    for axis, name, title in ((axes[0], "loss", "test loss"), (axes[1], "error", "test error, %")):
        for place, row in enumerate(rows):
            spread = [[row[name] - row[f"lowest_{name}"]], [row[f"highest_{name}"] - row[name]]]
            style = {"fmt": "os^Dv"[place % 5], "color": f"C{place}", "capsize": 3}
            axis.errorbar(row["megabytes"], row[name], yerr=spread, label=row["hook"], **style)
        axis.set(xscale="log", yscale="log", xlabel="MB sent per rank in the whole run", ylabel=title)
        axis.set_xticks(ticks := [25, 50, 100, 200], [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8, ncols=2)
    figure.suptitle(f"digits, 2 ranks, {rows[0]['steps']} steps: mean of {seeds} seeds, with the lowest and highest")
    figure.savefig(file, dpi=220)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--hooks", nargs="+", default=HOOKS, metavar="HOOK", help=f"{LABELS}; not torch's, nor ddp")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--plot", type=Path, metavar="PNG", help="draw quality against bytes")
    args = parse(arguments, seeds=[0], epochs=1, hooks=["allreduce", "powersgd-2"])
    at = machine()
    runs = run_ranks(measure, args.hooks, args.seeds, args.epochs)
    rows = [row_of(hook, of_hook) for hook, of_hook in runs.items()]
    columns = {
        "hook": number("hook"),
        "MB sent per rank": number("megabytes", "{:.2f}"),
        "test loss: mean (lowest .. highest)": lambda row: (
            "{loss:.4f} ({lowest_loss:.4f} .. {highest_loss:.4f})".format(**row)
        ),
        "test error, %": lambda row: "{error:.2f} ({lowest_error:.2f} .. {highest_error:.2f})".format(**row),
        "compressed steps": lambda row: f"{row['compressed_steps'] or 0} of {row['steps']}",
    }
    title = f"convergence: digits, 2 ranks, {args.epochs} epochs, {len(args.seeds)} seeds"
    report("convergence", title, args, at, rows, columns)
    if args.plot is not None:
        draw(rows, len(args.seeds), args.plot)


if __name__ == "__main__":
    main()
