"""Curves for time_to_loss.py: validation loss against time. A point is [step, seconds, MB, loss]."""

from typing import Any

Row = dict[str, Any]

NAMES = {
    "ddp": ("plain DDP", "#222222"),
    "bf16": ("bf16", "#8c8c8c"),
    "native-int4": ("int4", "#8c8c8c"),
    "auto": ("auto", "#1d4ed8"),
    "diloco-10": ("diloco", "#8c8c8c"),
}
"""Name and colour of each hook that is drawn, if it comes to plain DDP's last loss; the table has all."""
TASKS = {"language": "a language model with 2.8 M parameters", "digits": "scikit-learn's digits"}


def reached_after(curve: list[list[float]], loss: float) -> float | None:
    """Return the seconds until the curve reached `loss`, or None."""
    before: list[float] | None = None
    for point in curve:
        if point[3] <= loss:
            if before is None:
                return point[1]
            share = (before[3] - loss) / (before[3] - point[3])
            return before[1] + share * (point[1] - before[1])
        before = point
    return None


def draw(rows: list[Row], within: float) -> Any:
    """Draw the figure of the first task, rate and seed: loss against time. Each line has its name and time where it is
    above plain DDP's last loss by a share of `within`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    by_hook = {row["hook"]: row for row in rows if row["section"] == rows[0]["section"]}
    plain = by_hook["ddp"]
    (_, _, _, highest), *_, (steps, longest, _, last) = plain["curves"][0]
    unit_s, unit, units = (60, "min", "minutes") if longest > 120 else (1, "s", "seconds")
    goal, height, width = last * (1 + within), highest - last, 1.04 * longest / unit_s
    below = {"y": goal - height / 25, "ha": "center", "va": "top", "linespacing": 1.25}
    small: dict[str, Any] = {"color": "#555555", "fontsize": 9}

    figure = Figure(figsize=(8.4, 4.4), facecolor="white")
    axis = figure.subplots()
    axis.plot([0, width], [goal, goal], color="#cccccc", lw=1, zorder=0)
    axis.text(x=0.63 * width, s=f"{100 * within:g} % above plain DDP's last loss", **below, **small)
    reached = {}
    for hook, row in by_hook.items():
        curve = row["curves"][0]
        seconds = reached_after(curve, goal)
        if hook not in NAMES or seconds is None:
            continue
        name, color = NAMES[hook]
        reached[hook] = _rounded(seconds / unit_s)
        axis.plot([point[1] / unit_s for point in curve], [point[3] for point in curve], color=color, lw=2)
        axis.plot(seconds / unit_s, goal, color=color, marker="o", ms=7)
        text = f"{reached[hook]} {unit}\n{name}" + (f"\n(chose {row['chosen']})" if row["chosen"] else "")
        weight = "bold" if hook == "auto" else "normal"
        axis.text(x=seconds / unit_s, s=text, color=color, weight=weight, fontsize=11, **below)

    title = f"How soon a loss within {100 * within:g} % of plain DDP's last is reached"
    if "auto" in reached:
        title = (
            f"With auto, a loss within {100 * within:g} % of plain DDP's last is reached after {reached['auto']} "
            f"{units} instead of {reached['ddp']}"
        )
    figure.suptitle(title, x=0.02, ha="left", fontsize=12)
    rate = plain["rate"].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
    circumstances = f"Validation loss of {TASKS[plain['task']]}, {steps:,} steps on two ranks; {rate} between them"
    figure.text(0.02, 0.895, circumstances, **small)
    axis.set(xlim=(0, width), ylim=(last - height / 3, last + 1.05 * height))
    levels = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(last, highest)
    axis.set_yticks([level for level in levels if last - height / 20 < level < highest])
    times = [time for time in axis.get_xticks() if time <= width]
    axis.set_xticks(times, [f"{time:g} {unit}" if time else "0" for time in times])
    axis.tick_params(length=0, colors="#555555", labelsize=9)
    for side in axis.spines.values():
        side.set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    return figure


def _rounded(time: float) -> str:
    return f"{time:.0f}" if time >= 10 else f"{time:.2g}"
