"""Trainings of a model sharded by `fully_shard`, for `compare_versions.py`."""

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import commhooks

STEPS, SAVE_AT = 7, 4
WIDTHS = (24, 33, 17, 24, 5)  # uneven on two shards
ROUND = {"sync_every": 3, "outer_lr": 0.7, "outer_momentum": 0.9}
# By name; what comes before the comma is the hook.
SHARDED: dict[str, dict[str, Any]] = {
    "bf16": {},
    "powerSGD": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
    "int8": {"block_size": 32, "start_iter": 2},
    "int4": {"block_size": 32, "start_iter": 2},
    "diloco": ROUND,
    "diloco, float32, fragments": ROUND | {"wire": "float32", "fragments": 3},
    "diloco, delay": ROUND | {"wire": "int8", "delay": 1},
}


class _Training:
    def __init__(
        self, replicas: int, shards: int, hook: str, options: dict[str, Any], seed: int
    ) -> None:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(seed)
        pairs = zip(WIDTHS, WIDTHS[1:], strict=False)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairs))
        for each in self.model:
            fully_shard(each, mesh=mesh["shard"])
        fully_shard(self.model, mesh=mesh["shard"])
        group = mesh["replicate"]
        self.hook = commhooks.attach(
            self.model, hook, hook_options=options or None, replicate_group=group
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.found: dict[str, Any] = {}

    def train(self, begin: int, end: int) -> "_Training":
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            self.optimizer.zero_grad()
            self.model(torch.randn(4, WIDTHS[0], generator=generator)).square().mean().backward()
            self.found[f"gradients {step}"] = [_local(p.grad) for p in self.model.parameters()]
            self.optimizer.step()
            self.found[f"weights {step}"] = [_local(p) for p in self.model.parameters()]
        return self

    def content(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"hook": self.hook, "model": model, "optimizer": optimizer}

    def result(self) -> dict[str, Any]:
        self.hook.synchronize()
        varying = (
            "codec_s",
            "waiting_s",
            "collectives_last_pass",
            "bytes_sent_last_pass",
            "last_issued",
        )
        stats = {
            key: each for key, each in self.hook.stats().items() if not key.startswith(varying)
        }
        saved = self.hook.state_dict()
        return self.found | {
            "stats": stats,
            "plan": self.hook.plan().as_dict(),
            "saved": _locals(saved),
        }


def train_sharded(replicas: int, shards: int, hook: str, options: dict[str, Any]) -> dict[str, Any]:
    """To the end, saving in mid-round; and on from there in a new model."""
    folder = [tempfile.mkdtemp(prefix="compare-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    one = _Training(replicas, shards, hook, options, seed=0).train(0, SAVE_AT)
    one.hook.state_dict()  # ends the round
    dcp.save(one.content(), checkpoint_id=folder[0])
    went_on = one.train(SAVE_AT, STEPS).result()
    other = _Training(replicas, shards, hook, options, seed=5)
    content = other.content()
    dcp.load(content, checkpoint_id=folder[0])
    set_state_dict(
        other.model,
        other.optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    resumed = other.train(SAVE_AT, STEPS).result()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return {"went on": went_on, "resumed": resumed}


def _local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _locals(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _locals(each) for key, each in content.items()}
    return _local(content) if isinstance(content, torch.Tensor) else content
