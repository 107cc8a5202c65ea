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
        mesh = common_mesh(sharded)
        device = local_values(next(iter(sharded.values()))).device
        replicate_group = new_group(
            [[rank] for rank in range(mesh.size())], mesh.get_group(), device
        )
    return kind(model, _replicate_group(replicate_group))


def _replicate_group(group: object) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        return group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    what = f"a mesh of {group.ndim} dimensions" if isinstance(group, DeviceMesh) else repr(group)
    raise HookConfigError(
        f"replicate_group={what}; a model sharded by fully_shard needs the ranks that hold the same"
        " shard: with mesh = init_device_mesh(device_type, (replicas, shards),"
        " mesh_dim_names=('replicate', 'shard')), shard over mesh['shard'] and pass"
        " replicate_group=mesh['replicate']"
    )
