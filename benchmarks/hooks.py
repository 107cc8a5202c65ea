"""The candidates of the benchmarks, by label.

`noop`, `ddp` (no hook), `allreduce`, `fp16`, `bf16`, `powersgd-4` and `batched-4` (commhooks, rank 4), `fused-4`,
`alternate-4`, `fused-alternate-4` and `same-4` (commhooks with these options), `torch-4` (torch's powerSGD_hook) and
`torch-same-4`; "same" is batch_tensors_with_same_shape. `int8`, `int4`, `fused-int8` and `fused-int4` are the quantised
hooks. Only those with "fused" use the native kernel. `+int8` or `+int4` after PowerSGD is the wrapper. The suffix
`:one` selects a single bucket: one all-reduce for all P, and one for all Q. The suffix `:nodes` compresses between
nodes only, for benchmarks with several ranks per node.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import commhooks

ONE_BUCKET_MB = 10_000
LABELS = (
    "noop, ddp, allreduce, fp16, bf16, powersgd-RANK, fused-RANK, alternate-RANK, fused-alternate-RANK, same-RANK, "
    "batched-RANK, int8, int4, fused-int8, fused-int4, torch-RANK, torch-same-RANK; with +int8 or +int4, :one, :nodes"
)
SIMPLE = {
    "noop": commhooks.Noop,
    "allreduce": commhooks.AllReduce,
    "fp16": commhooks.FP16Compress,
    "bf16": commhooks.BF16Compress,
}
QUANTISED = {"int8": commhooks.Int8Compress, "int4": commhooks.Int4Compress}
OPTIONS = {
    "powersgd": (),
    "fused": ("fused",),
    "alternate": ("alternate",),
    "fused-alternate": ("fused", "alternate"),
    "same": ("batch_tensors_with_same_shape",),
}


def wrap(
    model: torch.nn.Module,
    label: str,
    start: int = 2,
    bucket_cap_mb: float | None = None,
    ranks_per_node: int | None = None,
    wrapper: str | None = None,
    **ddp: Any,
) -> tuple[DistributedDataParallel, commhooks.CommHook | None]:
    """Wrap `model` in DDP with that hook; also returns the CommHook (None for torch's hooks and for DDP without hook).
    On gloo torch's PowerSGD always gets one bucket, because it hangs there with several. `start`: the step at which
    PowerSGD and quantising begin; torch requires at least 2. `wrapper`: as in `commhooks.attach`; not for torch's
    hooks."""
    label, _, suffix = label.partition(":")
    label, _, quantised = label.partition("+")
    kind, _, rank_text = label.rpartition("-")
    kind = kind or label
    if suffix == "one" or kind.startswith("torch") and dist.get_backend() == "gloo":
        bucket_cap_mb = ONE_BUCKET_MB
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
    config: Any = SIMPLE[label]() if label in SIMPLE else label
    if label.removeprefix("fused-") in QUANTISED:
        config = QUANTISED[label.removeprefix("fused-")](start_iter=start, fused=label.startswith("fused-"))
    elif kind in OPTIONS:
        options = {"fused": False} | dict.fromkeys(OPTIONS[kind], True)
        config = commhooks.PowerSGD(matrix_approximation_rank=int(rank_text), start_powerSGD_iter=start, **options)
    elif kind == "batched":
        config = commhooks.BatchedPowerSGD(
            matrix_approximation_rank=int(rank_text), start_powerSGD_iter=start, fused=False
        )
    nodes = ranks_per_node if suffix == "nodes" else None
    return wrapped, commhooks.attach(wrapped, config, wrapper=quantised or wrapper, ranks_per_node=nodes)
