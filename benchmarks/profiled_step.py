"""Profiles one training step with PowerSGD on two ranks, and draws the spans of commhooks.

python benchmarks/profiled_step.py --json profiled_step.json --plot profiled_step.png
python benchmarks/profiled_step.py --from profiled_step.json --plot profiled_step.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import run_ranks
from torch.nn.parallel import DistributedDataParallel

import commhooks

BEFORE = 5  # steps before the one that is profiled
LANES = ("backward()", "hook call", "exchange", "native kernel", "gloo:all_reduce")
COLORS = ("#d4d4d8", "#9db8ee", "#1d4ed8", "#7c3aed", "#f59e0b")


def profiled_step() -> list[tuple[str, float, float]]:
    """Return the spans of the lanes on this rank: lane, start and seconds."""
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=15)
    commhooks.attach(model, commhooks.PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2))
    tokens = torch.randn(2, 64, 512)
    for _ in range(BEFORE):
        model(tokens).sum().backward()
    with torch.profiler.profile() as profile:
        loss = model(tokens).sum()
        with torch.profiler.record_function("backward()"):
            loss.backward()
    spans = []
    for event in profile.events():
        lane = next((lane for lane in LANES if event.name.endswith(lane)), None)
        if lane is not None:
            microseconds = event.time_range.end - event.time_range.start
            spans.append((lane, event.time_range.start / 1e6, microseconds / 1e6))
    return spans


def draw(spans: list[tuple[str, float, float]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 2.6), layout="constrained")
    axis = figure.subplots()
    beginning = next(start for lane, start, _ in spans if lane == LANES[0])
    for place, (lane, color) in enumerate(zip(LANES, COLORS, strict=True)):
        bars = [
            ((start - beginning) * 1000, seconds * 1000)
            for name, start, seconds in spans
            if name == lane
        ]
        axis.broken_barh(bars, (-place - 0.35, 0.7), color=color)
    axis.set_yticks([-place for place in range(len(LANES))], LANES)
    axis.set_xlabel("milliseconds")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(file, dpi=300)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="stored", type=Path, metavar="FILE", help="do not measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the spans here")
    parser.add_argument("--plot", type=Path, metavar="PNG", required=True)
    arguments = parser.parse_args()
    spans: Any = (
        json.loads(arguments.stored.read_text()) if arguments.stored else run_ranks(profiled_step)
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(spans) + "\n")
    draw(spans, arguments.plot)


if __name__ == "__main__":
    main()
