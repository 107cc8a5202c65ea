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
from hooks import LABELS, OPTIONS
from machine import machine
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import commhooks

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


def attach(ddp_model: DistributedDataParallel, label: str, total_steps: int) -> commhooks.CommHook:
    kind, _, rank = label.rpartition("-")
    if kind not in (*OPTIONS, "batched"):
        return commhooks.attach(ddp_model, label)
    config = commhooks.BatchedPowerSGD if kind == "batched" else commhooks.PowerSGD
    options = dict.fromkeys(OPTIONS.get(kind, ()), True)
    request = config(matrix_approximation_rank=int(rank), **options)
    return commhooks.attach(ddp_model, request, total_steps=total_steps)


def train(label: str, seed: int, epochs: int) -> Row:
    """Train once. All ranks must call this."""
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(seed)
    # Several buckets, even for this small model.
    ddp_model = DistributedDataParallel(network(), bucket_cap_mb=0.1)
    per_epoch = len(labels) // (PER_RANK * dist.get_world_size())
    hook = attach(ddp_model, label, epochs * per_epoch)
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
        "accuracy": (output.argmax(1) == test_labels).float().mean().item(),
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


def plot(rows: list[Row], file: Path, epochs: int) -> None:
    from matplotlib.figure import Figure

    # One colour per family of hooks and one marker per factor rank; `fp16` and `bf16` are families of their own.
    families = list(dict.fromkeys(_family(row["hook"]) for row in rows))
    markers = {"": "s", "1": "o", "2": "^", "4": "D"}
    figure = Figure(figsize=(11, 4.5))
    axes = figure.subplots(1, 2, sharex=True)
    for axis, what, title in ((axes[0], "losses", "test loss"), (axes[1], "accuracies", "test error, %")):
        for row in rows:
            values = [100 * (1 - value) for value in row[what]] if what == "accuracies" else row[what]
            middle, family = statistics.mean(values), _family(row["hook"])
            axis.errorbar(
                row["megabytes"],
                middle,
                yerr=[[middle - min(values)], [max(values) - middle]],
                fmt=markers.get(row["hook"].rpartition("-")[2] if "-" in row["hook"] else "", "v"),
                color=f"C{families.index(family)}",
                alpha=0.8,
                capsize=3,
                label=row["hook"],
            )
        axis.set(xscale="log", yscale="log", xlabel="MB sent per rank in the whole run", ylabel=title)
        axis.set_xticks(ticks := [25, 50, 100, 200], [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8, ncols=2)
    seeds = len(rows[0]["losses"])
    figure.suptitle(f"digits, 2 ranks, {epochs} epochs: mean of {seeds} seeds, with the lowest and the highest")
    figure.tight_layout()
    figure.savefig(file, dpi=220)


def _family(hook: str) -> str:
    return hook.rpartition("-")[0] or hook


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--hooks", nargs="+", default=HOOKS, metavar="HOOK", help=f"{LABELS}; not torch's, nor ddp")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--plot", type=Path, metavar="PNG", help="draw quality against bytes")
    args = parse(arguments, seeds=[0], epochs=1, hooks=["allreduce", "powersgd-2"])
    at = machine()
    runs = run_ranks(measure, args.hooks, args.seeds, args.epochs)
    rows: list[Row] = []
    for label, found in runs.items():
        losses, accuracies = [run["loss"] for run in found], [run["accuracy"] for run in found]
        rows.append(
            {
                "hook": label,
                "losses": losses,
                "accuracies": accuracies,
                "mean_loss": statistics.mean(losses),
                "mean_accuracy": statistics.mean(accuracies),
                "lowest_loss": min(losses),
                "highest_loss": max(losses),
                "megabytes": statistics.mean(run["bytes"] for run in found) / 1e6,
                "steps": found[0]["steps"],
                "compressed_steps": found[0]["compressed_steps"],
                "fewer_bytes": runs[args.hooks[0]][0]["bytes"] / found[0]["bytes"],
            }
        )
    columns = {
        "hook": number("hook"),
        "MB sent per rank": number("megabytes", "{:.2f}"),
        f"x fewer than {args.hooks[0]}": number("fewer_bytes", "{:.1f}"),
        "test loss: mean (lowest .. highest)": lambda row: (
            f"{row['mean_loss']:.4f} ({row['lowest_loss']:.4f} .. {row['highest_loss']:.4f})"
        ),
        "test accuracy: mean (lowest .. highest)": lambda row: (
            f"{row['mean_accuracy']:.2%} ({min(row['accuracies']):.2%} .. {max(row['accuracies']):.2%})"
        ),
        "compressed steps": lambda row: f"{row['compressed_steps'] or 0} of {row['steps']}",
    }
    title = f"convergence: digits, 2 ranks, {args.epochs} epochs, {len(args.seeds)} seeds"
    report("convergence", title, args, at, rows, columns)
    if args.plot is not None:
        plot(rows, args.plot, args.epochs)


if __name__ == "__main__":
    main()
