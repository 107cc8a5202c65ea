"""Bytes between replicas, and peak memory per rank, of FSDP2 through Accelerate: native HSDP beside the hooks.

    sudo python benchmarks/replicas.py [--hooks none allreduce powerSGD int8] [--steps 5] [--width 2048]

Two network namespaces are the machines, with two ranks each. Each machine holds one replica, sharded over its ranks.
`none` is `CommHookKwargs(hook=None)`: Accelerate's own HSDP.

  MB sent        what the interface of the first machine sent in a step (/sys/class/net/*/statistics), with headers
  MB planned     according to the plans of its two ranks
  peak           maximum memory that torch had allocated in `prepare` and in the steps, on the rank with the most
  state          residuals, factors and buffers of that rank, according to the plan

Needs Linux, root and `ip`; see link.py. Hooks compress from the second step on; the bytes are those from the third on.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Cell, Row, parse, parser, report
from link_ranks import PORT, LinkRanks, bytes_sent
from machine import machine
from memory import Ledger
from namespaces import SUBNET, Link

LAYERS, BATCH = 8, 8
OPTIONS: dict[str, Row] = {
    "powerSGD": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 1},
    "int8": {"start_iter": 1},
}


# ---- on each rank ----------------------------------------------------------------------------------------------------


def worker(place: Row) -> None:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
    from accelerate.parallelism_config import ParallelismConfig

    from accelerate_commhooks import CommHookKwargs

    torch.set_num_threads(1)
    rank, size = place["rank"], place["world_size"]
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": str(PORT), "ACCELERATE_USE_CPU": "true"}
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # Accelerate 1.15 shards on accelerators only
    hook, width = place["hook"], place["width"]
    handler = CommHookKwargs(hook=None if hook == "none" else hook, hook_options=OPTIONS.get(hook))
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=width, cpu_ram_efficient_loading=False
        ),
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    )
    handler.attach(accelerator)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ledger, made = Ledger(), []
    ledger.trace(lambda: made.extend(accelerator.prepare(model, optimizer)))
    model, optimizer = made

    def step() -> None:
        accelerator.backward(model(torch.randn(BATCH, width)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    ledger.trace(step)
    ledger.trace(step)
    dist.barrier()
    started = bytes_sent(place["interface"])
    for _ in range(place["steps"]):
        ledger.trace(step)
    dist.barrier()
    passed = bytes_sent(place["interface"]) - started
    plan = None if handler.attached is None else handler.attached.plan().as_dict()
    own: Row = {
        "peak": max(ledger.peaks),
        "state": 0 if plan is None else plan["memory_bytes"]["total"],
        "planned": None if plan is None else plan["bytes_after"] + plan["flag_bytes"],
    }
    every: list[Any] = [None] * size
    dist.all_gather_object(every, own)
    if rank == 0:
        of_node = [each["planned"] for each in every[:2]]
        print(
            json.dumps(
                {
                    "sent": passed / place["steps"],
                    "planned": None if None in of_node else sum(of_node),
                    "peak": max(each["peak"] for each in every),
                    "state": max(each["state"] for each in every),
                }
            ),
            flush=True,
        )
    sys.stdin.read()


# ---- the table -------------------------------------------------------------------------------------------------------


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--hooks", nargs="+", default=["none", "allreduce", "powerSGD", "int8"])
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--width", type=int, default=2048)
    args = parse(made, width=256, steps=2)
    at, rows = machine(), []
    for hook in args.hooks:
        order = {"hook": hook, "width": args.width, "steps": args.steps}
        with Link(nodes=2) as link, LinkRanks(link, Path(__file__), ranks_per_node=2, **order) as ranks:
            found = ranks.answer(600)
        rows.append({"hook": hook, **{name: None if x is None else round(x / 1e6, 3) for name, x in found.items()}})
        print(rows[-1], file=sys.stderr)
    columns: dict[str, Cell] = {"hook": lambda row: row["hook"]}
    for name, title in (("sent", "MB sent"), ("planned", "MB planned"), ("peak", "peak, MB"), ("state", "state, MB")):
        columns[title] = lambda row, name=name: "" if row[name] is None else f"{row[name]:.3f}"  # type: ignore[misc]
    title = f"{LAYERS} linear layers of width {args.width}, two machines of two ranks, FSDP2 through Accelerate"
    report("replicas", title, args, at, rows, columns)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        worker(json.loads(sys.argv[1]))
    else:
        main()
