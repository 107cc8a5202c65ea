"""The figure of link.py: step time against bandwidth, a line per hook with its name at the slow end."""

import math
from pathlib import Path
from typing import Any

Row = dict[str, Any]

NAMES = {
    "noop": ("no communication", "#8c8c8c", ":"),
    "ddp": ("plain DDP, float32", "#222222", "-"),
    "fp16": ("fp16", "#8c6d1f", "-"),
    "torch-1": ("torch's PowerSGD, rank 1", "#c2410c", "--"),
    "torch-4": ("torch's PowerSGD, rank 4", "#ea8a4f", "--"),
    "int8": ("commhooks int8", "#0f766e", "-"),
    "int4": ("commhooks int4", "#22a699", "-"),
    "powersgd-1": ("commhooks PowerSGD, rank 1", "#1d4ed8", "-"),
    "powersgd-4": ("commhooks PowerSGD, rank 4", "#6d8df0", "-"),
}
"""Name, colour and line of each hook that is drawn; of `native-1` those of `powersgd-1`, and so on."""
TITLES = {"10mbit": "10 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
LOWEST, HIGHEST = 0.1, 200.0  # s
APART = 0.12  # decades between two names


def draw(rows: list[Row], at: Row, file: Path) -> None:
    """Write a PNG with the first model and amount of computation in `rows`. `at`: the machine that measured them."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    rows = [row for row in rows if (row["model"], row["compute"]) == (rows[0]["model"], rows[0]["compute"])]
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    lines: dict[str, list[float | None]] = {}
    for row in rows:
        label = _drawn_as(row["hook"])
        if label in NAMES:
            lines.setdefault(label, [None] * len(rates))[rates.index(row["rate"])] = row["median_ms"] / 1000
    figure = Figure(figsize=(8.4, 5.0), facecolor="white")
    axis = figure.subplots()
    for label, times in lines.items():
        _, color, style = NAMES[label]
        places = [place for place, time in enumerate(times) if time is not None]
        axis.plot(places, [times[place] for place in places], color=color, ls=style, marker="o", ms=4, lw=2)
    first = {label: next(time for time in times if time is not None) for label, times in lines.items()}
    for label, height in spread_out(first).items():
        name, color, _ = NAMES[label]
        text = f"{name}  {_in_words(first[label])}"
        axis.text(-0.08, height, text, color=color, ha="right", va="center", fontsize=10)
    slow, fast = 0, len(rates) - 1
    axis.set(yscale="log", xlim=(slow - 2.6, fast + 0.6), ylim=(LOWEST, HIGHEST))
    axis.set_xticks(range(len(rates)), [TITLES.get(rate, rate) for rate in rates])
    axis.set_yticks([])
    axis.yaxis.set_minor_locator(NullLocator())
    for height in (0.1, 1.0, 10.0, 100.0):
        axis.plot([slow, fast + 0.15], [height, height], color="#dddddd", lw=1, zorder=0)
        axis.text(fast + 0.6, height, f"{height:g} s", ha="right", va="center", color="#555555", fontsize=9)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0)
    figure.suptitle("Time of a training step against the bandwidth between two ranks", x=0.02, ha="left", fontsize=13)
    figure.text(0.02, 0.905, _circumstances(rows[0], at), color="#555555", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(file, dpi=300)


def _drawn_as(hook: str) -> str:
    """Return `powersgd-1` for `native-1`, and `int8` for `native-int8`, which are our hooks on a machine with a C
    compiler."""
    rest = hook.removeprefix("native-")
    return f"powersgd-{rest}" if rest != hook and rest.isdigit() else rest


def spread_out(heights: dict[str, float]) -> dict[str, float]:
    """Place the names so that they do not overlap, each as near to its line as possible, on a log scale."""
    order = sorted(heights, key=heights.__getitem__)
    groups = [[label] for label in order]  # of names that touch each other; each is centred on its lines

    def lowest(group: list[str]) -> float:
        return sum(math.log10(heights[label]) for label in group) / len(group) - APART * (len(group) - 1) / 2

    merged = True
    while merged:
        merged = False
        for below, above in zip(groups, groups[1:], strict=False):
            if lowest(below) + APART * len(below) > lowest(above):
                groups[groups.index(below)] = below + above
                groups.remove(above)
                merged = True
                break
    return {label: 10 ** (lowest(group) + APART * place) for group in groups for place, label in enumerate(group)}


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _circumstances(row: Row, at: Row) -> str:
    ranks = row["nodes"] * row["ranks_per_node"]
    unit = "tokens" if "transformer" in row["model"] else "images"
    model = f"{row['model']}, {row['gradient_mb']:.0f} MB of gradients, {row['batch']} {unit} per rank"
    return f"{model}; {ranks} ranks with a core each, {at['cpu']}; torch {at['torch']}, gloo"
