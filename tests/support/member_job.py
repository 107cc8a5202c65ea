"""A training on one of several machines that come and go: `python member_job.py JSON`, run by
test_members.py.

Prints a line of JSON at the start of each round. `fault`: what happens on the last rank at which
exchange or confirmation. "listed": the process dies before it connects; "before": before the
exchange; "exchanged": after it; "agreed": before the confirmation. "unconnected", "refused",
"unshared": connecting, the exchange, or sharing buffers seems to fail, as if the connection had
been lost; "blocked": connecting with others always fails; "unsure": the confirmation seems to fail,
though it has ended everywhere. "asked": the process dies while another machine takes its state.
`nan`: after how many steps a moment of the last shard is not finite. `save`: it saves NAME in the
folder when it has taken `rounds` outer steps; `load`: it begins from the file of this machine.
`shards`: the model is sharded by fully_shard over so many of the `world` ranks; `columns`: its
first weight by columns. `shift`: is added to a weight of the last shard.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import commhooks
from commhooks.local_steps import flat_weights
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.exchange import OuterExchange
from commhooks.members.peers import Connections
from commhooks.members.state_server import StateServer


def new_model(seed: int, width: int = 8, out: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, out))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    name: str,
    number: int,
    ranks: Sequence[int] = (0,),
) -> None:
    """Train on the data of `ranks` of a machine. A number of ranks that is a power of two divides
    without rounding.
    """
    optimizer.zero_grad()
    for rank in ranks:
        generator = torch.Generator().manual_seed(
            int(hashlib.sha256(f"{name} {number} {rank}".encode()).hexdigest()[:8], 16)
        )
        inputs = torch.randn(4, 6, generator=generator)
        (model(inputs).square().sum(1).mean() / len(ranks)).backward()
    optimizer.step()


def weights_of(model: nn.Module) -> str:
    """A hash of the weights."""
    return hash_of(model.parameters())


def hash_of(tensors: Iterable[torch.Tensor]) -> str:
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in local)).hexdigest()[
        :16
    ]


def shard_of(
    parameters: dict[str, torch.Tensor], shard: int, shards: int
) -> dict[str, torch.Tensor]:
    """The parts of the parameters on this rank of `shards`, as fully_shard divides them."""
    rows = {name: -(-len(each) // shards) for name, each in parameters.items()}
    return {
        name: each[shard * rows[name] : (shard + 1) * rows[name]]
        for name, each in parameters.items()
    }


def main(given: dict) -> None:
    name, rank, world = given["name"], given["rank"], given.get("world", 1)
    print(json.dumps({"what": "process", "pid": os.getpid()}), flush=True)
    if "buffer_bytes" in given:  # several buffers
        flat_weights.BUFFER_BYTES = given["buffer_bytes"]
    model = module = new_model(given.get("seed", 0), given.get("width", 8), given.get("out", 3))
    with torch.no_grad():
        module[0].bias[-1] += given.get("shift", 0)
    shards, replicate_group = given.get("shards"), None
    module.register_buffer("seen", torch.zeros(()))
    if world > 1 or shards is not None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{given['folder']}/store-{name}",
            rank=rank,
            world_size=world,
        )
    if shards is not None:
        mesh = init_device_mesh(
            "cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard")
        )
        replicate_group = mesh["replicate"] if shards < world else None
        columns = given.get("columns")
        for unit in (module[0], module):
            placement = lambda p: Shard(1) if p.dim() == 2 and len(p) > 1 and columns else None  # noqa: E731
            fully_shard(unit, mesh=mesh["shard"], shard_placement_fn=placement)
    elif world > 1:
        model = nn.parallel.DistributedDataParallel(module)
    options = commhooks.DiLoCo(
        sync_every=given["every"], wire=given["wire"], lr_factor=1.0, **given.get("options", {})
    )
    members = commhooks.Torchft(
        name=name,
        timeout_s=given.get("timeout_s", 20.0),
        min_machines=given.get("least", 1),
        wait_for=given.get("wait_for", "first"),
    )
    try:
        hook = commhooks.attach(model, options, members=members, replicate_group=replicate_group)
        assert hook.members is not None
        optimizer = new_optimizer(model)
        position = [0]
        hook.members.register(
            "position", lambda: list(position), lambda value: position.__setitem__(0, value[0])
        )
        hook.members.register(
            "rank", lambda: {"of": name}, lambda value: said("took", of=value["of"])
        )
        hook.members.register("object", lambda: [object()], lambda value: None)
        stopping: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
        inject(*given["fault"]) if "fault" in given and rank == world - 1 else None

        def stops() -> bool:
            """Whether a rank of this machine has got SIGTERM: all of them stop at the same step."""
            got = torch.tensor(len(stopping))
            if world > 1:
                dist.all_reduce(got)
            return bool(got)

        def said(what: str, **more: object) -> None:
            print(json.dumps({"what": what, "name": name, "local_rank": rank, **more}), flush=True)

        def state(payload: dict[str, Any]) -> dict[str, Any]:
            """Hashes of all that is saved."""
            if shards is not None:
                learned = hook._hook.driver.outer.state
                kept = [
                    learned[key][name]
                    for key in ("anchor", "outer_momentum")
                    for name in sorted(learned[key])
                ]
                moments = [each for own in optimizer.state.values() for each in own.values()]
                return {
                    "weights": weights_of(module),
                    "learned": hash_of(kept),
                    "moments": hash_of(moments),
                }
            found = {key: payload[key] for key in ("step", "exact", "residual")} | {
                "weights": weights_of(module)
            }
            for key in ("anchor", "outer_momentum", "residual"):
                tensors = [
                    entry[key]
                    for entry in payload["parameters"].values()
                    if entry.get(key) is not None
                ]
                tensors = [each for each in tensors if each.any()]
                found[key] = [len(tensors), hash_of(tensors)]
            return found

        if "load" in given and shards is not None:
            content = sharded_content(module, optimizer, hook)
            dcp.load(content, checkpoint_id=f"{given['folder']}/{given['load']}")
            weights, moments = content["model"], content["optimizer"]
            set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=moments)
            said("loaded", state=state({}))
        elif "load" in given:
            saved = torch.load(f"{given['folder']}/{given['load']}.pt", weights_only=True)
            module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            hook.load_state_dict(saved["hook"])
            said("loaded", state=state(hook.state_dict("mean")))
        count, before = 0, None
        while (
            count < given["steps"]
            and hook.stats()["step"] < given.get("rounds", 10**9)
            and not stops()
        ):
            # machines differ, and have that of the first after an outer step
            module.seen += 1 + len(name)
            if given.get("nan") == count and rank == (shards or 1) - 1:
                moment = next(iter(optimizer.state.values()))["exp_avg"]
                (moment.to_local() if isinstance(moment, DTensor) else moment).view(-1)[0] = (
                    torch.nan
                )
            train_step(model, optimizer, name, count, (rank,))
            position[0] += 1
            count += 1
            stats = hook.stats()
            now = stats["step"], stats["step_in_round"] == 0
            if now != before and now[1]:
                part = [machine.name for machine in hook._hook.driver.partner.exchanged_with]
                more = {
                    "names": hook.members.names,
                    "part": part,
                    "rank": hook.members.rank,
                    "position": position[0],
                }
                more["nonfinite"] = stats["nonfinite_steps"]
                said(
                    "round",
                    step=now[0],
                    count=count,
                    weights=weights_of(module),
                    seen=float(module.seen),
                    **more,
                )
            before = now
            time.sleep(given.get("sleep_s", 0.01))
        if given.get("save") and shards is not None:
            dcp.save(
                sharded_content(module, optimizer, hook), checkpoint_id=f"{given['folder']}/{name}"
            )
            said("saved", state=state({}))
        elif given.get("save"):
            payload = hook.state_dict("mean")
            said("saved", state=state(payload))
            if rank == 0:
                content = {
                    "model": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "hook": payload,
                }
                torch.save(content, f"{given['folder']}/{name}.pt")
        sent = hook.members.leave(given.get("wait_s", 0.0))
        said("end", count=count, sent=sent, weights=weights_of(module), step=hook.stats()["step"])
    except commhooks.CommHookError as error:
        print(
            json.dumps(
                {"what": "error", "name": name, "type": type(error).__name__, "text": str(error)}
            ),
            flush=True,
        )


def sharded_content(
    module: nn.Module, optimizer: torch.optim.Optimizer, hook: Any
) -> dict[str, Any]:
    weights, moments = get_state_dict(module, optimizer)
    return {"model": weights, "optimizer": moments, "hook": hook}


def inject(what: str, number: int) -> None:
    begin, finite, confirm, exchanged, confirmed = (
        OuterExchange.begin,
        OuterExchange.finite,
        Connections.confirm,
        [0],
        [0],
    )
    answer, connect, connecting, share = (
        StateServer._answer,
        Connections.connect,
        [0],
        CommonState.share,
    )

    def new_begin(exchange: OuterExchange) -> None:
        exchanged[0] += 1
        if exchanged[0] == number and what == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        begin(exchange)

    def new_finite(exchange: OuterExchange) -> torch.Tensor:
        found = finite(exchange)
        if exchanged[0] == number and what == "exchanged":
            os.kill(os.getpid(), signal.SIGKILL)
        if exchanged[0] == number and what == "refused":
            raise RuntimeError("the connection was lost (a test)")
        return found

    def new_confirm(connections: Connections) -> None:
        if what == "agreed" and exchanged[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        confirm(connections)
        confirmed[0] += 1
        if what == "unsure" and confirmed[0] == number:
            raise RuntimeError("the connection was lost (a test)")

    def new_answer(server: StateServer, request: Any) -> None:
        if what == "asked" and request.path.endswith("/2"):  # in the middle of the state
            os.kill(os.getpid(), signal.SIGKILL)
        answer(server, request)

    def new_connect(connections: Connections, *given: Any) -> None:
        connecting[0] += 1
        if what == "blocked" and len(given[0]) > 1:
            raise RuntimeError("no route (a test)")
        if what == "listed" and connecting[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "unconnected" and connecting[0] == number:
            raise RuntimeError("the connection was lost (a test)")
        connect(connections, *given)

    def new_share(common: CommonState, **options: Any) -> Any:
        found = share(common, **options)
        if what == "unshared" and exchanged[0] == number and "group" in options:
            raise RuntimeError("the connection was lost (a test)")
        return found

    OuterExchange.begin, OuterExchange.finite = new_begin, new_finite
    Connections.confirm, StateServer._answer = new_confirm, new_answer
    Connections.connect, CommonState.share = new_connect, new_share


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
