"""Make the plan of a model: with attached hook, or without DDP as for `commhooks plan`."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from commhooks.compressors.adaptive import AdaptiveCompressor
from commhooks.compressors.base import Compressor
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.engine.nodes import FLAT, Arrangement
from commhooks.errors import HookConfigError
from commhooks.gradients.names import ModelNames, ParameterNames, all_names
from commhooks.gradients.source import sparse_parameters
from commhooks.hook.model_plan import ModelPlan
from commhooks.local_steps.compressor import LocalStepsCompressor
from commhooks.options import HookConfig
from commhooks.request import HookRequest

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
    arrangement: Arrangement = FLAT,
) -> ModelPlan:
    """Make a `ModelPlan` from these rows. `buckets`: the names in each bucket; empty if they are unknown or if the rows
    are buckets."""
    by_name = {row.name: row for row in rows}
    known = [[by_name[name] for name in bucket] for bucket in buckets]
    return ModelPlan(
        f"{hook}: {compressor.chosen}" if isinstance(compressor, AdaptiveCompressor) else hook,
        tuple(rows),
        compressor.wire_dtype,
        compressor.start_step,
        selective=compressor.selective,
        memory=arrangement.memory_plan(compressor, rows, known or [rows]),
        arrangement=arrangement.words,
        bucket_names=tuple(map(tuple, buckets)),
        bytes_per_save=sum(row.numel * 4 for row in rows) if isinstance(compressor, LocalStepsCompressor) else 0,
        sends=compressor.config.sends,
    )


def plan_model(module: torch.nn.Module, request: HookRequest, total_steps: int | None = None) -> ModelPlan:
    """The plan that a hook will have before its first backward pass when it is attached to `module` in DDP. The values
    of the parameters are not read: they may be on the meta device.

    Args:
        total_steps: as in `attach`.

    Raises:
        HookConfigError: the request is for a user's hook or for none, its start is a fraction and `total_steps` is
            None, or nothing in the model is trained.
    """
    compressor = request.new_compressor(total_steps)
    if request.off:
        raise HookConfigError("without a hook there is nothing to plan; hook 'allreduce' shows the plain average")
    if compressor is None:
        raise HookConfigError(f"hook {request.name!r} is not one of ours: only its own code knows what it sends")
    names = all_names(module)
    trained = [(names[id(each)][0], each) for each in module.parameters() if each.requires_grad]
    if not trained:
        raise HookConfigError("the model has no parameter that requires a gradient")
    infos = parameter_infos(ModelNames(trained, names), compressor.config, sparse_parameters(module))
    rows = [] if compressor.per_bucket else compressor.plan(list(infos.values()))  # DDP has made no buckets yet
    return whole_plan(request.name, compressor, rows)
