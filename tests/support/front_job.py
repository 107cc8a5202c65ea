"""Trains on one of several machines that come and go, by a front end: `python front_job.py JSON`.

Prints a line of JSON at the start of each round: the outer step, the machines, a hash of the
weights and of the optimizer's state, the front end's number of steps, the learning rate of its
scheduler. It trains `steps` steps. While there is a file "slow" in the folder, machine a waits
after two rounds until machine b asks for the others, and both train slowly from there on. `lag_s`:
how much longer each step takes. `sigterm`: it gets SIGTERM after so many outer steps, in mid-round;
`sigkill`: it kills itself, after so many outer steps with others. A machine with a `world` of
several ranks shards the model by FSDP2; `port`: of the store of their process group. `members`
false: it trains alone, by DDP.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import commhooks
from commhooks.members.lighthouse import Lighthouse

EVERY = 5


class Rounds:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._slow, self._coming = (Path(settings["folder"]) / name for name in ("slow", "coming"))
        self._before = 0
        self._count = 0
        self._together = 0
        self._sigterm = settings.get("sigterm")
        self._sigkill = settings.get("sigkill")
        self._looks = 0
        self._lag_s = settings.get("lag_s", 0.0)
        if settings["name"] != "a":
            self._announce()

    def _announce(self) -> None:
        """Make the file "coming" when this machine first asks the lighthouse for the others."""
        quorum = Lighthouse.quorum

        def announced(lighthouse: Lighthouse, *given: Any) -> Any:
            self._coming.touch()
            return quorum(lighthouse, *given)

        Lighthouse.quorum = announced

    def look(self, hook: Any, optimizer: Any, steps: int, **more: Any) -> None:
        """Call this after each step."""
        stats = hook.stats()
        self._looks += 1
        if self._lag_s:
            time.sleep(self._lag_s)
            said("trained", steps=self._looks)
        if stats["step"] > self._before and stats["step_in_round"] == 0:
            self._before = stats["step"]
            self._count += 1
            self._together += len(names_in(hook)) > 1
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            more["weights"] = hash_of(weights)
            more["moments"] = hash_of(optimizer.state[p]["exp_avg"] for p in weights)
            lr = optimizer.param_groups[0]["lr"]
            said("round", step=stats["step"], names=names_in(hook), steps=steps, lr=lr, **more)
        in_mid_round = stats["step_in_round"] == 2
        if self._sigterm is not None and self._count >= self._sigterm and in_mid_round:
            self._sigterm = None
            os.kill(os.getpid(), signal.SIGTERM)
        if self._sigkill is not None and self._together >= self._sigkill and in_mid_round:
            os.kill(os.getpid(), signal.SIGKILL)
        while self._before == 2 and self._slow.exists() and not self._coming.exists():
            time.sleep(0.02)
        if self._before >= 2 and self._slow.exists():
            time.sleep(0.3 if len(names_in(hook)) < 2 else 0.05)


def said(what: str, **more: Any) -> None:
    print(
        json.dumps({"what": what, "local_rank": int(os.environ.get("LOCAL_RANK", 0)), **more}),
        flush=True,
    )


def names_in(hook: Any) -> list[str]:
    """Machine a may have the name of the host."""
    names = [] if hook.members is None else hook.members.names
    return sorted("a" if name == socket.gethostname() else name for name in names)


def hash_of(tensors: Any) -> str:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return hashlib.sha256(
        b"".join(tensor.detach().numpy().tobytes() for tensor in local)
    ).hexdigest()[:16]


def new_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def new_optimizer(model: torch.nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Its rate depends on its count of steps, not on the rate before, which comes with the
    # optimizer.
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)


def new_data(name: str, samples: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return TensorDataset(torch.randn(samples, 6, generator=generator))


def lightning(settings: dict[str, Any]) -> None:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from lightning_commhooks import CommHookDDP, CommHookFSDP2, CommHookMonitor

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = new_model(settings["seed"])

        def configure_model(self) -> None:
            if sharded:
                fully_shard(self.net, mesh=self.trainer.strategy.device_mesh["shard"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = new_optimizer(self.net)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    class Looks(pl.Callback):
        rounds = Rounds(settings)
        weights = ""

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            hook = trainer.strategy.comm_hook
            optimizer = trainer.optimizers[0]
            epoch = [trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx]
            self.rounds.look(hook, optimizer, trainer.global_step, epoch=epoch)
            self.weights = hash_of(module.parameters())

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            said("validation", same=hash_of(module.parameters()) == self.weights)

    folder = Path(settings["folder"]) / settings["name"]
    saves = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=settings.get("save_every", 7), save_top_k=-1
    )
    loader = DataLoader(
        new_data(settings.get("data", settings["name"]), settings.get("samples", 48)), batch_size=2
    )
    sharded = settings.get("world", 1) > 1
    strategy = CommHookFSDP2 if sharded else CommHookDDP
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=settings.get("world", 1),
        plugins=[TorchElasticEnvironment()] if sharded else [],
        strategy=strategy(
            hook="diloco",
            hook_options={"sync_every": settings.get("every", EVERY)},
            members=machine(settings),
        ),
        max_steps=settings["steps"],
        max_epochs=-1,
        check_val_every_n_epoch=None,
        val_check_interval=14,
        limit_val_batches=settings.get("validation", 2),
        accumulate_grad_batches=1 if sharded else 2,
        callbacks=[Looks(), CommHookMonitor(), saves],
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Module()
    ended_by = ""
    try:
        trainer.fit(module, loader, loader, ckpt_path=settings.get("resume"))
    except SystemExit as error:
        ended_by = type(error).__name__
    hook = trainer.strategy.comm_hook
    weights = hash_of(module.parameters())
    end = {"steps": trainer.global_step, "round": hook.stats()["step"], "names": names_in(hook)}
    said("end", weights=weights, ended_by=ended_by, **end)


def fabric(settings: dict[str, Any]) -> None:
    from lightning.fabric import Fabric

    from lightning_commhooks.fabric import CommHookDDP

    strategy = CommHookDDP(
        hook="diloco",
        hook_options={"sync_every": settings.get("every", EVERY)},
        members=machine(settings),
    )
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    bare = new_model(settings["seed"])
    optimizer, scheduler = new_optimizer(bare)
    model, optimizer = fabric.setup(bare, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(new_data(settings["name"]), batch_size=4))
    hook = strategy.comm_hook
    done = [0]
    rounds = Rounds(settings)
    hook.members.register("scheduler", scheduler.state_dict, scheduler.load_state_dict)
    hook.members.register("done", lambda: list(done), lambda value: done.__setitem__(0, value[0]))
    while done[0] < settings["steps"]:
        for (inputs,) in loader:
            optimizer.zero_grad()
            fabric.backward(model(inputs).square().mean())
            optimizer.step()
            scheduler.step()
            done[0] += 1
            rounds.look(hook, optimizer, done[0])
            if done[0] >= settings["steps"]:
                break
    fabric.save(
        f"{settings['folder']}/{settings['name']}.ckpt", {"model": model, "optimizer": optimizer}
    )
    said("end", steps=done[0], round=hook.stats()["step"], names=names_in(hook))


def accelerate(settings: dict[str, Any]) -> None:
    """Train with the settings in YAML, a prepared scheduler, and gradients of two batches for a
    step. Saves in mid-round, and at the end goes back to the saved state.
    """
    from accelerate import Accelerator

    from accelerate_commhooks import CommHookKwargs

    folder = Path(settings["folder"]) / settings["name"]
    folder.mkdir(exist_ok=True)
    if settings.get("world", 1) > 1:
        from tests.support.accelerators import sharding_accelerator

        handler = CommHookKwargs(
            hook="diloco",
            hook_options={"sync_every": settings.get("every", EVERY)},
            members=machine(settings),
        )
        accelerator = sharding_accelerator(handler, replicas=1)
    elif settings["name"] == "a":  # by the name of the host
        (folder / "hook.yaml").write_text(
            f"hook: diloco\nhook_options: {{sync_every: {EVERY}}}\nmembers: torchft\n"
        )
        handler = CommHookKwargs.from_config(folder / "hook.yaml")
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        handler.attach(accelerator)
    else:
        handler = CommHookKwargs(
            hook="diloco",
            hook_options={"sync_every": settings.get("every", EVERY)},
            members=machine(settings),
        )
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        handler.attach(accelerator)
    model = new_model(settings["seed"])
    optimizer, scheduler = new_optimizer(model)
    loader = DataLoader(new_data(settings["name"]), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    hook = handler.attached
    done = [0]
    rounds = Rounds(settings)
    signal.signal(signal.SIGTERM, lambda *_: accelerator.set_trigger())
    hook.members.register("done", lambda: list(done), lambda value: done.__setitem__(0, value[0]))
    while done[0] < settings["steps"]:
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done[0] += 1
            rounds.look(hook, optimizer.optimizer, done[0])
            if accelerator.check_trigger():
                hook.members.leave()
                weights = hash_of(model.parameters())
                said(
                    "end",
                    steps=done[0],
                    round=hook.stats()["step"],
                    names=names_in(hook),
                    weights=weights,
                )
                return
            if done[0] in (7, settings["steps"] - 3):
                before = hash_of(model.parameters())
                accelerator.save_state(folder / "state")
                said("saved", same=hash_of(model.parameters()) == before)
            if done[0] >= settings["steps"]:
                break
    last = hook.stats()["step"]
    accelerator.load_state(folder / "state")
    same = hash_of(model.parameters()) == before
    said(
        "end",
        steps=done[0],
        round=last,
        loaded=hook.stats()["step"],
        same=same,
        names=names_in(hook),
    )


def transformers(settings: dict[str, Any]) -> None:
    from transformers import TrainerCallback, TrainingArguments

    from accelerate_commhooks.transformers import CommHookTrainer

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = new_model(settings["seed"])

        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
            output = self.net(x)
            return {"loss": output.square().mean(), "logits": output}

    class Looks(TrainerCallback):
        rounds = Rounds(settings)
        weights = ""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = trainer.optimizer.optimizer
            self.rounds.look(trainer.comm_hook, optimizer, state.global_step)
            self.weights = hash_of(trainer.model.parameters())

        def on_evaluate(self, *_: Any, **kwargs: Any) -> None:
            said("validation", same=hash_of(trainer.model.parameters()) == self.weights)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if "commhooks/members" in logs:
                said("logged", members=logs["commhooks/members"], loss=logs["loss"])

    arguments = TrainingArguments(
        f"{settings['folder']}/{settings['name']}",
        use_cpu=True,
        max_steps=settings["steps"],
        learning_rate=0.01,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=7,
        save_steps=28,
        save_total_limit=2,
        logging_steps=5,
        report_to=settings.get("report_to", "none"),
        enable_jit_checkpoint="sigterm" in settings,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"x": x} for (x,) in new_data(settings["name"])]
    trainer = CommHookTrainer(
        Net(),
        arguments,
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[Looks()],
        hook="diloco",
        hook_options={"sync_every": settings.get("every", EVERY)},
        members=machine(settings),
    )
    trainer.train()
    hook = trainer.comm_hook
    end = {
        "steps": trainer.state.global_step,
        "round": hook.stats()["step"],
        "names": names_in(hook),
    }
    end["weights"] = hash_of(p for group in trainer.optimizer.param_groups for p in group["params"])
    # the last 14 steps once more, as a new machine; it meets the others after the first one
    if settings["name"] == "a" and "every" not in settings:
        trainer.train(
            resume_from_checkpoint=f"{arguments.output_dir}/checkpoint-{settings['steps'] - 14}"
        )
        assert hook is not trainer.comm_hook
        end |= {"again": [trainer.state.global_step, trainer.comm_hook.stats()["step"]]}
    said("end", **end)


def machine(settings: dict[str, Any]) -> commhooks.Torchft | None:
    least = settings.get("least", 1)
    return (
        commhooks.Torchft(name=settings["name"], timeout_s=20.0, min_machines=least)
        if settings.get("members", True)
        else None
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    if arguments.get("world", 1) > 1:  # as torchrun does
        ranks = {
            "RANK": arguments["rank"],
            "LOCAL_RANK": arguments["rank"],
            "WORLD_SIZE": arguments["world"],
        }
        ranks |= {
            "LOCAL_WORLD_SIZE": arguments["world"],
            "GROUP_RANK": 0,
            "TORCHELASTIC_RUN_ID": "x",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": arguments["port"]}
        os.environ.update({name: str(value) for name, value in ranks.items()})
    fronts = {front.__name__: front for front in (lightning, fabric, accelerate, transformers)}
    fronts[arguments["front"]](arguments)
