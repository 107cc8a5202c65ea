"""Keep the ranks that hold the shards of one replica in step.

The hook of a sharded model averages over the ranks with the *same* shard. Each such group of ranks decides for itself:
whether it could attach, where it stands, whether a step was finite. Here the groups tell each other, so that all ranks
of the model come to the same end. Sharding groups are fast: each of these is one small collective.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from commhooks.comm.collective import Send, gather_rows, start
from commhooks.errors import CommHookError

T = TypeVar("T")


def good_on_all(good: torch.Tensor, group: dist.ProcessGroup, whose: str) -> torch.Tensor:
    """Whether `good` (0-dim bool tensor) is true on all ranks of `group`: all shards, or a node. All of them must call
    this; no host waits for an accelerator. Not counted in the bytes of the hook, which are those between replicas and
    between nodes."""
    bad = (~good).to(torch.int32).view(1)
    return start(Send(bad, what=f"the verdict of {whose}", op="max"), group, None).wait()[0] == 0


def is_logging_rank(group: dist.ProcessGroup, shard_group: dist.ProcessGroup | None) -> bool:
    """Whether this rank is the one that logs what concerns all ranks of the model."""
    return group.rank() == 0 and (shard_group is None or shard_group.rank() == 0)


def on_all_shards(
    work: Callable[[], T],
    numbers: list[int],
    shard_group: dist.ProcessGroup | None,
    device: torch.device,
    otherwise: type[CommHookError],
) -> tuple[T, list[list[int]]]:
    """Run `work` on all ranks of `shard_group`. All of them must call this.

    Args:
        numbers: to compare with those of the other ranks.
        shard_group: None if nothing is sharded.
        otherwise: raised on ranks that have not failed if another one has.

    Returns:
        The result of `work` on this rank, and the numbers of each rank.

    Raises:
        CommHookError: `work` has raised it on this rank; or it has on another, and this is `otherwise`.
        HookRunError: another rank has ended, or did not take part within the process group's timeout.
    """
    if shard_group is None:
        return work(), [numbers]
    what = "the comparison of the shards (do the same on every rank, or on none)"
    result: list[T] = []
    failure: CommHookError | None = None
    try:
        result.append(work())
    except CommHookError as error:
        failure = error
    row = torch.tensor([int(failure is not None), *numbers], dtype=torch.int64, device=device)
    table = gather_rows(row, shard_group, None, what).tolist()
    if failure is not None:
        raise failure
    failed = [rank for rank, row in enumerate(table) if row[0]]
    if failed:
        raise otherwise(
            f"the ranks that hold other shards of the model have failed: ranks {failed} of the sharding group. Look at "
            "their errors"
        )
    return result[0], [row[1:] for row in table]
