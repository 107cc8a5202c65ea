"""Draws how DiLoCo's rounds pass: steps of each rank, and the outer steps in which the ranks exchange weights. Also
draws what has happened to machines that come and go, from the file of `benchmarks/members.py --results`.

    python benchmarks/drawings.py --rounds diloco_rounds.png
    python benchmarks/drawings.py --members docs/figures/members.jsonl members.png
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS, STEP, EXCHANGE, START = 5, 1.0, 2.6, 0.0
OWN, SHARED, GREY = "#9db8ee", "#1d4ed8", "#555555"
DEATH, RETURN = "#b91c1c", "#15803d"


def rounds(path: Path) -> None:
    """Above, plain DDP: an exchange in every step. Below, DiLoCo: one exchange per round, of fewer bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.3), facecolor="white")
    axis = figure.subplots()
    end = 3 * (STEPS * STEP) + 3 * EXCHANGE * 0.35
    rows = {"rank 1": 0.0, "rank 0": 1.0, "rank 1 ": 2.9, "rank 0 ": 3.9}
    _ddp(axis, (2.9, 3.9), end)
    _diloco(axis, (0.0, 1.0))
    axis.set_yticks([y + 0.35 for y in rows.values()], [name.strip() for name in rows])
    for y, text in (
        (4.95, "plain DDP: the gradients in every step"),
        (2.05, "DiLoCo with sync_every=5: the weights after every fifth step"),
    ):
        axis.text(0, y, text, va="bottom", fontsize=10, fontweight="bold")
    axis.annotate("time", (end, -0.45), (end - 1.6, -0.45), va="center", color=GREY, arrowprops={"arrowstyle": "->"})
    axis.set(xlim=(-0.2, end + 0.1), ylim=(-0.8, 5.6), xticks=[])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=300)


def _ddp(axis: Any, rows: tuple[float, float], end: float) -> None:
    at, number = START, 1
    while at + STEP + EXCHANGE <= end + 0.5:
        for y in rows:
            axis.broken_barh([(at, STEP - 0.06)], (y, 0.7), color=OWN)
            axis.text(at + 0.47 * STEP, y + 0.35, str(number), ha="center", va="center", fontsize=8)
        number += 1
        _exchange(axis, at + STEP, EXCHANGE, rows, "gradients")
        at += STEP + EXCHANGE


def _diloco(axis: Any, rows: tuple[float, float]) -> None:
    at, length = START, EXCHANGE * 0.35  # int4 on the wire
    for number in range(3):
        for y in rows:
            axis.broken_barh([(at + step * STEP, STEP - 0.06) for step in range(STEPS)], (y, 0.7), color=OWN)
            for step in range(STEPS):
                center = {"ha": "center", "va": "center", "fontsize": 8}
                axis.text(at + (step + 0.47) * STEP, y + 0.35, str(number * STEPS + step + 1), **center)
        _exchange(axis, at + STEPS * STEP, length, rows, "outer\nstep")
        at += STEPS * STEP + length


def _exchange(axis: Any, at: float, length: float, rows: tuple[float, float], text: str) -> None:
    low, high = rows
    axis.broken_barh([(at, length - 0.06)], (low, high - low + 0.7), color=SHARED)
    middle = (low + high + 0.7) / 2
    axis.text(at + length / 2 - 0.03, middle, text, color="white", ha="center", va="center", fontsize=8)


def members(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Above, the number of machines that train together; below, the loss of each machine in each of its rounds."""
    from matplotlib.figure import Figure

    (head, *rows), end = rows, rows[0]["seconds"]
    rows = [row for row in rows if 0 <= row["time"] <= end]
    steps, names = [row for row in rows if "members" in row], sorted({row["machine"] for row in rows})
    figure = Figure(figsize=(8.4, 4.2), facecolor="white")
    above, below = figure.subplots(2, sharex=True, height_ratios=(1, 2))
    times, counts = [row["time"] for row in steps], [row["members"] for row in steps]
    above.step([0.0, *times, end], [counts[0], *counts, counts[-1]], where="post", color=SHARED)
    above.set(ylabel="machines", ylim=(0, len(names) + 0.5), yticks=range(len(names) + 1))
    for name, color in zip(names, (SHARED, "#f59e0b", "#7c3aed"), strict=True):
        own = [row for row in rows if row["machine"] == name]  # a death has no loss, and interrupts the line
        losses = [float("nan") if row.get("loss") is None else row["loss"] for row in own]
        style = {"markersize": 3, "linewidth": 0.8, "color": color, "label": name.replace("-", " ")}
        below.plot([row["time"] for row in own], losses, ".-", **style)
    for death in (row for row in rows if row.get("event") == "killed"):
        back = [row["time"] for row in steps if row["machine"] == death["machine"] and row["time"] > death["time"]]
        for time, color, style, label in (
            (death["time"], DEATH, "--", "is killed"),
            *((t, RETURN, ":", "is back") for t in back[:1]),
        ):
            above.axvline(time, color=color, linestyle=style, linewidth=1.2, label=label)
            below.axvline(time, color=color, linestyle=style, linewidth=1.2)
    marks = dict(zip(*reversed(above.get_legend_handles_labels()), strict=True))
    above.legend(marks.values(), marks.keys(), frameon=False, fontsize=8, loc="lower left")
    below.set(
        xlabel=f"seconds; a step takes {head['step_s'] * 1e3:.0f} ms", ylabel="loss, mean of the round", xlim=(0, end)
    )
    below.legend(frameon=False, fontsize=8)
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=300)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=Path, metavar="PNG", help="draw the rounds of DiLoCo")
    made.add_argument(
        "--members", type=Path, nargs=2, metavar=("RESULTS", "PNG"), help="draw machines that come and go"
    )
    args = made.parse_args()
    if args.rounds is not None:
        rounds(args.rounds)
    if args.members is not None:
        results, picture = args.members
        members([json.loads(line) for line in results.read_text().splitlines()], picture)


if __name__ == "__main__":
    main()
