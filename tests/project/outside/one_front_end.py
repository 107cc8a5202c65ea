"""Trains with one front end of the installed package, where no other is installed. Rank 0 prints
what was sent.

    torchrun --standalone --nproc-per-node 2 one_front_end.py lightning

`FRONT_ENDS` has the names: each needs the extra of its name, `plain` none.
"""

import importlib.util
import os
import sys
import tempfile

import torch
import torch.distributed as dist

import commhooks

POWERSGD = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1}


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


def examples() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [{"x": torch.randn(64), "labels": torch.tensor(number % 8)} for number in range(64)]


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def loader() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(examples(), batch_size=4)


def plain() -> commhooks.CommHook:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = commhooks.attach(model, "powerSGD", hook_options=POWERSGD)
    for batch in loader():
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.load_state_dict(hook.state_dict())
    return hook


def lightning() -> commhooks.CommHook:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_commhooks import CommHookDDP

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategy = CommHookDDP(hook="powerSGD", hook_options=POWERSGD, process_group_backend="gloo")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=2, strategy=strategy, **quiet)
    trainer.fit(Module(), loader())
    return strategy.comm_hook


def accelerate() -> commhooks.CommHook:
    from accelerate import Accelerator

    from accelerate_commhooks import CommHookKwargs

    handler = CommHookKwargs(hook="powerSGD", hook_options=POWERSGD)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    net = network()
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader()
    )
    for batch in batches:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    accelerator.save_state(folder[0])
    accelerator.wait_for_everyone()
    accelerator.load_state(folder[0])
    return handler.attached


def transformers() -> commhooks.CommHook:
    from transformers import TrainingArguments

    from accelerate_commhooks.transformers import CommHookTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.net, {"x": x, "labels": labels})}

    folder = tempfile.mkdtemp()
    args = TrainingArguments(
        folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
    )
    trainer = CommHookTrainer(
        Model(), args, train_dataset=examples(), hook="powerSGD", hook_options=POWERSGD
    )
    trainer.train()
    return trainer.comm_hook


FRONT_ENDS = {
    front_end.__name__: front_end for front_end in (plain, lightning, accelerate, transformers)
}
INSTALLS = {
    "plain": set(),
    "lightning": {"lightning"},
    "accelerate": {"accelerate"},
    "transformers": {"accelerate", "transformers"},
}


def main(name: str) -> None:
    installed = {
        package for package in set().union(*INSTALLS.values()) if importlib.util.find_spec(package)
    }
    if installed != INSTALLS[name]:
        raise SystemExit(
            f"installed are {sorted(installed)}, and not {sorted(INSTALLS[name])} alone"
        )
    stats = FRONT_ENDS[name]().stats()
    if not stats["compressed_steps"]:
        raise SystemExit("no step was compressed")
    if int(os.environ["RANK"]) == 0:
        sent = (
            f"{stats['compressed_steps']} compressed steps, {stats['compression_rate']:.1f} times"
            " less"
        )
        print(f"{name}: {sent}, torch {torch.__version__}, {commhooks.__file__}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts at interpreter shutdown, with or without a hook


if __name__ == "__main__":
    main(*sys.argv[1:])
