"""Runs Python snippets: on two ranks, or as a script of its own."""

import contextlib
import linecache
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import clean_env
import torch
import torch.distributed as dist

from commhooks import registry
from tests.support import warm
from tests.support.doc_snippets import WrongSnippet
from tests.support.repository import REPOSITORY

SCRIPT_LIMIT_S = 150

_DDP = """
import torch
import torch.distributed as dist

model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
train_loader = torch.utils.data.DataLoader(torch.cat(batches), batch_size=2)
"""
_ATTACHED = """
import commhooks

ddp_model = torch.nn.parallel.DistributedDataParallel(model)
hook = commhooks.attach(ddp_model, commhooks.PowerSGD(start_powerSGD_iter=1))
"""
_STEPS = """
for batch in batches:
    ddp_model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if "hook" in globals():
    assert hook.stats()["backward_passes"] >= len(batches), "the hook was not called"
"""


_ACCELERATE_STEPS = """
for batch in batches:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
if hasattr(accelerator.ddp_handler, "attached"):
    assert accelerator.ddp_handler.attached.stats()["backward_passes"] >= len(batches), "the hook was not called"
"""

_TRANSFORMERS = """
import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers_trainer import make_model  # of examples/

model = make_model(width=16)
pieces = torch.arange(256).view(16, 16)
train_dataset = [{"input_ids": piece, "labels": piece} for piece in pieces]
args = TrainingArguments(
    "trainer", use_cpu=True, max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to="none",
    disable_tqdm=True, dataloader_pin_memory=False,
)
"""
_SHARDED = """
from tests.support.accelerators import pretend_to_have_accelerators

settings = {"use_cpu": True, "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "report_to": "none"}
settings |= {"disable_tqdm": True, "dataloader_pin_memory": False}


def TrainingArguments(*args, given=TrainingArguments, **kwargs):
    made = given(*args, **settings | kwargs)
    pretend_to_have_accelerators()
    return made
"""
_TRAINER_TRAINED = """
assert trainer.state.global_step == 4, "nothing was trained"
if hasattr(trainer, "comm_hook"):
    assert trainer.comm_hook.stats()["step"] == 4, "the hook was not called"
"""


def execute(chain: list[tuple[str, str]], needs: str, folder: str) -> None:
    """On every rank: what the snippets need, the snippets, and three training steps if there is a DDP model.

    `chain` holds where each snippet stands and its text.
    """
    config = str(REPOSITORY / "examples" / "accelerate_config.yaml")
    outside = {"ACCELERATE_COMM_HOOK_CONFIG": config} if needs == "accelerate yaml" else {}
    if needs in ("lightning ranks", "fabric ranks"):
        outside = {"TORCHELASTIC_RUN_ID": "snippets", "GROUP_RANK": "0"}  # as Lightning 2.6 knows torchrun
    sharded = needs.endswith(" sharded")
    needs = needs.removesuffix(" yaml").removesuffix(" sharded")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(_DDP if needs in ("ddp", "attached", "accelerate") else "import torch", namespace)
    if needs == "attached":
        exec(_ATTACHED + _STEPS, namespace)
    before = os.getcwd()
    os.chdir(folder)
    with contextlib.ExitStack() as undo:
        undo.callback(os.chdir, before)
        undo.enter_context(_logging_as_before())
        undo.enter_context(mock.patch.dict(registry.COMPRESSORS))
        undo.enter_context(mock.patch.dict(registry.FACTORIES))  # a name that a snippet gives is free again afterwards
        if needs in ("accelerate", "transformers", "lightning ranks", "fabric ranks"):
            from tests.support.accelerators import accelerate_launched, pretend_to_have_accelerators

            undo.enter_context(accelerate_launched(**outside))
            if sharded:
                pretend_to_have_accelerators()
        if needs in ("lightning ranks", "fabric ranks"):
            exec(_LIGHTNING, namespace)
        if needs == "transformers":
            exec(_TRANSFORMERS + (_SHARDED if sharded else ""), namespace)
        for name, text in chain:
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for tracebacks
            exec(compile(text, name, "exec"), namespace)
            dist.barrier()  # what one rank has written, another may read
        if "ddp_model" in namespace:
            exec(_STEPS, namespace)
            for parameter in namespace["ddp_model"].parameters():
                everywhere = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
                dist.all_gather(everywhere, parameter.detach())
                assert all(torch.equal(parameter, other) for other in everywhere), "the replicas differ"
        if needs == "accelerate":
            exec(_ACCELERATE_STEPS, namespace)
        if needs == "transformers":
            exec(_TRAINER_TRAINED, namespace)
        if needs == "lightning ranks":
            exec(_TRAINED, namespace)
        if needs == "fabric ranks":
            assert namespace["fabric"].strategy.comm_hook.stats()["compressed_steps"] > 0, "nothing was compressed"


@contextlib.contextmanager
def _logging_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("commhooks")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers


_LIGHTNING = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

model = BoringModel()
model.layer = torch.nn.Linear(32, 16)  # worth compressing
train_loader = torch.utils.data.DataLoader(RandomDataset(32, 16))
"""
_TRAINED = """
assert trainer.global_step > 0, "nothing was trained"
if hasattr(trainer.strategy, "comm_hook"):
    passes = trainer.strategy.comm_hook.stats()["so_far"]["backward_passes"]
    assert passes == trainer.global_step, "the hook was not called"
"""


def run_script(text: str, folder: Path, check: str = _TRAINED) -> str:
    """As a user would: a file, started once; Lightning starts the other processes. `check`: code at its end. Returns
    what it printed."""
    script = folder / "snippet.py"
    script.write_text(_LIGHTNING + text + check)
    env = clean_env.cleaned(os.environ, str(folder)) | {"PYTHONPATH": str(REPOSITORY)}
    command = [warm.python("lightning.pytorch"), str(script)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SCRIPT_LIMIT_S)
    if done.returncode != 0:
        raise WrongSnippet(f"{text}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr
