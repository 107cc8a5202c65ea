"""Step time of real DDP training over a slow link, and the bytes that travelled.

    sudo python benchmarks/link.py [--rates 100mbit 1gbit] [--hooks noop ddp powersgd-1] [--models transformer]
                                   [--compute light heavy] [--steps 5] [--nodes 2] [--ranks-per-node 1]
                                   [--rtt 50 --jitter 5 --loss 0.001]
                                   [--json FILE] [--plot PNG]
    python benchmarks/link.py --from FILE --plot PNG

There are --nodes nodes (two): network namespaces joined by a veth pair or a bridge, over which gloo must send. `tc tbf`
limits each of them. Each has --ranks-per-node ranks. The processes of a model, its data and one DDP model per hook are
kept for all rates. The first steps, in which DDP rebuilds its buckets and PowerSGD has not begun, run without the
limit. Then the hooks take turns. A step is forward, backward and SGD on one torch thread per rank, from a common start
to the end of the slowest rank.

With --rtt (milliseconds), --jitter or --loss it is a wide-area link between two nodes; see wide_area.py.

  light, heavy   transformer (29.4 M parameters): 64 and 512 tokens per rank; resnet18: 8 and 64 images of 64 x 64
  cost removed   the share of the network's cost that the hook removes: 1 - (hook - noop) / (ddp - noop), of medians.
                 100 % is a step as fast as without communication
  MB sent        what the interface of rank 0's node sent in a step (/sys/class/net/*/statistics), including headers
                 and less than 1 kB with which the ranks compare their times
  codec          the hook's own time in a step, without waiting: the mean over the ranks
  state          residuals and factors of the rank that has most of them

For hooks that communicate once in a round of several steps (diloco-30) a sample is the mean over a round.

Hooks that choose (auto, auto-close) begin anew at each rate and amount of computation, with a new model, and decide
before they are measured: after a dozen plain steps they try their candidates. The column "chosen" shows their choice.

Hooks have DDP's usual buckets (25 MB). torch's PowerSGD (torch-RANK) has one bucket, because it hangs on gloo with
more. A hook that has used --seconds at one rate is not measured further there: plain DDP needs 94 s for a step of the
transformer at 10mbit.

--from prints and draws the results that an earlier run has written with --json, and measures nothing.

Measuring needs Linux, root, `ip` and `tc`. The namespaces have names that no other run uses, and are removed at the
end, also after Ctrl-C and after errors. A subset that takes about 3 minutes is

    sudo python benchmarks/link.py --models transformer --rates 100mbit 1gbit --compute light --steps 5 --seconds 12
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from common import Row, number, parse, parser, report, spread, summary
from hooks import CHOOSING, LABELS
from link_figure import draw
from link_ranks import LinkRanks
from link_worker import SIZES
from machine import machine
from models import make, numel
from namespaces import Link, bits_per_second
from wide_area import Weather, WideArea

RATES = ["10mbit", "100mbit", "1gbit", "10gbit", "unlimited"]
HOOKS = ["noop", "ddp", "fp16", "bf16", "powersgd-1", "powersgd-2", "powersgd-4", "torch-1", "torch-4"]
LONG_STEPS_TO_DECIDE = 60
WORKER = Path(__file__).with_name("link_worker.py")


def rows_of(answer: Row, hooks: list[str], **common: Any) -> list[Row]:
    rows = []
    for label in hooks:
        of_hook = answer["hooks"][label]
        times, sent = of_hook["samples"]
        row = {**common, "hook": label, **summary([1000 * each for each in times], "ms"), "steps": len(times)}
        row |= {key: of_hook.get(key) for key in ("chosen", "decided_after", "deciding_s", "why")}
        row |= {"codec_ms": 1000 * of_hook["codec_s"], "state_mb": of_hook["state_bytes"] / 1e6}
        rows.append(row | {"bytes_per_step": summary(sent, "b")["median_b"], "samples_ms": [1000 * t for t in times]})
    medians = {row["hook"]: row["median_ms"] for row in rows}
    for row in rows:
        row["megabytes"] = row["bytes_per_step"] / 1e6
        row["times_noop"] = row["median_ms"] / medians["noop"] if "noop" in medians else None
        row["faster_than_ddp"] = medians["ddp"] / row["median_ms"] if "ddp" in medians else None
        row["cost_removed"] = None
        if medians.get("ddp", 0) > medians.get("noop", float("inf")):
            row["cost_removed"] = 1 - (row["median_ms"] - medians["noop"]) / (medians["ddp"] - medians["noop"])
    return rows


def measure(args: argparse.Namespace) -> list[Row]:
    for rate in args.rates:
        if rate != "unlimited":
            bits_per_second(rate)
    rows = []
    weather = Weather(args.rtt, args.jitter, args.loss)
    if str(weather) and args.nodes != 2:
        raise SystemExit("--rtt, --jitter and --loss are for two nodes")
    kind = WideArea(weather) if str(weather) else Link(args.nodes)
    with kind as link:
        for model in args.models:
            gradient = 4 * numel(make(model)[0])
            link.limit("unlimited")
            order = {"ranks_per_node": args.ranks_per_node, "model_name": model, "hooks": args.hooks}
            with LinkRanks(link, WORKER, **order) as ranks:
                ranks.answer(timeout_s=600)
                for compute in args.compute:
                    for rate in args.rates:
                        link.limit(rate)
                        # Four times the duration of a plain all-reduce of all gradients per step, at most one hour.
                        wire_s = 0 if rate == "unlimited" else 8 * gradient / bits_per_second(rate)
                        limit_s = min(3600, 300 + len(args.hooks) * (args.seconds + 4 * wire_s) * 2)
                        limit_s += (
                            len(CHOOSING.keys() & {each.partition(":")[0] for each in args.hooks})
                            * LONG_STEPS_TO_DECIDE
                            * (4 * wire_s + 5)
                        )
                        size = SIZES[model][compute]
                        answer = ranks.job(limit_s, size=size, steps=args.steps, seconds=args.seconds)
                        idle = [x for x, n in answer["compressed"].items() if x.startswith("powersgd") and not n]
                        if idle:
                            raise RuntimeError(f"{idle} compressed no step")
                        section = f"{model} {compute} {rate} {weather}".strip()
                        common = {"section": section, "model": model, "compute": compute, "batch": size, "rate": rate}
                        common |= {"rtt_ms": args.rtt, "jitter_ms": args.jitter, "loss": args.loss}
                        common |= {"nodes": args.nodes, "ranks_per_node": args.ranks_per_node}
                        rows += rows_of(answer, args.hooks, **common, gradient_mb=gradient / 1e6)
                        print(f"{section}: done", file=sys.stderr, flush=True)
    return rows


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--rates", nargs="+", default=RATES, help="as tc writes them, or unlimited")
    made.add_argument("--hooks", nargs="+", default=HOOKS, metavar="HOOK", help=LABELS)
    made.add_argument("--models", nargs="+", choices=list(SIZES), default=["transformer", "resnet18"])
    made.add_argument("--compute", nargs="+", choices=["light", "heavy"], default=["light", "heavy"])
    made.add_argument("--steps", type=int, default=7, help="per hook and rate, at most")
    made.add_argument("--seconds", type=float, default=30, help="per hook and rate; one step at least")
    made.add_argument("--nodes", type=int, choices=range(2, 9), default=2)
    made.add_argument("--ranks-per-node", type=int, default=1)
    made.add_argument("--rtt", type=float, default=0.0, help="round trip, ms")
    made.add_argument("--jitter", type=float, default=0.0, help="ms that a packet may take longer")
    made.add_argument("--loss", type=float, default=0.0, help="share of the packets that is lost")
    made.add_argument("--from", dest="file", type=Path, metavar="FILE", help="the figures of an earlier --json")
    made.add_argument("--plot", type=Path, metavar="PNG", help="draw step time against bandwidth")
    return made


def main() -> None:
    quick = {"rates": ["100mbit"], "hooks": ["noop", "ddp", "powersgd-1"], "models": ["tiny_transformer"]}
    args = parse(arguments(), **quick, compute=["light"], steps=3)
    if args.file is not None:
        measured = json.loads(args.file.read_text())
        at, rows = measured["machine"], measured["rows"]
    else:
        at, rows = machine(), measure(args)
    columns = {
        "model": number("model"),
        "compute": number("compute"),
        "rate": number("rate"),
        "hook": number("hook"),
        "step, ms: median (quartiles)": spread("ms", 0),
        "cost removed": number("cost_removed", "{:.1%}"),
        "steps": number("steps"),
        "MB sent": number("megabytes", "{:.3f}"),
        "codec, ms": number("codec_ms", "{:.1f}"),
        "state, MB": number("state_mb", "{:.1f}"),
        "chosen": number("chosen"),
        "x noop": number("times_noop", "{:.2f}"),
        "x faster than ddp": number("faster_than_ddp", "{:.2f}"),
    }
    report("link", f"link: DDP training of {rows[0]['nodes']} nodes over a limited link", args, at, rows, columns)
    if args.plot is not None:
        draw(rows, at, args.plot)


if __name__ == "__main__":
    main()
