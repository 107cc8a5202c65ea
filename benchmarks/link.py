"""Step time of real training with DDP or FSDP2 over a slow link, and the bytes that travelled.

    sudo python benchmarks/link.py [--rates 100mbit 1gbit] [--hooks noop ddp powersgd-1] [--models
                                   transformer] [--compute light heavy] [--steps 5] [--nodes 2]
                                   [--ranks-per-node 1] [--rtt 50] [--json FILE] [--plot PNG]
    python benchmarks/link.py --from FILE --plot PNG

The link is that of limited_link.py, with --rtt (a round trip, ms) a long one, with more than two
--nodes a switch, and each node has --ranks-per-node ranks. The processes of a model, its data and
one model per hook are kept for all rates. The first steps, in which DDP rebuilds its buckets and
PowerSGD has not begun, run without a limit. Then the hooks take turns. A step is forward, backward
and SGD on one torch thread per rank, from a common start to the end of the slowest rank. For hooks
that communicate once in a round of several steps (diloco-30) it is the mean over a round.

  light, heavy   64 and 512 tokens per rank
  cost removed   the share of the network's cost that the hook removes: 1 - (hook - noop) / (ddp -
                 noop), of medians. 100 % is a step as fast as without communication
  MB sent        what the interface of rank 0's node sent in a step (/sys/class/net/*/statistics),
                 including headers and less than 1 kB with which the ranks compare their times
  codec          the hook's own time in a step, without waiting: the mean over the ranks
  state          residuals and factors of the rank that has most of them
  chosen         by auto and auto-close, which begin anew at each rate and decide before they are
  measured

Hooks have DDP's usual buckets (25 MB). torch's PowerSGD (torch-RANK) has one bucket, because it
hangs on gloo with more. A hook that has used --seconds at one rate is not measured further there:
plain DDP needs 94 s for a step of the transformer at 10mbit. A subset that takes about 3 minutes is

    sudo python benchmarks/link.py --models transformer --rates 100mbit 1gbit --compute light
    --steps 5 --seconds 12
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Row, machine, number, parse, parser, report, spread, summary
from hooks import CHOOSING, LABELS, steps_of_round, wrap
from limited_link import (
    Link,
    LongLink,
    Ranks,
    Switch,
    bits_per_second,
    bytes_sent,
    is_rank,
    serve,
)
from models import forward_loss, make, numel

RATES = ["10mbit", "100mbit", "1gbit", "10gbit", "unlimited"]
HOOKS = [
    "noop",
    "ddp",
    "fp16",
    "bf16",
    "powersgd-1",
    "powersgd-2",
    "powersgd-4",
    "torch-1",
    "torch-4",
]
SIZES = {
    "transformer": {"light": 64, "heavy": 512},
    "small_transformer": {"light": 64, "heavy": 512},
    "tiny_transformer": {"light": 64, "heavy": 128},
}
START, WARM_UP = 2, 4
DECIDED_WITHIN = 500
"""Steps in which auto has decided. Steps of a few milliseconds need more trials than long ones."""
LONG_STEPS_TO_DECIDE = 60

# ---- on each rank --------------------------------------------------------------------------------


class Candidate:
    """A model with a hook, and what it needs to train."""

    def __init__(self, label: str, model_name: str, ranks_per_node: int, interface: str) -> None:
        self.label = label
        model, self._task = make(model_name)
        self._model, self.hook = wrap(model, label, start=START, ranks_per_node=ranks_per_node)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._interface = interface

    def step(self, batch: Any) -> tuple[float, int]:
        """Return (seconds on the slowest rank, bytes sent by this node) of one step: the mean over
        a round, within which the ranks do not wait for each other.
        """
        steps = steps_of_round(self.label)
        dist.barrier()
        before = bytes_sent(self._interface)
        started = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad(set_to_none=True)
            forward_loss(self._model, self._task, batch).backward()
            self._optimizer.step()
        passed = torch.tensor([(time.perf_counter() - started) / steps], dtype=torch.float64)
        self._optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(passed, dist.ReduceOp.MAX)
        # Read the counter after that message: until then data of the hook may be in the queue of
        # the link.
        return passed.item(), (bytes_sent(self._interface) - before) // steps

    def decide(self, batch: Any) -> str:
        """Train until a hook that chooses has chosen, and return its choice; equal on all ranks."""
        assert self.hook is not None
        for _ in range(DECIDED_WITHIN):
            if self.hook.state_dict("drop")["notes"]["phase"] == "decided":
                break
            self.step(batch)
        return self.hook.stats()["chosen"]

    def codec_s(self) -> float:
        return 0.0 if self.hook is None else self.hook.stats()["codec_s"] or 0.0

    def state_bytes(self) -> int:
        """Return the bytes of the residuals and factors."""
        if self.hook is None or ":fsdp2" in self.label or self.label.startswith("shards-"):
            return 0
        entries = self.hook.state_dict("per_rank").get("parameters", {}).values()
        kept = [part for entry in entries for part in (entry["q"], *(entry["residual"] or []))]
        return sum(part.nbytes for part in kept if part is not None)


def worker(
    rank: int,
    world_size: int,
    ranks_per_node: int,
    interface: str,
    model_name: str,
    hooks: list[str],
) -> Callable[..., Row]:
    def new(label: str) -> Candidate:
        return Candidate(label, model_name, ranks_per_node, interface)

    task = make(model_name)[1]
    candidates = {label: new(label) for label in hooks}

    def job(size: int, steps: int, seconds: float, decide: bool = True) -> Row:
        torch.manual_seed(rank)
        batch = task.batch(size)
        chosen = {}
        if decide:
            for label in [label for label in hooks if chooses(label)]:
                candidates[label] = new(label)
                chosen[label] = candidates[label].decide(batch)
        before = [candidate.codec_s() for candidate in candidates.values()]
        samples = take_turns_for(candidates, batch, steps, seconds)
        codec_s = [
            (candidate.codec_s() - earlier) / len(samples[label]) / steps_of_round(label)
            for (label, candidate), earlier in zip(candidates.items(), before, strict=True)
        ]
        total_s = torch.tensor(codec_s, dtype=torch.float64)
        state = torch.tensor(
            [candidate.state_bytes() for candidate in candidates.values()], dtype=torch.float64
        )
        dist.all_reduce(total_s)
        dist.all_reduce(state, dist.ReduceOp.MAX)
        answer = {}
        for place, (label, candidate) in enumerate(candidates.items()):
            times, sent = zip(*samples[label], strict=True)
            row = {"times_s": times, "sent": sent, "codec_s": total_s[place].item() / world_size}
            row |= {"state_bytes": state[place].item(), "chosen": chosen.get(label)}
            row["compressed_steps"] = (
                candidate.hook.stats()["compressed_steps"] if candidate.hook else None
            )
            answer[label] = row
        return answer

    return job


def take_turns_for(
    candidates: dict[str, Candidate], batch: Any, steps: int, seconds: float
) -> dict[str, list[tuple[float, int]]]:
    """Like `common.take_turns`; each candidate takes at most `steps` steps, and none after
    `seconds`. All ranks have the same times, those of the slowest rank, so they make the same
    decisions.
    """
    samples: dict[str, list[tuple[float, int]]] = {label: [] for label in candidates}
    labels = list(candidates)
    for turn in range(steps):
        first = turn % len(labels)
        for label in labels[first:] + labels[:first]:
            if not samples[label] or sum(passed for passed, _ in samples[label]) < seconds:
                samples[label].append(candidates[label].step(batch))
    return samples


def chooses(label: str) -> bool:
    return label.partition(":")[0] in CHOOSING


# ---- the table -----------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> list[Row]:
    limited = [rate for rate in args.rates if rate != "unlimited"]
    bits = {rate: bits_per_second(rate) for rate in limited}
    rows = []
    with _link(args) as link:
        for model in args.models:
            gradient = 4 * numel(make(model)[0])
            link.limit("unlimited")
            order = {
                "ranks_per_node": args.ranks_per_node,
                "model_name": model,
                "hooks": args.hooks,
            }
            with Ranks(link, Path(__file__), **order) as ranks:
                ranks.job(
                    600, size=SIZES[model]["light"], steps=WARM_UP, seconds=3600, decide=False
                )
                for compute in args.compute:
                    for rate in args.rates:
                        link.limit(rate)
                        # Four times the duration of a plain all-reduce of all gradients per step,
                        # at most one hour.
                        wire_s = 8 * gradient / bits[rate] if rate in bits else 0
                        limit_s = min(3600, 300 + len(args.hooks) * (args.seconds + 4 * wire_s) * 2)
                        limit_s += (
                            sum(map(chooses, args.hooks)) * LONG_STEPS_TO_DECIDE * (4 * wire_s + 5)
                        )
                        size = SIZES[model][compute]
                        answer = ranks.job(
                            limit_s, size=size, steps=args.steps, seconds=args.seconds
                        )
                        section = f"{model} {compute} {rate}"
                        common = {
                            "section": section,
                            "model": model,
                            "compute": compute,
                            "batch": size,
                            "rate": rate,
                        }
                        common |= {
                            "rtt_ms": args.rtt,
                            "nodes": args.nodes,
                            "ranks_per_node": args.ranks_per_node,
                        }
                        rows += rows_of(answer, common | {"gradient_mb": gradient / 1e6})
                        print(f"{section}: done", file=sys.stderr, flush=True)
    return rows


def _link(args: argparse.Namespace) -> Link:
    if args.nodes > 2:
        return Switch(args.nodes)
    return LongLink(args.rtt) if args.rtt else Link()


def rows_of(answer: Row, common: Row) -> list[Row]:
    rows = []
    for label, measured in answer.items():
        if label.startswith("powersgd") and not measured["compressed_steps"]:
            raise RuntimeError(f"{label} compressed no step")
        times_ms = [1000 * passed for passed in measured["times_s"]]
        row = {
            **common,
            "hook": label,
            **summary(times_ms, "ms"),
            "steps": len(times_ms),
            "samples_ms": times_ms,
        }
        row |= {"chosen": measured["chosen"], "codec_ms": 1000 * measured["codec_s"]}
        row |= {
            "state_mb": measured["state_bytes"] / 1e6,
            "megabytes": summary(measured["sent"], "b")["median_b"] / 1e6,
        }
        rows.append(row)
    medians = {row["hook"]: row["median_ms"] for row in rows}
    for row in rows:
        row["times_noop"] = row["median_ms"] / medians["noop"] if "noop" in medians else None
        for plain in ("ddp", "fsdp2"):
            row[f"faster_than_{plain}"] = (
                medians[plain] / row["median_ms"] if plain in medians else None
            )
        row["cost_removed"] = None
        if medians.get("ddp", 0) > medians.get("noop", float("inf")):
            row["cost_removed"] = 1 - (row["median_ms"] - medians["noop"]) / (
                medians["ddp"] - medians["noop"]
            )
    return rows


# ---- the picture ---------------------------------------------------------------------------------

DRAWN = {
    "noop": ("no communication", "#8c8c8c", ":"),
    "ddp": ("plain DDP, float32", "#222222", "-"),
    "fp16": ("fp16", "#8c6d1f", "-"),
    "torch-1": ("torch's PowerSGD, rank 1", "#c2410c", "--"),
    "torch-4": ("torch's PowerSGD, rank 4", "#ea8a4f", "--"),
    "native-int8": ("commhooks int8", "#0f766e", "-"),
    "native-int4": ("commhooks int4", "#22a699", "-"),
    "native-1": ("commhooks PowerSGD, rank 1", "#1d4ed8", "-"),
    "native-4": ("commhooks PowerSGD, rank 4", "#6d8df0", "-"),
}
"""Name, colour and line of the hooks that are drawn."""
TITLES = {
    "10mbit": "10 Mbit/s",
    "100mbit": "100 Mbit/s",
    "1gbit": "1 Gbit/s",
    "10gbit": "10 Gbit/s",
}


def draw(rows: list[Row], at: Row, file: Path) -> None:
    """Draw step time against bandwidth, for the first model and amount of computation in `rows`.
    `at`: the machine that measured them.
    """
    from matplotlib.figure import Figure

    first = rows[0]
    rows = [
        row for row in rows if (row["model"], row["compute"]) == (first["model"], first["compute"])
    ]
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    drawn: dict[str, list[Row]] = {}
    for row in rows:
        if row["hook"] in DRAWN:
            drawn.setdefault(row["hook"], []).append(row)
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    axis = figure.subplots()
    for hook in sorted(drawn, key=lambda hook: -drawn[hook][0]["median_ms"]):
        name, color, style = DRAWN[hook]
        places = [rates.index(row["rate"]) for row in drawn[hook]]
        seconds = [row["median_ms"] / 1000 for row in drawn[hook]]
        slowest = f"{seconds[0]:.0f} s" if seconds[0] >= 10 else f"{seconds[0]:.2g} s"
        axis.plot(
            places,
            seconds,
            color=color,
            ls=style,
            marker="o",
            ms=4,
            lw=2,
            label=f"{name}: {slowest}",
        )
    axis.set(yscale="log")
    axis.yaxis.set_major_formatter("{x:g} s")
    axis.set_xticks(range(len(rates)), [TITLES.get(rate, rate) for rate in rates])
    axis.grid(axis="y", alpha=0.4)
    axis.spines[:].set_visible(False)
    figure.legend(
        loc="outside left center", frameon=False, title=f"at {TITLES.get(rates[0], rates[0])}"
    )
    model = (
        f"{first['model']}, {first['gradient_mb']:.0f} MB of gradients, {first['batch']} tokens per"
        " rank"
    )
    ranks = f"{first['nodes'] * first['ranks_per_node']} ranks with a core each, {at['cpu']}"
    figure.suptitle("Time of a training step against the bandwidth between two ranks")
    figure.supxlabel(f"{model}; {ranks}; torch {at['torch']}, gloo", fontsize=9, color="#555555")
    figure.savefig(file, dpi=300)


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--rates", nargs="+", default=RATES, help="as tc writes them, or unlimited")
    made.add_argument("--hooks", nargs="+", default=HOOKS, metavar="HOOK", help=LABELS)
    made.add_argument("--models", nargs="+", choices=list(SIZES), default=["transformer"])
    made.add_argument(
        "--compute", nargs="+", choices=["light", "heavy"], default=["light", "heavy"]
    )
    made.add_argument("--steps", type=int, default=7, help="per hook and rate, at most")
    made.add_argument(
        "--seconds", type=float, default=30, help="per hook and rate; one step at least"
    )
    made.add_argument("--nodes", type=int, default=2)
    made.add_argument("--ranks-per-node", type=int, default=1)
    made.add_argument("--rtt", type=float, default=0.0, help="round trip, ms")
    made.add_argument(
        "--from", dest="file", type=Path, metavar="FILE", help="print what --json has written"
    )
    made.add_argument("--plot", type=Path, metavar="PNG", help="draw step time against bandwidth")
    return made


def main() -> None:
    quick = {
        "rates": ["100mbit"],
        "hooks": ["noop", "ddp", "native-1"],
        "models": ["tiny_transformer"],
    }
    args = parse(arguments(), **quick, compute=["light"], steps=3)
    if args.file is not None:
        measured = json.loads(args.file.read_text())
        at, rows = measured["machine"], measured["rows"]
    else:
        at = machine()
        rows = measure(args)
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
        "x faster than fsdp2": number("faster_than_fsdp2", "{:.2f}"),
    }
    report("link", "link: training over a limited link", args, at, rows, columns)
    if args.plot is not None:
        draw(rows, at, args.plot)


if __name__ == "__main__":
    if is_rank():
        serve(worker)
    main()
