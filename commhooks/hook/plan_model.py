"""The plan of a model: of one that is not wrapped in DDP, as `commhooks plan` shows it, and of one that trains."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from commhooks.compressors.base import Compressor
from commhooks.compressors.plan import ParameterInfo, UnitPlan, real_itemsize
from commhooks.errors import HookConfigError
from commhooks.gradients.bucket_estimate import ESTIMATE, Reduced, estimate_buckets
from commhooks.gradients.names import ModelNames, ParameterNames
from commhooks.hook.plan import ModelPlan
from commhooks.hook.request import HookRequest

BucketNames = Sequence[Sequence[str]]


def parameter_infos(
    names: ParameterNames, globs: Sequence[str], sparse: Collection[int] = ()
) -> dict[str, ParameterInfo]:
    """What a compressor may know of each parameter, by name. `sparse`: ids of those whose gradients are sparse."""
    return {
        name: ParameterInfo(name, parameter, id(parameter) in sparse, names.excluded_by(name, globs))
        for name, parameter in names.known().items()
    }


def whole_plan(
    hook: str, compressor: Compressor[Any], rows: Sequence[UnitPlan], buckets: BucketNames = (), buckets_from: str = ""
) -> ModelPlan:
    """A `ModelPlan` of these rows. `buckets`: the names in each bucket; empty where they are not known, and where rows
    are buckets."""
    by_name = {row.name: row for row in rows}
    known = [[by_name[name] for name in bucket] for bucket in buckets]
    return ModelPlan(
        hook,
        tuple(rows),
        compressor.wire_dtype,
        compressor.start_step,
        selective=compressor.selective,
        memory=compressor.memory_plan(rows, known or [rows]),
        bucket_names=tuple(map(tuple, buckets)),
        buckets_from=buckets_from,
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
    """What `hook.plan()` will say of a model with these parameters, and an estimate of DDP's buckets.

    Args:
        parameters: those that DDP will reduce, by name, in the order of registration. Numbers are not read, so that
            they may be on the meta device.
        all_names: all names of each parameter by its id, for `exclude`.
        sparse: ids of those whose gradients are sparse.
        bucket_cap_mb: as DDP's argument, MiB.
        total_steps: as in `attach`.

    Raises:
        HookConfigError: a hook of the user's own, or a fraction of a run of unknown length.
    """
    compressor = request.new_compressor(total_steps)
    if compressor is None:
        raise HookConfigError(f"hook {request.name!r} is not one of ours: only its own code knows what it sends")
    infos = parameter_infos(ModelNames(parameters.items(), all_names or {}), compressor.config.excluded_globs, sparse)
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
