"""A training on one of several machines that come and go: `python member_job.py JSON`, run by
test_members.py.

Prints a line of JSON at the start of each round, and with a `delay` when an exchange has begun
behind the training. `fault`: what happens on the last rank at which
exchange or confirmation. "listed": the process dies before it connects; "before": before the
exchange; "exchanged": after it; "agreed": before the confirmation. "unconnected", "refused",
"unshared": connecting, the exchange, or sharing buffers seems to fail, as if the connection had
been lost; "blocked": connecting with others always fails; "unsure": the confirmation seems to fail,
though it has ended everywhere. "asked": the process dies while another machine takes its state.
Of an exchange behind the training: "unsent": the process dies before it begins; "arrived": some
time after everything of three machines has arrived; "unarrived": it seems to fail.
"slow": its state is read when it has taken so many more outer steps.
`hold`: after how many outer steps it waits, in mid-round, for SIGTERM.
`nan`: after how many steps a moment of the last shard is not finite. `save`: it saves NAME in the
folder when it has taken `rounds` outer steps; `stop_in_flight`: it ends while the exchange after
so many is in flight; `load`: it begins from the file of this machine.
`shards`: the model is sharded by fully_shard over so many of the `world` ranks; `columns`: its
first weight by columns; `compressed`: what FSDP2 sends is compressed, too. `shift`: is added to a
weight of the last shard.
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
from commhooks.local_steps.outer_steps import OuterSteps
from commhooks.members import client
from commhooks.members.attempts import Attempts
from commhooks.members.peers import Connections
from commhooks.members.registered import Registered
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
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return hashlib.sha256(
        b"".join(tensor.detach().numpy().tobytes() for tensor in local)
    ).hexdigest()[:16]


def shard_of(
    parameters: dict[str, torch.Tensor], shard: int, shards: int
) -> dict[str, torch.Tensor]:
    """The parts of the parameters on this rank of `shards`, as fully_shard divides them."""
    rows = {name: -(-len(parameter) // shards) for name, parameter in parameters.items()}
    return {
        name: parameter[shard * rows[name] : (shard + 1) * rows[name]]
        for name, parameter in parameters.items()
    }


def main(settings: dict) -> None:
    name = settings["name"]
    rank = settings["rank"]
    world = settings.get("world", 1)
    print(json.dumps({"what": "process", "pid": os.getpid()}), flush=True)
    if "buffer_bytes" in settings:  # several buffers
        flat_weights.BUFFER_BYTES = settings["buffer_bytes"]
    if "status_limit_s" in settings:  # how long another machine may take to answer
        client.STATUS_LIMIT_S = settings["status_limit_s"]
    model = module = new_model(
        settings.get("seed", 0), settings.get("width", 8), settings.get("out", 3)
    )
    with torch.no_grad():
        module[0].bias[-1] += settings.get("shift", 0)
    shards = settings.get("shards")
    replicate_group = None
    module.register_buffer("seen", torch.zeros(()))
    if world > 1 or shards is not None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{settings['folder']}/store-{name}",
            rank=rank,
            world_size=world,
        )
    if shards is not None:
        mesh = init_device_mesh(
            "cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard")
        )
        replicate_group = mesh["replicate"] if shards < world else None
        columns = settings.get("columns")
        for unit in (module[0], module):
            placement = lambda p: Shard(1) if p.dim() == 2 and len(p) > 1 and columns else None  # noqa: E731
            fully_shard(unit, mesh=mesh["shard"], shard_placement_fn=placement)
    elif world > 1:
        model = nn.parallel.DistributedDataParallel(module)
    options = commhooks.DiLoCo(
        sync_every=settings["every"],
        wire=settings["wire"],
        lr_factor=1.0,
        **settings.get("options", {}),
    )
    members = commhooks.Torchft(
        name=name,
        timeout_s=settings.get("timeout_s", 20.0),
        min_machines=settings.get("least", 1),
        wait_for=settings.get("wait_for", "first"),
    )
    try:
        compressed = commhooks.Shards(block_size=16) if settings.get("compressed") else None
        hook = commhooks.attach(
            model, options, members=members, replicate_group=replicate_group, shards=compressed
        )
        assert hook.members is not None
        optimizer = new_optimizer(model)
        position = [0]
        follows = list[int]()  # while the progress of another machine is taken over
        take_progress = Registered.take_progress

        def follow(registered: Registered, content: bytes) -> None:
            follows.append(1)
            take_progress(registered, content)
            follows.clear()

        Registered.take_progress = follow
        hook.members.register(
            "position", lambda: list(position), lambda value: position.__setitem__(0, value[0])
        )
        hook.members.register(
            "rank",
            lambda: {"of": name, "step": hook.stats()["step"]},
            lambda value: said("followed" if follows else "took", **value),
        )
        hook.members.register("object", lambda: [object()], lambda value: None)
        stopping: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
        inject(*settings["fault"]) if "fault" in settings and rank == world - 1 else None

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
                moments = [
                    moment
                    for of_parameter in optimizer.state.values()
                    for moment in of_parameter.values()
                ]
                return {
                    "weights": weights_of(module),
                    "learned": hash_of(kept),
                    "moments": hash_of(moments),
                }
            saved = {key: payload[key] for key in ("step", "exact", "residual")} | {
                "weights": weights_of(module)
            }
            for key in ("anchor", "outer_momentum", "residual"):
                tensors = [
                    entry[key]
                    for entry in payload["parameters"].values()
                    if entry.get(key) is not None
                ]
                tensors = [tensor for tensor in tensors if tensor.any()]
                saved[key] = [len(tensors), hash_of(tensors)]
            return saved

        if "load" in settings and shards is not None:
            content = sharded_content(module, optimizer, hook)
            dcp.load(content, checkpoint_id=f"{settings['folder']}/{settings['load']}")
            weights, moments = content["model"], content["optimizer"]
            set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=moments)
            said("loaded", state=state({}))
        elif "load" in settings:
            saved = torch.load(f"{settings['folder']}/{settings['load']}.pt", weights_only=True)
            module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            hook.load_state_dict(saved["hook"])
            said("loaded", state=state(hook.state_dict("mean")))
        count = 0
        before = None
        flying = None
        told = 0
        commits = commits_from_now_on()
        attempts = hook._hook.driver.partner.attempts
        anchor = hook._hook.driver.outer.state["anchor"]
        while (
            count < settings["steps"]
            and hook.stats()["step"] < settings.get("rounds", 10**9)
            and not (attempts.current and hook.stats()["step"] == settings.get("stop_in_flight"))
            and not stops()
        ):
            # machines differ, and have that of the first after an outer step
            module.seen += 1 + len(name)
            if settings.get("nan") == count and rank == (shards or 1) - 1:
                moment = next(iter(optimizer.state.values()))["exp_avg"]
                (moment.to_local() if isinstance(moment, DTensor) else moment).view(-1)[0] = (
                    torch.nan
                )
            train_step(model, optimizer, name, count, (rank,))
            position[0] += 1
            count += 1
            stats = hook.stats()
            now = stats["step"], stats["step_in_round"] == 0
            if attempts.current is not flying:
                flying = attempts.current
                if flying is not None:
                    part = [machine.name for machine in flying.decision.machines]
                    said("sent", step=stats["step"], count=count, part=part)
                    if settings.get("fault", [""])[0] == "arrived" and len(part) == 3:
                        flying._exchange.finite()
                        time.sleep(0.5)
                        os.kill(os.getpid(), signal.SIGKILL)
            if now != before and (now[1] or len(commits) > told):
                told = len(commits)
                commit = commits[-1] if commits else {"part": [], "kept": False}
                more = {
                    "anchor": hash_of(anchor[name] for name in sorted(anchor)),
                    "sent": attempts.trained,
                    "whole": attempts.whole,
                    "names": hook.members.names,
                    **commit,
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
            if now[0] == settings.get("hold") and stats["step_in_round"] == 4:
                said("holds")
                while not stopping:
                    time.sleep(0.01)
            time.sleep(settings.get("sleep_s", 0.05))
        if settings.get("save") and shards is not None:
            dcp.save(
                sharded_content(module, optimizer, hook),
                checkpoint_id=f"{settings['folder']}/{name}",
            )
            said("saved", state=state({}))
        elif settings.get("save"):
            payload = hook.state_dict("mean")
            said("saved", state=state(payload))
            if rank == 0:
                content = {
                    "model": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "hook": payload,
                }
                torch.save(content, f"{settings['folder']}/{name}.pt")
        sent = hook.members.leave(settings.get("wait_s", 0.0))
        said(
            "end",
            count=count,
            sent=sent,
            trained=attempts.trained,
            weights=weights_of(module),
            step=hook.stats()["step"],
        )
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


def commits_from_now_on() -> list[dict[str, Any]]:
    """Of each exchange that this machine commits from now on: the names of its machines, and
    whether it was behind the training.
    """
    commit = Attempts.commit
    commits: list[dict[str, Any]] = []

    def new_commit(attempts: Attempts) -> None:
        assert attempts.current is not None
        part = [machine.name for machine in attempts.current.decision.machines]
        commits.append({"part": part, "kept": bool(attempts.current.sent)})
        commit(attempts)

    Attempts.commit = new_commit
    return commits


def inject(what: str, number: int) -> None:
    prepare = OuterSteps.prepare
    finite = OuterExchange.finite
    confirm = Connections.confirm
    exchanged = [0]
    confirmed = [0]
    answer = StateServer._answer
    connect = Connections.connect
    connecting = [0]
    share = CommonState.share
    begin_behind = OuterExchange.begin_behind
    flying = [0]

    def new_prepare(outer: OuterSteps, *given: Any, **options: Any) -> OuterExchange:
        exchanged[0] += 1
        if exchanged[0] == number and what == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        return prepare(outer, *given, **options)

    def new_finite(exchange: OuterExchange) -> torch.Tensor:
        good = finite(exchange)
        if what == "unarrived" and flying[0] == number and exchange.sent:
            flying[0] += 1
            raise RuntimeError("the connection was lost (a test)")
        if exchanged[0] == number and what == "exchanged":
            os.kill(os.getpid(), signal.SIGKILL)
        if exchanged[0] == number and what == "refused":
            raise RuntimeError("the connection was lost (a test)")
        return good

    def new_confirm(connections: Connections) -> None:
        if what == "agreed" and exchanged[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        confirm(connections)
        confirmed[0] += 1
        if what == "unsure" and confirmed[0] == number:
            raise RuntimeError("the connection was lost (a test)")

    def new_answer(server: StateServer, reply: Any) -> None:
        path = reply.request.path
        part = path.startswith("/state/") and path.endswith("/2")
        if what == "slow" and part:
            enough = exchanged[0] + number
            while exchanged[0] < enough:
                time.sleep(0.02)
        if what == "asked" and part:  # in the middle of the state
            os.kill(os.getpid(), signal.SIGKILL)
        answer(server, reply)

    def new_connect(connections: Connections, *arguments: Any) -> None:
        connecting[0] += 1
        if what == "blocked" and len(arguments[0]) > 1:
            raise RuntimeError("no route (a test)")
        if what == "listed" and connecting[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "unconnected" and connecting[0] == number:
            raise RuntimeError("the connection was lost (a test)")
        connect(connections, *arguments)

    def new_share(common: CommonState, **options: Any) -> Any:
        shared = share(common, **options)
        if what == "unshared" and exchanged[0] == number and "group" in options:
            raise RuntimeError("the connection was lost (a test)")
        return shared

    def new_begin_behind(exchange: OuterExchange, *given: Any) -> None:
        flying[0] += 1
        if what == "unsent" and flying[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        begin_behind(exchange, *given)

    OuterExchange.begin_behind = new_begin_behind
    OuterSteps.prepare = new_prepare
    OuterExchange.finite = new_finite
    Connections.confirm = new_confirm
    StateServer._answer = new_answer
    Connections.connect = new_connect
    CommonState.share = new_share


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
