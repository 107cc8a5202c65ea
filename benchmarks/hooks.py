"""The candidates of the benchmarks, by label.

`noop`, `ddp` (no hook), `allreduce`, `fp16`, `bf16`, `powersgd-4` (commhooks, rank 4), `native-4`
and `same-4` (commhooks with these options), `torch-4` (torch's powerSGD_hook) and `torch-same-4`;
"same" is batch_tensors_with_same_shape. `int8`, `int4`, `native-int8` and `native-int4` are the
quantised hooks. `auto` and `auto-close` choose one of them (quality "same" and "close"). Only
labels with "native", and hooks that auto chooses, use the native kernel. `diloco-30` (with int4)
communicates every 30 steps; in `diloco-30-10` the exchange may take 10 steps. The suffix `:one`
selects one bucket: one all-reduce for all P, and one for all Q. For benchmarks with several ranks
per node: `:nodes` compresses between nodes only, `:fsdp2` shards the model inside the node
(`fully_shard`), and `hsdp` and `hsdp-bf16` are `fully_shard` on both dimensions without a hook,
with gradients reduced in float32 or bfloat16. `fsdp2` shards over all ranks of all nodes, without a
hook, and `shards-int8` and `shards-bf16` also compress what it sends (`commhooks.Shards`); `:ahead`
gathers the next layer while one is computed (`set_modules_to_forward_prefetch`).
"""

import functools
import itertools
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks

ONE_BUCKET_MB = 10_000
LABELS = (
    "noop, ddp, allreduce, fp16, bf16, powersgd-RANK, native-RANK, same-RANK,"
    " diloco-STEPS, diloco-STEPS-DELAY, auto, auto-close, int8, int4, native-int8,"
    " native-int4, torch-RANK, torch-same-RANK; with :one, :nodes, :fsdp2; hsdp, hsdp-bf16, fsdp2,"
    " shards-FORM; with :ahead"
)
SIMPLE = {
    "noop": commhooks.Noop,
    "allreduce": commhooks.AllReduce,
    "fp16": commhooks.FP16Compress,
    "bf16": commhooks.BF16Compress,
}
QUANTISED = {"int8": commhooks.Int8Compress, "int4": commhooks.Int4Compress}
CHOOSING = {"auto": "same", "auto-close": "close"}
"""Quality of the hooks that decide after some steps."""
OPTIONS = {
    "powersgd": (),
    "native": (),
    "same": ("batch_tensors_with_same_shape",),
}


def _local_steps(label: str) -> Any:
    """Return the config of a hook that communicates once in several steps, or None."""
    name, *numbers = label.split("-")
    if name != "diloco":
        return None
    return commhooks.DiLoCo(**dict(zip(("sync_every", "delay"), map(int, numbers), strict=False)))


def starts_late(label: str) -> bool:
    """Whether it is PowerSGD, which begins some steps after the training."""
    kind, _, rank = label.rpartition("-")
    return kind.startswith(("torch", "native", "powersgd")) and rank.isdigit()


def steps_of_round(label: str) -> int:
    """Return the number of steps from one communication to the next."""
    config = _local_steps(label)
    return 1 if config is None else int(config.sync_every)


def wrap(
    model: torch.nn.Module,
    label: str,
    start: int = 2,
    bucket_cap_mb: float | None = None,
    ranks_per_node: int | None = None,
    **ddp: Any,
) -> tuple[Any, commhooks.CommHook | None]:
    """Wrap `model` in DDP, or shard it, with this hook, and also return the CommHook (None for
    torch's hooks and without a hook). On gloo torch's PowerSGD always gets one bucket, because it
    hangs with several. `start`: the step at which PowerSGD and quantising begin; torch requires at
    least 2.
    """
    label, _, suffix = label.partition(":")
    if label.startswith("hsdp"):
        return shard(model, ranks_per_node, both=True, low="bf16" in label), None
    if label == "fsdp2" or label.startswith("shards-"):
        form = label.partition("-")[2]
        return _shard_over_all(model, form, ranks_per_node, ahead=suffix == "ahead")
    kind, _, rank_text = label.rpartition("-")
    kind = kind or label
    if suffix == "one" or kind.startswith("torch") and dist.get_backend() == "gloo":
        bucket_cap_mb = ONE_BUCKET_MB
    wrapped: Any
    if suffix == "fsdp2":
        wrapped = shard(model, ranks_per_node, both=False)
    else:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **ddp)
    if label == "ddp":
        return wrapped, None
    if kind in ("torch", "torch-same"):
        state = torch_hooks.PowerSGDState(
            None,
            matrix_approximation_rank=int(rank_text),
            start_powerSGD_iter=start,
            batch_tensors_with_same_shape=kind == "torch-same",
        )
        wrapped.register_comm_hook(state, torch_hooks.powerSGD_hook)
        return wrapped, None
    config: Any = SIMPLE[label]() if label in SIMPLE else _local_steps(label) or label
    if label in CHOOSING:
        config = commhooks.Auto(quality=CHOOSING[label])
    elif label.removeprefix("native-") in QUANTISED:
        config = QUANTISED[label.removeprefix("native-")](start_iter=start)
    elif kind in OPTIONS:
        options: dict[str, Any] = dict.fromkeys(OPTIONS[kind], True)
        config = commhooks.PowerSGD(
            matrix_approximation_rank=int(rank_text), start_powerSGD_iter=start, **options
        )
    # The kernel is chosen when the hook is attached.
    with_torch = label in QUANTISED or (kind in OPTIONS and kind != "native")
    with mock.patch.dict(os.environ, {"COMMHOOKS_NATIVE": "0" if with_torch else "1"}):
        if suffix == "fsdp2":
            group = mesh_of(ranks_per_node)["replicate"]
            return wrapped, commhooks.attach(wrapped, config, replicate_group=group)
        nodes = ranks_per_node if suffix == "nodes" else None
        return wrapped, commhooks.attach(wrapped, config, ranks_per_node=nodes)


@functools.cache
def mesh_of(ranks_per_node: int) -> DeviceMesh:
    """Make the mesh (nodes, ranks of a node)."""
    nodes = dist.get_world_size() // ranks_per_node
    return init_device_mesh("cpu", (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))


def shard(
    model: torch.nn.Module, ranks_per_node: int | None, *, both: bool, low: bool = False
) -> torch.nn.Module:
    """Shard each transformer layer and the rest. `both`: replicate over the nodes, too; `low`:
    reduce in bfloat16.
    """
    assert ranks_per_node is not None
    mesh = mesh_of(ranks_per_node) if both else mesh_of(ranks_per_node)["shard"]
    return _shard_layers(model, mesh, torch.bfloat16 if low else None)


def _shard_layers(
    model: torch.nn.Module, mesh: DeviceMesh, reduce_dtype: torch.dtype | None = None
) -> torch.nn.Module:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _layers(model: torch.nn.Module) -> list[Any]:
    kind = torch.nn.TransformerEncoderLayer
    return [module for module in model.modules() if isinstance(module, kind)]


def _shard_over_all(
    model: torch.nn.Module, form: str, ranks_per_node: int | None, *, ahead: bool
) -> tuple[torch.nn.Module, commhooks.CommHook | None]:
    """Shard over all ranks, and compress what FSDP2 sends to `form`, unless it is ""."""
    sharded = _shard_layers(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    if ahead:
        for layer, following in itertools.pairwise(_layers(model)):
            layer.set_modules_to_forward_prefetch([following])
    if not form:
        return sharded, None
    shards = commhooks.Shards(weights=form, gradients=form, ranks_per_node=ranks_per_node)
    return sharded, commhooks.attach(sharded, None, shards=shards)
