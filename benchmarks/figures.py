"""Makes the figures of README and docs again: the numbers of each table, and the pictures.

    make figures                      # lists them, with what each needs
    make figures ARGS="codec memory"  # measures, and prints beside it what README and docs say
    make figures ARGS="--stored"      # draws the pictures again from stored measurements
    sudo .venv/bin/python benchmarks/figures.py link --folder figures

What is measured and drawn goes into --folder. To publish it, copy it to docs/figures, and the
numbers into the page.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "figures"


@dataclass(frozen=True)
class Figure:
    """Describes how to measure or draw a figure, and where it is printed.

    Attributes:
        command: measures it. FOLDER is the folder for what it writes.
        minutes: about how long it takes on two cores.
        printed: where README and docs print it, as "page.md#heading".
        root: it limits a link, which needs Linux, root, `ip` and `tc`, or takes real-time priority.
        picture: the file in docs/figures that `command` draws.
        stored: draws the picture from stored measurements, without measuring.
    """

    command: str
    minutes: float
    printed: tuple[str, ...]
    root: bool = False
    picture: str = ""
    stored: str = ""


LINK = "benchmarks/link.py"
TIME_TO_LOSS = "benchmarks/time_to_loss.py"
DRAWN = "--rates 100mbit --hooks ddp bf16 native-int4 auto diloco-10"
WIRES = ("bf16", "int8", "int4", "powersgd-1", "powersgd-2", "powersgd-4", "batched-1", "batched-4")
FIGURES = {
    "time_to_loss": Figure(
        f"{TIME_TO_LOSS} --results FOLDER/time_to_loss.jsonl --plot FOLDER/time_to_loss.png",
        300,
        ("README.md#time-to-the-same-loss", "docs/performance.md#time-to-loss"),
        root=True,
        picture="time_to_loss.png",
        stored=(
            f"{TIME_TO_LOSS} {DRAWN} --results docs/figures/time_to_loss.jsonl --plot"
            " FOLDER/time_to_loss.png"
        ),
    ),
    "time_to_loss_10mbit": Figure(
        f"{TIME_TO_LOSS} --rates 10mbit --timed 20 --hooks ddp native-int4 diloco-10 --results"
        " FOLDER/slow.jsonl",
        120,
        ("README.md#time-to-the-same-loss", "docs/performance.md#time-to-loss"),
        root=True,
    ),
    "peers": Figure(  # without hivemind, unless it is the Python of `make bench-peers`
        "benchmarks/peers.py --results FOLDER/peers.jsonl",
        120,
        ("docs/compared.md#measured-side-by-side",),
        root=True,
        stored="benchmarks/peers.py --parts --results docs/figures/peers.jsonl",
    ),
    "link": Figure(
        f"{LINK} --models transformer --compute light --hooks noop ddp fp16 native-int8 native-int4"
        " torch-1 torch-4 native-1 native-4 --json FOLDER/link.json --plot FOLDER/link.png",
        40,
        ("docs/performance.md#training-over-a-slow-link",),
        root=True,
        picture="link.png",
        stored=f"{LINK} --from docs/figures/link.json --plot FOLDER/link.png",
    ),
    "long_link": Figure(
        f"{LINK} --rtt 50 --models transformer --rates 100mbit --compute light --hooks noop"
        " native-1 native-1:one diloco-30 --json FOLDER/long_link.json",
        5,
        ("docs/slow_networks.md#what-to-look-for",),
        root=True,
    ),
    "diloco_speed": Figure(
        f"{LINK} --models transformer --rates 10mbit 100mbit --compute light --hooks noop ddp"
        " native-int4 diloco-5 diloco-5-4 diloco-30 diloco-30-10 diloco-30-29 --json"
        " FOLDER/diloco_speed.json",
        20,
        ("docs/diloco.md#what-it-costs",),
        root=True,
    ),
    "nodes": Figure(
        f"{LINK} --ranks-per-node 2 --models transformer --rates 1gbit --compute light --json"
        " FOLDER/nodes.json",
        15,
        ("docs/performance.md#two-nodes-of-two-ranks",),
        root=True,
    ),
    "shards": Figure(
        f"{LINK} --models transformer --rates 100mbit 1gbit --compute light --steps 4 --seconds 12"
        " --hooks noop fsdp2 shards-bf16 shards-int8 shards-int8:ahead --json FOLDER/shards.json",
        4,
        ("docs/performance.md#fsdp2-over-a-slow-link",),
        root=True,
    ),
    "shards_of_four": Figure(
        f"{LINK} --nodes 4 --models transformer --rates 100mbit 1gbit --compute light --steps 3"
        " --seconds 8 --hooks noop fsdp2 shards-int8 shards-int8:ahead --json FOLDER/shards4.json",
        4,
        ("docs/performance.md#fsdp2-over-a-slow-link",),
        root=True,
    ),
    "shards_traffic": Figure(
        "benchmarks/shards_traffic.py --plot FOLDER/shards_traffic.png",
        0.1,
        ("docs/fsdp2.md#models-sharded-over-several-machines",),
        picture="shards_traffic.png",
        stored="benchmarks/shards_traffic.py --plot FOLDER/shards_traffic.png",
    ),
    "step_cost": Figure(
        "benchmarks/step_cost.py --steps 2 --json FOLDER/step_cost.json",
        10,
        ("docs/performance.md#predicted-steps",),
        root=True,
    ),
    "clusters": Figure(
        "benchmarks/step_cost.py --clusters --json FOLDER/clusters.json",
        0.1,
        ("docs/performance.md#predicted-steps",),
    ),
    "language_model": Figure(
        "benchmarks/language_model.py --results FOLDER/language_model.jsonl --plot"
        " FOLDER/language_model.png",
        900,
        ("docs/performance.md#a-language-model",),
        picture="language_model.png",
        stored=(
            "benchmarks/language_model.py --results docs/figures/language_model.jsonl "
            "--plot FOLDER/language_model.png"
        ),
    ),
    "local_steps": Figure(
        "benchmarks/local_steps.py --results FOLDER/local_steps.jsonl",
        600,
        ("docs/diloco.md#the-learning-rate",),
        stored="benchmarks/local_steps.py --results docs/figures/local_steps.jsonl --finished",
    ),
    "diloco_ranks": Figure(
        "benchmarks/local_steps.py --ranks 8 --seeds 0 1 2 --steps 300 --results"
        " FOLDER/diloco_ranks.jsonl --settings "
        + " ".join(f"'task=small sequences=8 lr={rate} exact=1'" for rate in (0.016, 0.032, 0.064))
        + "".join(
            f" 'task=small sequences=8 lr=0.032 every={every} wire=int4{more}'"
            for every in (5, 10, 30)
            for more in ("", " inner=sqrt", " radial=1", " inner=sqrt radial=1", " momentum=0.5")
        ),
        60,
        ("docs/diloco.md#a-learning-rate-that-was-tuned-for-plain-ddp",),
        stored=(
            "benchmarks/local_steps.py --results docs/figures/diloco_ranks.jsonl --finished"
            " --steps 300"
        ),
    ),
    "shards_loss": Figure(
        "benchmarks/shards_loss.py --results FOLDER/shards_loss.jsonl",
        90,
        ("docs/fsdp2.md#models-sharded-over-several-machines",),
        stored=(
            "benchmarks/shards_loss.py --seeds 0 1 --results docs/figures/shards_loss.jsonl"
            " --settings 'weights=int8 gradients=int8 block=128'"
            " 'weights=int8 gradients=int8 block=256' 'weights=int8 gradients=int4'"
            " 'weights=int8 gradients=int4 rounding=stochastic'"
            " 'weights=int8 gradients=int4 residual=1' 'weights=int4 gradients=int8'"
        ),
    ),
    "diloco_rounds": Figure(
        "benchmarks/diloco_rounds.py --plot FOLDER/diloco_rounds.png",
        0.1,
        ("docs/diloco.md#diloco-exchanging-weights-every-h-steps",),
        picture="diloco_rounds.png",
        stored="benchmarks/diloco_rounds.py --plot FOLDER/diloco_rounds.png",
    ),
    "members_link": Figure(
        "benchmarks/members_link.py --real-time --json FOLDER/members_link.json",
        5,
        ("docs/members.md#what-a-death-costs",),
        root=True,
    ),
    "members": Figure(
        "benchmarks/members.py --real-time --json FOLDER/members.json --results"
        " FOLDER/members.jsonl --plot FOLDER/members.png",
        8,
        ("docs/members.md#what-a-death-costs",),
        root=True,
        picture="members.png",
        stored="benchmarks/members.py --from docs/figures/members.jsonl --plot FOLDER/members.png",
    ),
    "unequal": Figure(
        "benchmarks/unequal.py --json FOLDER/unequal.json --results FOLDER/unequal.jsonl",
        30,
        ("docs/members.md#what-a-death-costs",),
    ),
    "profiled_step": Figure(
        "benchmarks/profiled_step.py --json FOLDER/profiled_step.json --plot"
        " FOLDER/profiled_step.png",
        0.2,
        ("docs/working.md#in-a-profile",),
        picture="profiled_step.png",
        stored=(
            "benchmarks/profiled_step.py --from docs/figures/profiled_step.json --plot"
            " FOLDER/profiled_step.png"
        ),
    ),
    "codec": Figure(
        "benchmarks/codec.py --json FOLDER/codec.json",
        10,
        ("docs/performance.md#the-hooks-own-time",),
    ),
    "memory": Figure(
        "benchmarks/memory.py --json FOLDER/memory.json",
        3,
        ("docs/performance.md#memory-and-checkpoints",),
    ),
    "digits": Figure(
        "benchmarks/local_steps.py --ranks 2 --seeds 0 1 2 --steps 880 --results"
        " FOLDER/digits.jsonl --settings "
        + " ".join(f"'task=digits optimizer=sgd exact=1 wire={wire}'" for wire in WIRES),
        5,
        ("docs/performance.md#classifying-digits",),
        stored=(
            "benchmarks/local_steps.py --results docs/figures/local_steps.jsonl --finished"
            " --steps 880"
        ),
    ),
    "launches": Figure(
        "benchmarks/launches.py --json FOLDER/launches.json",
        1,
        ("docs/performance.md#operators-on-an-accelerator",),
    ),
    "chaos": Figure(
        "-m tests.stress.chaos --seed 1125", 60, ("docs/reliability.md#processes-that-die",)
    ),
    "chaos_members": Figure(
        "-m tests.stress.chaos --topologies members --seed 1128",
        8,
        ("docs/reliability.md#processes-that-die",),
    ),
    "stragglers": Figure(
        "-m tests.stress.stragglers", 10, ("docs/reliability.md#a-rank-that-is-slow-or-gone",)
    ),
}
"""In the order of README and docs."""


def section(place: str) -> str:
    """Return the section of a page, from its heading to the next one of its level."""
    page, _, anchor = place.partition("#")
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    section_lines: list[str] = []
    level = 0
    for line in lines:
        heading = re.match(r"(#+) (.+)", line)
        if heading and section_lines and len(heading[1]) <= level:
            break
        if (
            heading
            and not section_lines
            and re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading[2]).lower()) == anchor
        ):
            level = len(heading[1])
        if level:
            section_lines.append(line)
    if not section_lines:
        raise SystemExit(f"{page} has no heading {anchor}")
    return "\n".join(section_lines).rstrip()


def show_all() -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "needs", "minutes", "printed in", "picture", box=SIMPLE)
    for name, figure in FIGURES.items():
        needs = "root, ip, tc" if figure.root else ""
        table.add_row(name, needs, f"{figure.minutes:g}", "\n".join(figure.printed), figure.picture)
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    print(
        'make figures ARGS="NAME ..." measures them; ARGS=--stored draws the pictures from the'
        " stored measurements."
    )


def run(command: str, folder: Path) -> int:
    words = [word.replace("FOLDER", str(folder)) for word in shlex.split(command)]
    print("$ python", shlex.join(words), flush=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment).returncode


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("names", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    made.add_argument(
        "--stored",
        action="store_true",
        help="from stored measurements; without names, all that have them",
    )
    made.add_argument(
        "--folder", type=Path, help="for measurements and pictures; default: a temporary one"
    )
    args = made.parse_args()
    if unknown := set(args.names) - FIGURES.keys():
        made.error(f"{unknown.pop()} is none of {', '.join(FIGURES)}")
    names = args.names or [
        name for name, figure in FIGURES.items() if args.stored and figure.stored
    ]
    if not names:
        show_all()
        return 0
    if args.stored and (without := [name for name in names if not FIGURES[name].stored]):
        made.error(f"{without[0]} has no stored measurements: leave out --stored")
    needs_root = [name for name in names if FIGURES[name].root and not args.stored]
    if needs_root and hasattr(os, "geteuid") and os.geteuid() != 0:
        made.error(f"{', '.join(needs_root)} need root: sudo {sys.executable} {' '.join(sys.argv)}")
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="commhooks-figures-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        figure = FIGURES[name]
        start = time.monotonic()
        print(f"\n== {name}: measured", flush=True)
        if run(figure.stored if args.stored else figure.command, folder) != 0:
            failed.append(name)
        print(f"({(time.monotonic() - start) / 60:.1f} minutes)")
        for place in figure.printed:
            print(f"\n== {name}: printed in {place}\n\n{section(place)}")
    print(f"\nWhat was written is in {folder}")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
