"""What a machine of members.py does: it trains a small model until it is killed.

    python benchmarks/members_training.py JSON  # the arguments of `train`

Appends lines of JSON to a file: "ready" when Python has started, and then one line for each outer
step, with how many of this machine's steps have got into the weights by it.
"""

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import commhooks


class Ended(NamedTuple):
    """An outer step. `number`: equal on all machines. `kept`: whether the steps of this machine
    since the one before are in the weights.
    """

    number: int
    machines: int
    kept: bool


class Alone:
    """Trains with nobody."""

    def __init__(self, model: nn.Module, optimizer: Any, every: int, **given: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.every = every
        self.steps = 0

    def after_step(self) -> Ended | None:
        self.steps += 1
        return None if self.steps % self.every else Ended(self.steps // self.every, 1, True)


class Members(Alone):
    """With `members="torchft"`."""

    def __init__(
        self, *args: Any, lighthouse: str, name: str, delay: int = 0, **given: Any
    ) -> None:
        super().__init__(*args, **given)
        members = commhooks.Torchft(lighthouse=lighthouse, name=name, timeout_s=20)
        config = commhooks.DiLoCo(sync_every=self.every, delay=delay)
        self.hook = commhooks.attach(self.model, config, members=members)
        self.last: int | None = None

    def after_step(self) -> Ended | None:
        stats = self.hook.stats()
        if stats["step_in_round"]:
            return None
        # A machine that has taken the state of another one has lost its steps.
        kept = self.last is not None and stats["step"] == self.last + 1
        self.last = stats["step"]
        return Ended(stats["step"], stats["members"], kept)


class Restarted(Alone):
    """With DDP, DiLoCo and checkpoints, from the newest of which it goes on."""

    def __init__(
        self, *args: Any, folder: str, name: str, save_every: int, place: int, **given: Any
    ) -> None:
        super().__init__(*args, **given)
        self.checkpoint = Path(folder, "checkpoint.pt")
        self.save_every = save_every
        Path(folder, f"{name}.pid").write_text(str(os.getpid()))
        dist.init_process_group("gloo")
        self.model = nn.parallel.DistributedDataParallel(self.model)
        self.hook = commhooks.attach(self.model, commhooks.DiLoCo(sync_every=self.every))
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.steps = saved.pop("steps")
            for key, content in saved.items():
                getattr(self, key).load_state_dict(content)

    def after_step(self) -> Ended | None:
        ended = super().after_step()
        if self.steps % self.save_every == 0:
            parts = ("model", "optimizer", "hook")
            content = {key: getattr(self, key).state_dict() for key in parts}
            if dist.get_rank() == 0:
                replace(self.checkpoint, content | {"steps": self.steps})
        return ended and ended._replace(machines=dist.get_world_size())


def replace(checkpoint: Path, content: dict[str, Any]) -> None:
    """Save `content` so that a process that is killed meanwhile leaves the old file whole."""
    torch.save(content, checkpoint.with_suffix(".new"))
    checkpoint.with_suffix(".new").rename(checkpoint)


class TorchftLocalSGD(Alone):
    """With torchft's own LocalSGD, and the options of its `train_diloco.py`."""

    loses_what_failed = False
    """Whether a machine goes back to the last outer step if the next one fails."""

    def __init__(self, *args: Any, lighthouse: str, place: int, **given: Any) -> None:
        super().__init__(*args, **given)
        from torchft.checkpointing.http_transport import HTTPTransport
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=10)),
            use_async_quorum=False,
            min_replica_size=1,
            load_state_dict=self.take,
            state_dict=lambda: {part: getattr(self, part).state_dict() for part in self.parts},
            replica_id=f"machine_{place}",
            timeout=datetime.timedelta(seconds=30),
            checkpoint_transport=HTTPTransport(
                timeout=datetime.timedelta(seconds=10), num_chunks=0
            ),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=lighthouse,
            hostname="127.0.0.1",
        )
        self.store = store
        self.last = 0
        self.healed = False
        self.enter()

    parts = ("model", "optimizer")

    def enter(self) -> None:
        from torchft.local_sgd import LocalSGD

        LocalSGD(self.manager, self.model, self.optimizer, sync_every=self.every).__enter__()

    def take(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            getattr(self, part).load_state_dict(state[part])
        self.healed = True

    def after_step(self) -> Ended | None:
        self.steps += 1
        if self.steps % self.every:
            return None
        number = self.manager.current_step()
        committed = number > self.last
        kept = committed and not self.healed
        ended = Ended(number, self.manager.num_participants(), kept)
        lost = self.healed or self.loses_what_failed
        self.last, self.healed = number, False
        return ended if committed or lost else None


class TorchftDiLoCo(TorchftLocalSGD):
    """With torchft's own DiLoCo."""

    loses_what_failed = True

    def enter(self) -> None:
        from torchft.local_sgd import DiLoCo

        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        DiLoCo(
            self.manager,
            [self.model],
            self.optimizer,
            outer,
            sync_every=self.every,
            backup_device=torch.device("cpu"),
        ).__enter__()


WAYS: dict[str, type[Alone]] = {
    "alone": Alone,
    "members": Members,
    "torchrun": Restarted,
    "torchft-DiLoCo": TorchftDiLoCo,
    "torchft-LocalSGD": TorchftLocalSGD,
}


def train(
    folder: str,
    job: str,
    life: str,
    step_s: list[float],
    every: int,
    width: int = 512,
    **given: Any,
) -> None:
    """Train as machine `given["place"]` until killed; a step takes `step_s[place]` seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    place = given.setdefault("place", int(os.environ.get("RANK", 0)))
    name = f"machine-{place}"
    model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(os.getpid())
    with open(Path(folder, f"{life}{place}.rows"), "a") as file:

        def write(**row: Any) -> None:
            line = {"time": time.time(), "machine": name, **row}
            print(json.dumps(line), file=file, flush=True)

        if job == "members" or job.startswith("torchft"):  # a part of the start
            import torchft.manager  # noqa: F401
        write(event="ready")
        way = WAYS[job](model, optimizer, every, folder=folder, name=name, **given)
        _train(way, step_s[place], generator, write)


def _train(
    way: Alone, step_s: float, generator: torch.Generator, write: Callable[..., None]
) -> None:
    losses: list[float] = []
    while True:
        began = time.monotonic()
        inputs = torch.randn(32, 256, generator=generator)
        loss = nn.functional.cross_entropy(way.model(inputs), inputs[:, :10].argmax(1))
        time.sleep(max(0.0, began + step_s - time.monotonic()))
        loss.backward()
        losses.append(loss.item())
        way.optimizer.step()
        way.optimizer.zero_grad()
        if (ended := way.after_step()) is not None:
            write(
                step=ended.number,
                members=ended.machines,
                steps=len(losses) if ended.kept else 0,
                loss=sum(losses) / len(losses),
            )
            losses = []


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
