"""Curves of time_to_loss.py: validation loss against seconds and bytes. A point is [step, seconds, MB, loss]."""

from pathlib import Path
from typing import Any

Row = dict[str, Any]


def reached_after(curve: list[list[float]], loss: float) -> float | None:
    """Seconds until the curve was at `loss`, or None."""
    before: list[float] | None = None
    for point in curve:
        if point[3] <= loss:
            if before is None:
                return point[1]
            share = (before[3] - loss) / (before[3] - point[3])
            return before[1] + share * (point[1] - before[1])
        before = point
    return None


def draw(rows: list[Row], file: Path) -> None:
    """Loss against seconds and against bytes: a row of pictures per task and rate, the first seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sections = list(dict.fromkeys(row["section"] for row in rows))
    hooks = list(dict.fromkeys(row["hook"] for row in rows))
    size = (10, 3.6 * len(sections))
    figure, axes = pyplot.subplots(len(sections), 2, figsize=size, squeeze=False, facecolor="white")
    for section, (left, right) in zip(sections, axes, strict=True):
        for row in (each for each in rows if each["section"] == section):
            style = {"color": f"C{hooks.index(row['hook'])}", "ls": "--" if "auto" in row["hook"] else "-"}
            curve = row["curves"][0]
            name = f"{row['hook']} ({row['chosen']})" if row["chosen"] else row["hook"]
            left.plot([p[1] for p in curve], [p[3] for p in curve], label=name, **style)
            right.plot([p[2] for p in curve], [p[3] for p in curve], **style)
        left.set(xscale="log", xlabel="seconds", ylabel="validation loss", title=section)
        right.set(xscale="log", xlabel="MB sent per rank")
        left.legend(fontsize=7)
        for axis in (left, right):
            axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
