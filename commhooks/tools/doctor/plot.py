"""The doctor's plot: step time against bandwidth. Curves are estimates, points are measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from commhooks.errors import DoctorError

if TYPE_CHECKING:
    from commhooks.tools.doctor.report import DoctorReport


def require_matplotlib() -> Any:
    """Import and return `matplotlib.figure.Figure`. Raises DoctorError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DoctorError(
            f'the plot needs matplotlib ({error}): pip install matplotlib, or install commhooks with its "plot" extra'
        ) from None
    return Figure


def draw(report: "DoctorReport", path: str | Path) -> None:
    """Write the plot of `report` to `path`."""
    figure = require_matplotlib()(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    here = report.link.mbit_per_s
    low, high = min(10.0, here / 10), max(100_000.0, here * 10)
    grid = [low * (high / low) ** (i / 200) for i in range(201)]
    for label, each in report.measured.items():
        curve = [report.estimate_ms(label, mbit_per_s) for mbit_per_s in grid]
        (line,) = axes.plot(grid, curve, linestyle="--", label=f"{label} (estimate)")
        first, third = each.quartiles_ms
        median = each.median_ms
        axes.errorbar(
            [here], [median], yerr=[[median - first], [third - median]], fmt="o", color=line.get_color(), capsize=3
        )
    axes.plot([], [], "ko", label="measured (median, quartiles)")
    axes.axvline(here, color="0.8", zorder=0)
    on_line = axes.get_xaxis_transform()  # x in Mbit/s, y from 0 at the bottom to 1 at the top
    axes.text(here, 0.98, "your link", transform=on_line, rotation=90, va="top", ha="right", color="0.4")
    axes.set(xscale="log", yscale="log", xlabel="bandwidth of the link, Mbit/s", ylabel="time of a step, ms")
    axes.set_title(f"{report.world_size} ranks, {report.gradient_mb:.3g} MB of gradients; advice: {report.advice.use}")
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise DoctorError(f"the plot cannot be written: {error}") from error
