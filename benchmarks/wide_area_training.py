"""Training over a link with latency, losses and a break: does it end, with which weights, and what does a step cost?

    sudo python benchmarks/wide_area_training.py [--hooks noop ddp fp16 int8 powersgd-4 diloco-10] [--rate 100mbit]
                                                 [--rtt 5 50 150] [--loss 0.001] [--break-off 10] [--steps 20]
                                                 [--model small_transformer] [--bucket-cap-mb 1] [--json FILE]

Two ranks run in two namespaces; see wide_area.py. Every hook trains the same model from the same weights on the same
batches: on a clean link, then with each round trip (--rtt, ms), then with the middle one of them and losses, and then
with a break of --break-off seconds in the middle of the training, in which nothing arrives. Each training has its own
DDP model, with buckets of --bucket-cap-mb, so that a small model has several.

  step           from the end of one step to the end of the next one, on the slower rank: the median. For hooks that
                 communicate once in several steps the mean
  round trips    the additional time of a step over noop on the same link, including the time for the bytes, in round
                 trips of this link
  longest        the longest step: with a break, how long the training stood still
  chosen         by auto; its step is the median of the last 10
  weights        "equal": the weights of every rank at the end are those of the same rank on the clean link, bit by bit
"""

import argparse
import statistics
import sys
import threading
from pathlib import Path

from common import Row, number, parse, parser, report
from hooks import CHOOSING, LABELS, steps_of_round
from link_ranks import LinkRanks
from machine import machine
from models import make, numel
from namespaces import bits_per_second
from wide_area import Weather, WideArea

WORKER = Path(__file__).with_name("wide_area_worker.py")
LATE = 10
"""With a hook that chooses, only this many last steps count, in which it has chosen."""
HOOKS = ["noop", "ddp", "fp16", "int8", "powersgd-4", "diloco-10"]


def conditions(args: argparse.Namespace) -> list[tuple[str, Weather, float]]:
    """Return (name, weather, seconds of a break) of each link; the first link is clean."""
    middle = sorted(args.rtt)[len(args.rtt) // 2]
    found = [("clean", Weather(), 0.0), *((str(Weather(rtt)), Weather(rtt), 0.0) for rtt in args.rtt)]
    lossy = Weather(middle, loss=args.loss)
    found += [(str(lossy), lossy, 0.0)] if args.loss else []
    broken = f"{Weather(middle)}, {args.break_off:g} s of silence"
    return found + ([(broken, Weather(middle), args.break_off)] if args.break_off else [])


def measure(args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    gradient = 4 * numel(make(args.model)[0])
    limit_s = 120 + 20 * args.steps * 8 * gradient / bits_per_second(args.rate)
    with WideArea(Weather()) as link, LinkRanks(link, WORKER, model_name=args.model) as ranks:
        ranks.answer(timeout_s=300)
        link.limit(args.rate)
        for condition, weather, break_s in conditions(args):
            link.turn(weather)
            for label in args.hooks:
                ranks.job(limit_s, label=label, bucket_cap_mb=args.bucket_cap_mb)
                if break_s:
                    usual = next(row for row in reversed(rows) if row["hook"] == label and row["rtt_ms"] > 0)
                    threading.Timer(usual["training_s"] / 2, link.break_off, [break_s]).start()
                row = row_of(ranks.job(limit_s + break_s, steps=args.steps), label)
                row |= {"section": condition, "rtt_ms": weather.rtt_ms, "loss": weather.loss, "break_s": break_s}
                rows.append(row | {"rate": args.rate, "gradient_mb": gradient / 1e6})
            print(f"{condition}: done", file=sys.stderr, flush=True)
    compare(rows)
    return rows


def row_of(answer: Row, label: str) -> Row:
    times = answer["times_s"]
    late = times[-LATE:] if label in CHOOSING else times
    step_s = statistics.mean(times) if steps_of_round(label) > 1 else statistics.median(late)
    row = {"hook": label, "step_ms": 1000 * step_s, "longest_s": max(times), "training_s": sum(times)}
    row |= {key: answer[key] for key in ("hashes", "buckets", "collectives", "chosen")}
    return row | {"megabytes": answer["sent_bytes"] / len(times) / 1e6}


def compare(rows: list[Row]) -> None:
    """Add columns that compare with the same hook on a clean link, and with noop on the same link."""
    clean = {row["hook"]: row["hashes"] for row in rows if row["section"] == "clean"}
    noop = {row["section"]: row["step_ms"] for row in rows if row["hook"] == "noop"}
    for row in rows:
        row["as_on_a_clean_link"] = row["hashes"] == clean[row["hook"]]
        row["replicas_equal"] = len(set(row["hashes"])) == 1
        more_ms = row["step_ms"] - noop.get(row["section"], float("nan"))
        row["round_trips"] = more_ms / row["rtt_ms"] if row["rtt_ms"] and more_ms == more_ms else None
        row["weights"] = "equal" if row["as_on_a_clean_link"] else "DIFFER"
        if row["hook"] in CHOOSING:  # what it chooses depends on the link
            row["weights"] = "replicas equal" if row["replicas_equal"] else "DIFFER"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--hooks", nargs="+", default=HOOKS, metavar="HOOK", help=LABELS)
    arguments.add_argument("--model", default="small_transformer")
    arguments.add_argument("--bucket-cap-mb", type=float, default=1.0)
    arguments.add_argument("--rate", default="100mbit", help="as tc writes it")
    arguments.add_argument("--rtt", type=float, nargs="+", default=[5.0, 50.0, 150.0], help="round trips, ms")
    arguments.add_argument("--loss", type=float, default=0.001, help="share of the packets that is lost; 0: none is")
    arguments.add_argument("--break-off", type=float, default=10.0, metavar="S", help="seconds; 0: no break")
    arguments.add_argument("--steps", type=int, default=20)
    quick = {"model": "tiny_transformer", "bucket_cap_mb": 0.05, "hooks": ["noop", "powersgd-1"], "steps": 3}
    args = parse(arguments, **quick, rtt=[20.0], loss=0.0, break_off=0.5)
    at, rows = machine(), measure(args)
    columns = {
        "link": number("section"),
        "hook": number("hook"),
        "step, ms": number("step_ms", "{:.0f}"),
        "round trips": number("round_trips", "{:.1f}"),
        "longest, s": number("longest_s", "{:.2f}"),
        "MB sent": number("megabytes", "{:.3f}"),
        "collectives": number("collectives"),
        "chosen": number("chosen"),
        "weights": number("weights"),
    }
    report("wide_area_training", f"two ranks, {args.rate}, {args.model}", args, at, rows, columns)
    if any(row["weights"] == "DIFFER" for row in rows):
        raise SystemExit("some weights are not those of the clean link")


if __name__ == "__main__":
    main()
