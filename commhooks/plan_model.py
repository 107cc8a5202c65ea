"""The plan of a model that is not wrapped in DDP: what `commhooks plan` shows before there is a run."""

from collections.abc import Collection, Mapping, Sequence

import torch

from commhooks.bucket_estimate import ESTIMATE, Reduced, estimate_buckets
from commhooks.config import AllReduce, BatchedPowerSGD, BF16Compress, FP16Compress, Noop, PowerSGD, resolve_start
from commhooks.errors import HookConfigError
from commhooks.exclude import matching
from commhooks.plan import ModelPlan, ParameterPlan, plan_bucket, plan_parameter
from commhooks.spec import HookSpec
from commhooks.wire import WIRE_DTYPES

_OWN_WIRE = {FP16Compress: torch.float16, BF16Compress: torch.bfloat16}


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
    wire = WIRE_DTYPES[spec.wrapper] if spec.wrapper is not None else _OWN_WIRE.get(type(config))
    if not isinstance(config, PowerSGD):
        assert isinstance(config, (AllReduce, FP16Compress, BF16Compress, Noop))
        rows = tuple(
            ParameterPlan(name, tuple(p.shape), numel[name], p.dtype, False, f"hook {spec.name}")
            for name, p in parameters.items()
        )
        sends = not isinstance(config, Noop)
        return ModelPlan(
            spec.name, rows, wire, low_rank=False, bucket_names=buckets, buckets_from=ESTIMATE, sends=sends
        )
    start = resolve_start(config, total_steps).start_powerSGD_iter
    assert isinstance(start, int)
    if isinstance(config, BatchedPowerSGD):
        rows = tuple(
            plan_bucket(
                names,
                sum(numel[name] for name in names),
                parameters[names[0]].dtype,
                rank=config.matrix_approximation_rank,
                sparse=id(parameters[names[0]]) in sparse,
                complex_numbers=parameters[names[0]].is_complex(),
            )
            for names in buckets
        )
        return ModelPlan(spec.name, rows, wire, start, error_feedback=config.use_error_feedback, buckets_from=ESTIMATE)
    rows = tuple(
        plan_parameter(
            name,
            p,
            matrix_approximation_rank=config.matrix_approximation_rank,
            min_compression_rate=config.min_compression_rate,
            sparse=id(p) in sparse,
            alternate=config.alternate,
            excluded_by=matching((all_names or {}).get(id(p), [name]), config.exclude),
        )
        for name, p in parameters.items()
    )
    return ModelPlan(
        spec.name,
        rows,
        wire,
        start,
        error_feedback=config.use_error_feedback,
        bucket_names=buckets,
        buckets_from=ESTIMATE,
    )


def _real_itemsize(dtype: torch.dtype) -> int:
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
