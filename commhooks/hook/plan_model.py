"""Make the plan of a model: with attached hook, or without DDP as for `commhooks plan`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from commhooks.compressors.adaptive import AdaptiveCompressor
from commhooks.compressors.base import Compressor
from commhooks.compressors.hook_config import HookConfig
from commhooks.compressors.local_steps.compressor import LocalStepsCompressor
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan, real_itemsize
from commhooks.engine.arrangement import FLAT, Flat
from commhooks.errors import HookConfigError
from commhooks.gradients.bucket_estimate import ESTIMATE, Reduced, estimate_buckets
from commhooks.gradients.names import ModelNames, ParameterNames
from commhooks.hook.model_plan import ModelPlan
from commhooks.hook.request import HookRequest

BucketNames = Sequence[Sequence[str]]


def parameter_infos(
    names: ParameterNames, config: HookConfig, sparse: Collection[int] = ()
) -> dict[str, ParameterInfo]:
    """The `ParameterInfo` of each parameter, by name. `sparse`: ids of those whose gradients are sparse."""
    return {
        name: ParameterInfo.of(name, parameter, names, config, id(parameter) in sparse)
        for name, parameter in names.known().items()
    }


def whole_plan(
    hook: str,
    compressor: Compressor[Any],
    rows: Sequence[UnitPlan],
    buckets: BucketNames = (),
    buckets_from: str = "",
    arrangement: Flat = FLAT,
) -> ModelPlan:
    """Make a `ModelPlan` from these rows. `buckets`: the names in each bucket; empty if they are unknown or if the rows
    are buckets."""
    by_name = {row.name: row for row in rows}
    known = [[by_name[name] for name in bucket] for bucket in buckets]
    return ModelPlan(
        f"{hook}: {compressor.chosen}" if isinstance(compressor, AdaptiveCompressor) else hook,
        tuple(rows),
        compressor.wire_dtype,
        compressor.wire,
        compressor.start_step,
        selective=compressor.selective,
        memory=arrangement.memory_plan(compressor, rows, known or [rows]),
        arrangement=arrangement.words,
        bucket_names=tuple(map(tuple, buckets)),
        buckets_from=buckets_from,
        bytes_per_save=sum(row.numel * 4 for row in rows) if isinstance(compressor, LocalStepsCompressor) else 0,
        sends=compressor.config.sends,
    )


def plan_model(
    parameters: Mapping[str, torch.Tensor],
    request: HookRequest,
    *,
    all_names: Mapping[int, Sequence[str]] | None = None,
    sparse: Collection[int] = (),
    bucket_cap_mb: float | None = None,
    total_steps: int | None = None,
) -> ModelPlan:
    """Predict the result of `hook.plan()` for a model with these parameters, and estimate DDP's buckets.

    Args:
        parameters: those that DDP will reduce, by name, in the order of registration. Their values are not read: they
            may be on the meta device.
        all_names: id of a parameter -> all of its names, for `exclude`.
        sparse: ids of those whose gradients are sparse.
        bucket_cap_mb: as DDP's argument, MiB.
        total_steps: as in `attach`.

    Raises:
        HookConfigError: the request is for a user's hook or for none, or its start is a fraction and `total_steps` is
            None.
    """
    compressor = request.new_compressor(total_steps)
    if request.off:
        raise HookConfigError("without a hook there is nothing to plan; hook 'allreduce' shows the plain average")
    if compressor is None:
        raise HookConfigError(f"hook {request.name!r} is not one of ours: only its own code knows what it sends")
    infos = parameter_infos(ModelNames(parameters.items(), all_names or {}), compressor.planning_config, sparse)
    reduced = [
        Reduced(name, info.numel * real_itemsize(p.dtype), p.dtype, p.device, info.sparse)
        for name, info in infos.items()
        for p in [info.parameter]
    ]
    buckets = estimate_buckets(reduced, bucket_cap_mb)
    if compressor.per_bucket:
        rows = [row for bucket in buckets for row in compressor.plan([infos[name] for name in bucket])]
        return whole_plan(request.name, compressor, rows, buckets_from=ESTIMATE)
    return whole_plan(request.name, compressor, compressor.plan(list(infos.values())), buckets, ESTIMATE)
