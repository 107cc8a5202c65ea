"""The doctor's plot: step time against bandwidth. Curves are estimates, points are measured."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commhooks.compressors.candidates import ALLREDUCE, NOOP
from commhooks.errors import DoctorError

if TYPE_CHECKING:
    from commhooks.tools.doctor.report import DoctorReport

_LABEL_HEIGHT = 0.045
"""Of the height of the plot."""


def require_matplotlib() -> Any:
    """Import and return `matplotlib.figure.Figure`. Raises DoctorError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DoctorError(f"the plot needs matplotlib ({error}): pip install matplotlib") from None
    return Figure


def check_format(path: Path) -> None:
    """Raise DoctorError if matplotlib is missing, or does not know the format of this suffix."""
    known = sorted(require_matplotlib()().canvas.get_supported_filetypes())
    suffix = path.suffix.removeprefix(".").lower()
    if suffix and suffix not in known:
        raise DoctorError(f"{path}: there is no plot of the format {suffix!r}; known are {', '.join(known)}")


def draw(report: "DoctorReport", path: str | Path) -> None:
    """Write the plot of `report` to `path`: each line has its name beside it, and that of the advice stands out."""
    figure = require_matplotlib()(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    here = report.link.mbit_per_s
    low, high = min(10.0, here / 10), max(100_000.0, here * 10)
    grid = [low * (high / low) ** (i / 200) for i in range(201)]
    for label, each in report.measured.items():
        advised = label == report.advice.use
        color, width, above = ("C3", 2.5, 3) if advised else ("0.55", 1.0, 2)
        look = {"color": color, "linewidth": width, "zorder": above}
        curve = [report.estimate_ms(label, mbit_per_s) for mbit_per_s in grid]
        axes.plot(grid, curve, label=label, linestyle=":" if label == NOOP.label else "-", **look)
        median, (first, third) = each.median_ms, each.quartiles_ms
        axes.errorbar([here], [median], yerr=[[median - first], [third - median]], fmt="o", capsize=3, **look)
    axes.axvline(here, color="0.8", zorder=0)
    on_line = axes.get_xaxis_transform()  # x in Mbit/s, y from 0 at the bottom to 1 at the top
    look = {"rotation": 90, "va": "top", "ha": "right", "color": "0.4", "fontsize": "small"}
    axes.text(here, 0.98, "your link: measured (median, quartiles)", transform=on_line, **look)
    axes.set(xscale="log", yscale="log", xlabel="bandwidth of the link, Mbit/s", ylabel="time of a step, ms")
    axes.set_xlim(low, high)
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    _label_lines(axes, report.advice.use)
    axes.set_title(f"{report.world_size} ranks, {report.gradient_mb:.3g} MB of gradients; advice: {report.advice.use}")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise DoctorError(f"the plot cannot be written: {error}") from error


def _label_lines(axes: Any, advised: str) -> None:
    """Write the name of each line at its left end, where slow links tell the hooks apart, one above the other."""
    bottom, top = (math.log10(limit) for limit in axes.get_ylim())
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    lines.sort(key=lambda line: line.get_ydata()[0])
    heights = [(math.log10(line.get_ydata()[0]) - bottom) / (top - bottom) for line in lines]
    for i in range(1, len(lines)):
        heights[i] = max(heights[i], heights[i - 1] + _LABEL_HEIGHT)
    for line, height in zip(lines, heights, strict=True):
        label = line.get_label()
        name = label + {NOOP.label: " (no exchange)", ALLREDUCE.label: " (no hook)"}.get(label, "")
        look = {"color": line.get_color(), "fontweight": "bold"} if label == advised else {"color": "0.3"}
        place = {"xycoords": "axes fraction", "xytext": (-5, 0), "textcoords": "offset points"}
        axes.annotate(name, (0, height), **place, ha="right", va="center", fontsize="small", **look)
