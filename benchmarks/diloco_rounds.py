"""Draws how DiLoCo's rounds pass: steps of each rank, and the outer steps in which the ranks
exchange weights.

    python benchmarks/diloco_rounds.py --plot diloco_rounds.png

Above, plain DDP: an exchange in every step. Below, DiLoCo: one exchange per round, of fewer bytes.
"""

from pathlib import Path
from typing import Any

import common

STEPS = 5  # in a round
GRADIENTS, WEIGHTS = 2.6, 0.9  # how long an exchange takes; a step takes 1
END = 3 * (STEPS + WEIGHTS)
STEP_COLOR, EXCHANGE_COLOR, GREY = "#9db8ee", "#1d4ed8", "#555555"


def lanes(axis: Any, bottom: float, steps: int, exchange: float, text: str) -> None:
    """Draw two ranks that exchange something after every `steps` steps."""
    centered = {"ha": "center", "va": "center", "fontsize": 8}
    start = 0.0
    number = 1
    while start + steps + exchange <= END + 0.5:
        for step in range(steps):
            for y in (bottom, bottom + 1):
                axis.broken_barh([(start + step, 0.94)], (y, 0.7), color=STEP_COLOR)
                axis.text(start + step + 0.47, y + 0.35, str(number), **centered)
            number += 1
        axis.broken_barh([(start + steps, exchange - 0.06)], (bottom, 1.7), color=EXCHANGE_COLOR)
        axis.text(
            start + steps + exchange / 2 - 0.03, bottom + 0.85, text, color="white", **centered
        )
        start += steps + exchange


def draw(file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.3), layout="constrained")
    axis = figure.subplots()
    lanes(axis, 2.9, 1, GRADIENTS, "gradients")
    lanes(axis, 0.0, STEPS, WEIGHTS, "outer\nstep")
    axis.set_yticks([0.35, 1.35, 3.25, 4.25], ["rank 1", "rank 0"] * 2)
    axis.text(0, 4.95, "plain DDP: the gradients in every step", fontweight="bold")
    axis.text(
        0,
        2.05,
        f"DiLoCo with sync_every={STEPS}: the weights after every fifth step",
        fontweight="bold",
    )
    axis.annotate(
        "time",
        (END, -0.45),
        (END - 1.6, -0.45),
        va="center",
        color=GREY,
        arrowprops={"arrowstyle": "->"},
    )
    axis.set(xlim=(-0.2, END + 0.1), ylim=(-0.8, 5.6), xticks=[])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.savefig(file, dpi=300)


if __name__ == "__main__":
    draw(common.plot_file(__doc__))
