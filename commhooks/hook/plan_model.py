"""The plan of a model that is not wrapped in DDP: what `commhooks plan` shows before there is a run."""

from collections.abc import Collection, Mapping, Sequence

import torch

from commhooks.compressors.config import BatchedPowerSGD, PowerSGD, resolve_start
from commhooks.compressors.powersgd.plan_rows import plan_bucket, plan_rows
from commhooks.errors import HookConfigError
from commhooks.gradients.bucket_estimate import ESTIMATE, Reduced, estimate_buckets
from commhooks.gradients.names import GivenNames
from commhooks.hook.plan import ModelPlan
from commhooks.hook.request import HookSpec


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """ids of the parameters whose gradients will be sparse."""
    return {
        id(each.weight)
        for each in module.modules()
        if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and each.sparse
    }


def plan_model(
    parameters: Mapping[str, torch.Tensor],
    spec: HookSpec,
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
    config = spec.config
    if config is None:
        raise HookConfigError(f"hook {spec.name!r} is not one of ours: only its own code knows what it sends")
    numel = {name: p.numel() * (2 if p.is_complex() else 1) for name, p in parameters.items()}
    reduced = [
        Reduced(name, numel[name] * _real_itemsize(p.dtype), p.dtype, p.device, id(p) in sparse)
        for name, p in parameters.items()
    ]
    buckets = estimate_buckets(reduced, bucket_cap_mb)
    names = GivenNames(parameters.items(), all_names or {})
    wire = spec.wire_dtype
    if not isinstance(config, PowerSGD):
        rows = plan_rows(spec.name, names, None)
        return ModelPlan(
            spec.name,
            tuple(rows),
            wire,
            low_rank=False,
            bucket_names=buckets,
            buckets_from=ESTIMATE,
            sends=config.sends,
        )
    start = resolve_start(config, total_steps).start_powerSGD_iter
    assert isinstance(start, int)
    if isinstance(config, BatchedPowerSGD):
        rows = [
            plan_bucket(
                bucket,
                sum(numel[name] for name in bucket),
                parameters[bucket[0]].dtype,
                rank=config.matrix_approximation_rank,
                sparse=id(parameters[bucket[0]]) in sparse,
                complex_numbers=parameters[bucket[0]].is_complex(),
            )
            for bucket in buckets
        ]
        return ModelPlan(
            spec.name, tuple(rows), wire, start, error_feedback=config.use_error_feedback, buckets_from=ESTIMATE
        )
    return ModelPlan(
        spec.name,
        tuple(plan_rows(spec.name, names, config, sparse)),
        wire,
        start,
        error_feedback=config.use_error_feedback,
        bucket_names=buckets,
        buckets_from=ESTIMATE,
    )


def _real_itemsize(dtype: torch.dtype) -> int:
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
