"""Make the source of the gradients of a model that is sharded by `fully_shard`."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from commhooks.comm.groups import new_group
from commhooks.errors import HookConfigError
from commhooks.gradients.fully_shard import (
    FullyShardGradients,
    common_mesh,
    local_values,
    sharded_parameters,
)


def sharded_source(
    model: FSDPModule,
    process_group: dist.ProcessGroup | None,
    replicate_group: DeviceMesh | dist.ProcessGroup | None,
    *,
    one_replica: bool,
    kind: type[FullyShardGradients] = FullyShardGradients,
) -> FullyShardGradients:
    """See `source_of`. `kind`: the class of the source. Raises HookConfigError if the groups do not
    fit a sharded model.
    """
    assert isinstance(model, Module)
    if process_group is not None:
        raise HookConfigError(
            "process_group is for DistributedDataParallel. For a model sharded by fully_shard pass "
            "replicate_group: the ranks that hold the same shard, such as mesh['replicate']"
        )
    if one_replica and replicate_group is None:
        sharded = sharded_parameters(model)
        mesh, device = common_mesh(sharded), local_values(next(iter(sharded.values()))).device
        replicate_group = new_group(
            [[rank] for rank in range(mesh.size())], mesh.get_group(), device
        )
    return kind(model, _replicate_group(replicate_group))


def _replicate_group(given: object) -> dist.ProcessGroup:
    if isinstance(given, DeviceMesh) and given.ndim == 1:
        return given.get_group()
    if isinstance(given, dist.ProcessGroup):
        return given
    what = f"a mesh of {given.ndim} dimensions" if isinstance(given, DeviceMesh) else repr(given)
    raise HookConfigError(
        f"replicate_group={what}; a model sharded by fully_shard needs the ranks that hold the same"
        " shard: with mesh = init_device_mesh(device_type, (replicas, shards),"
        " mesh_dim_names=('replicate', 'shard')), shard over mesh['shard'] and pass"
        " replicate_group=mesh['replicate']"
    )
