"""Predictions of the cost model of `commhooks network`, compared with measured steps, and for
clusters that nobody has here.

    sudo python benchmarks/step_cost.py [--nodes 2 4 8 16] [--rate 50mbit] [--steps 3] [--json FILE]
    python benchmarks/step_cost.py --clusters

The first form trains a small transformer over a switch (limited_link.py), with one rank per node.
The ranks measure the network as `commhooks network` does; the prediction is the time of `noop` and
what the model (commhooks/tools/step_cost.py) says of the network and the codec. The ranks share the
cores, so that a step computes longer with more of them.

  error   how much longer the measured step is than the predicted one

The second form prints predicted steps of a model with --params parameters on nodes of 8 GPUs, which
were never measured. It assumes --step-ms of computing that nothing overlaps, the bandwidth of each
machine in --rates, --inside between the GPUs of a machine, and --latency for a message. On a GPU
the codec is taken to be as far from the speed of memory (--memory) as on the CPU.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import link
import torch
import torch.distributed as dist
from common import Row, machine, number, parse, parser, report
from limited_link import Link, Ranks, Switch, bits_per_second, is_rank, serve
from models import make, numel

from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.tools import network, step_cost
from commhooks.tools.step_cost import CANDIDATES, SHARDINGS, Cluster

MODEL = "small_transformer"
BY_LABEL = {candidate.label: candidate for candidate in (*CANDIDATES, *SHARDINGS)}
MEASURED = {
    "ddp": "plain DDP",
    "bf16": "bf16",
    "native-int8": "int8",
    "native-int4": "int4",
    "native-4": "powerSGD rank 4",
    "diloco-5": "diloco, every 5 steps",
    "fsdp2": "fully_shard",
    "shards-bf16": 'shards="bf16"',
    "shards-int8": 'shards="int8"',
}
"""Labels of the benchmarks, and of the model."""
CPU = torch.device("cpu")


def worker(rank: int, world_size: int, **order: Any) -> Callable[..., Row]:
    steps = link.worker(rank, world_size, **order)

    def job(measures_network: bool = False, **job_order: Any) -> Row:
        if not measures_network:
            return steps(**job_order)
        group = dist.group.WORLD
        assert group is not None
        measured = network.measure_link(group, CPU)
        memory = network.memory_speed(group, CPU)
        return {
            "mbit_per_s": measured.mbit_per_s,
            "latency_ms": measured.latency_ms,
            "memory": memory,
        }

    return job


def measure(args: argparse.Namespace) -> list[Row]:
    rows = []
    hooks = ["noop", *MEASURED]
    size = link.SIZES[MODEL]["light"]
    for nodes in args.nodes:
        with Link() if nodes == 2 else Switch(nodes) as limited:
            limited.limit("unlimited")
            order = {"model_name": MODEL, "hooks": hooks}
            with Ranks(limited, Path(__file__), **order) as ranks:
                ranks.job(1800, size=size, steps=link.WARM_UP, seconds=3600, decide=False)
                limited.limit(args.rate)
                at = ranks.job(1800, measures_network=True)
                answer = ranks.job(1800, size=size, steps=args.steps, seconds=3600, decide=False)
        common = {"section": str(nodes), "ranks": nodes, "rate": args.rate, **at}
        measured = link.rows_of(answer, {"gradient_mb": 0.0})
        of_nodes = compared(measured, cluster_of(nodes, at), common)
        errors = ", ".join(f"{row['hook']} {row['error']:+.0%}" for row in of_nodes)
        print(f"{nodes} ranks: {errors}", file=sys.stderr, flush=True)
        rows += of_nodes
    return rows


def cluster_of(nodes: int, at: Row) -> Cluster:
    measured = network.Link(at["mbit_per_s"], at["latency_ms"])
    ranks = [[rank] for rank in range(nodes)]
    return network.cluster_of(ranks, measured, measured.mbit_per_s, "gloo", at["memory"])


def compared(measured: list[Row], cluster: Cluster, common: Row) -> list[Row]:
    """Return a row with the prediction for each measured hook."""
    medians = {row["hook"]: row["median_ms"] for row in measured}
    model = make(MODEL)[0]
    parameters = [ParameterInfo(name, weight) for name, weight in model.named_parameters()]
    layers = sum(isinstance(part, torch.nn.TransformerEncoderLayer) for part in model.modules())
    in_layers = sum(map(numel, (part for part in model.modules() if _is_layer(part))))
    rows = []
    for hook, label in MEASURED.items():
        candidate = BY_LABEL[label]
        if isinstance(candidate, step_cost.Sharding):
            # the root, with embedding and output, is not gathered again in the backward pass
            gathers = 1 + in_layers / numel(model)
            exchange = step_cost.sharded_exchange(
                candidate, numel(model), layers + 1, gathers, cluster
            )
        else:
            exchange = step_cost.exchange(candidate, parameters, cluster)
        predicted_ms = medians["noop"] + 1000 * exchange.seconds
        megabytes = next(row["megabytes"] for row in measured if row["hook"] == hook)
        row = {
            "hook": label,
            "noop_ms": medians["noop"],
            "measured_ms": medians[hook],
            "predicted_ms": predicted_ms,
            "error": medians[hook] / predicted_ms - 1,
            "megabytes": megabytes,
            "predicted_megabytes": exchange.bytes_leaving / 1e6,
        }
        rows.append({**common, **row})
    return rows


def _is_layer(part: torch.nn.Module) -> bool:
    return isinstance(part, torch.nn.TransformerEncoderLayer)


def predict(args: argparse.Namespace) -> list[Row]:
    """Predict steps on nodes of 8 GPUs."""
    size = network.parsed_size(args.params)
    model = step_cost.transformer(size)
    parameters = [ParameterInfo(name, weight) for name, weight in model.items()]
    rows = []
    for rate in args.rates:
        for ranks in args.ranks:
            cluster = Cluster(
                ranks // 8,
                8,
                bits_per_second(rate),
                bits_per_second(args.inside),
                args.latency * 1e-6,
                "nccl",
                memory=1e9 * args.memory,
            )
            made = [
                exchange
                for candidate in CANDIDATES
                for exchange in step_cost.arrangements(candidate, parameters, cluster)
            ]
            for exchange in made + step_cost.sharded_exchanges(size, cluster):
                row = {"section": rate, "rate": rate, "ranks": ranks}
                row |= {"hook": exchange.candidate.label, "nodes": exchange.between_nodes}
                row |= {"predicted_ms": args.step_ms + 1000 * exchange.seconds}
                row |= {"codec_ms": 1000 * exchange.codec_s}
                rows.append(row | {"predicted_megabytes": exchange.bytes_leaving / 1e6})
    return rows


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16])
    made.add_argument("--rate", default="50mbit", help="as tc writes it")
    made.add_argument("--steps", type=int, default=3, help="per hook")
    made.add_argument("--clusters", action="store_true", help="predict, and measure nothing")
    made.add_argument("--params", default="7B")
    made.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    made.add_argument("--rates", nargs="+", default=["10gbit", "100gbit"], help="of a machine")
    made.add_argument("--inside", default="1000gbit", help="of a GPU, inside its machine")
    made.add_argument("--latency", type=float, default=20.0, help="of a message, microseconds")
    made.add_argument("--memory", type=float, default=1500.0, help="of a GPU, GB/s")
    made.add_argument("--step-ms", type=float, default=1000.0, help="of computing")
    return made


def main() -> None:
    args = parse(arguments(), clusters=True, ranks=[64], params="124M")
    at = machine()
    rows = predict(args) if args.clusters else measure(args)
    columns = {
        "rate": number("rate"),
        "ranks": number("ranks"),
        "hook": number("hook"),
        "noop, ms": number("noop_ms", "{:,.0f}"),
        "measured, ms": number("measured_ms", "{:,.0f}"),
        "predicted, ms": number("predicted_ms", "{:,.0f}"),
        "error": number("error", "{:+.0%}"),
        "codec, ms": number("codec_ms", "{:,.0f}"),
        "MB sent": number("megabytes", "{:,.1f}"),
        "predicted": number("predicted_megabytes", "{:,.1f}"),
        "between nodes": number("nodes"),
        "link, Mbit/s": number("mbit_per_s", "{:.1f}"),
        "all-reduce of a number, ms": number("latency_ms", "{:.2f}"),
    }
    report("step_cost", "step_cost: predicted steps", args, at, rows, columns)


if __name__ == "__main__":
    if is_rank():
        serve(worker)
    main()
