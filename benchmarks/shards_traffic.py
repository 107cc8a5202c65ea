"""Draws what a machine sends in a step of FSDP2, with and without `shards`, as the cost model of
`commhooks network` says, for the number of gathers of a step.

    python benchmarks/shards_traffic.py --plot shards_traffic.png
"""

from pathlib import Path

import common

from commhooks.tools.step_cost import SHARDINGS, Cluster, sharded_exchange

MODEL, UNITS = 1e9, 24
MACHINES = (
    (2, 1, "2 machines of 1 GPU"),
    (2, 8, "2 machines of 8 GPUs"),
    (8, 8, "8 machines of 8 GPUs"),
)
NAMES = {"fully_shard": "FSDP2 alone"}
GATHERED, SCATTERED = "#9db8ee", "#1d4ed8"


def draw(file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    axes = figure.subplots(1, len(MACHINES), sharey=True, sharex=True)
    for axis, (machines, ranks, title) in zip(axes, MACHINES, strict=True):
        cluster = Cluster(machines, ranks, 1e9, 1e12, 0.0, "nccl")
        for place, sharding in enumerate(SHARDINGS):
            sent = [
                sharded_exchange(sharding, MODEL, UNITS, gathers, cluster).bytes_leaving / 1e9
                for gathers in (0, 1, 2)
            ]
            scatter, once, whole = sent
            for start, end, color in (
                (0.0, once - scatter, GATHERED),
                (once - scatter, whole - scatter, GATHERED),
                (whole - scatter, whole, SCATTERED),
            ):
                axis.barh(-place, end - start, 0.62, start, color=color, edgecolor="white", lw=1.5)
            axis.text(whole + 0.15, -place, f"{whole:.1f} GB", va="center", fontsize=9)
        axis.set_title(title, fontsize=10)
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    names = [NAMES.get(sharding.label, sharding.label) for sharding in SHARDINGS]
    axes[0].set_yticks([-place for place in range(len(names))], names)
    axes[0].set_xlim(0, 15)
    handles = [axes[0].barh(0, 0, color=color) for color in (GATHERED, SCATTERED)]
    labels = ["weights, gathered for the forward and the backward pass", "gradients, scattered"]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle("What each machine sends to others in a step, 1 billion parameters in float32")
    figure.savefig(file, dpi=300)


if __name__ == "__main__":
    draw(common.plot_file(__doc__))
