"""A training on one of several machines that come and go: `python member_job.py JSON`, run by test_members.py.

Prints a line of JSON at the start of each round. `fault`: what happens at which exchange or confirmation. "before": the
process dies before this exchange; "exchanged": it dies after it; "refused": the exchange seems to fail, as if the
connection had been lost; "unsure": the confirmation seems to fail, though it has ended everywhere. "asked": the process
dies while another machine takes its state. `save`: it saves NAME.pt in the folder when it has taken `rounds` outer
steps; `load`: it begins from the file of this machine.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks.comm.membership import Membership, StateServer
from commhooks.local_steps import flat_weights
from commhooks.local_steps.fragments import HeldOuterStep


def new_model(seed: int, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, number: int, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(
        int(hashlib.sha256(f"{name} {number} {rank}".encode()).hexdigest()[:8], 16)
    )
    inputs = torch.randn(4, 6, generator=generator)
    optimizer.zero_grad()
    model(inputs).square().sum(1).mean().backward()
    optimizer.step()


def weights_of(model: nn.Module) -> str:
    """A hash of the weights."""
    return hash_of(model.parameters())


def hash_of(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()[:16]


def main(given: dict) -> None:
    name, rank, world = given["name"], given["rank"], given.get("world", 1)
    print(json.dumps({"what": "process", "pid": os.getpid()}), flush=True)
    if "buffer_bytes" in given:  # several buffers
        flat_weights.BUFFER_BYTES = given["buffer_bytes"]
    model = module = new_model(given.get("seed", 0), given.get("width", 8))
    module.register_buffer("seen", torch.zeros(()))
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{given['folder']}/store-{name}", rank=rank, world_size=world
        )
        model = nn.parallel.DistributedDataParallel(module)
    options = commhooks.DiLoCo(sync_every=given["every"], wire=given["wire"], lr_factor=1.0, **given.get("options", {}))
    members = commhooks.Torchft(name=name, timeout_s=given.get("timeout_s", 20.0), min_machines=given.get("least", 1))
    try:
        hook = commhooks.attach(model, options, members=members)
        assert hook.members is not None
        optimizer = new_optimizer(model)
        position = [0]
        hook.members.register("position", lambda: list(position), lambda value: position.__setitem__(0, value[0]))
        hook.members.register("rank", lambda: {"of": name}, lambda value: said("took", of=value["of"]))
        hook.members.register("object", lambda: [object()], lambda value: None)
        stopping: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
        inject(*given["fault"]) if "fault" in given else None

        def said(what: str, **more: object) -> None:
            print(json.dumps({"what": what, "name": name, "local_rank": rank, **more}), flush=True)

        def state(payload: dict[str, Any]) -> dict[str, Any]:
            """Hashes of all that is saved."""
            found = {key: payload[key] for key in ("step", "exact", "residual")} | {"weights": weights_of(module)}
            for key in ("anchor", "outer_momentum", "residual"):
                tensors = [entry[key] for entry in payload["parameters"].values() if entry.get(key) is not None]
                tensors = [each for each in tensors if each.any()]
                found[key] = [len(tensors), hash_of(tensors)]
            return found

        if "load" in given:
            saved = torch.load(f"{given['folder']}/{given['load']}.pt", weights_only=True)
            module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            hook.load_state_dict(saved["hook"])
            said("loaded", state=state(hook.state_dict("mean")))
        count, before = 0, None
        while count < given["steps"] and hook.stats()["step"] < given.get("rounds", 10**9) and not stopping:
            module.seen += 1 + len(name)  # machines differ, and have that of the first after an outer step
            train_step(model, optimizer, name, count, rank)
            position[0] += 1
            count += 1
            stats = hook.stats()
            now = stats["step"], stats["step_in_round"] == 0
            if now != before and now[1]:
                part = [each.name for each in hook._hook.driver.outer.membership.connected]
                more = {"names": hook.members.names, "part": part, "rank": hook.members.rank, "position": position[0]}
                said("round", step=now[0], count=count, weights=weights_of(module), seen=float(module.seen), **more)
            before = now
            time.sleep(given.get("pause", 0.01))
        if given.get("save"):
            payload = hook.state_dict("mean")
            said("saved", state=state(payload))
            if rank == 0:
                content = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "hook": payload}
                torch.save(content, f"{given['folder']}/{name}.pt")
        sent = hook.members.leave(given.get("wait_s", 0.0))
        said("end", count=count, sent=sent, weights=weights_of(module), step=hook.stats()["step"])
    except commhooks.CommHookError as error:
        print(json.dumps({"what": "error", "name": name, "type": type(error).__name__, "text": str(error)}), flush=True)


def inject(what: str, number: int) -> None:
    exchange, confirm, exchanged, confirmed = HeldOuterStep.exchange, Membership.confirm, [0], [0]
    answer = StateServer._answer

    def new_exchange(held: HeldOuterStep) -> None:
        exchanged[0] += 1
        due = exchanged[0] == number
        if due and what == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(held)
        if due and what == "exchanged":
            os.kill(os.getpid(), signal.SIGKILL)
        if due and what == "refused":
            raise RuntimeError("the connection was lost (a test)")

    def new_confirm(membership: Membership) -> None:
        confirm(membership)
        confirmed[0] += 1
        if what == "unsure" and confirmed[0] == number:
            raise RuntimeError("the connection was lost (a test)")

    def new_answer(server: StateServer, request: Any) -> None:
        if what == "asked" and request.path.endswith("/2"):  # in the middle of the state
            os.kill(os.getpid(), signal.SIGKILL)
        answer(server, request)

    HeldOuterStep.exchange, Membership.confirm, StateServer._answer = new_exchange, new_confirm, new_answer


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
