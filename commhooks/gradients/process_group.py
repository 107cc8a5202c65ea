"""Process groups that hooks use and do not own."""

import weakref
from collections.abc import Callable

import torch.distributed as dist

from commhooks.errors import HookRunError


def held_weakly(group: dist.ProcessGroup) -> Callable[[], dist.ProcessGroup]:
    """Returns a function that returns `group`, or raises HookRunError once it was destroyed.

    torch keeps a group until `destroy_process_group`. A hook that kept it, too, would keep its threads and its store
    for as long as somebody keeps the hook; and a group that ends in a forked process, as that of a DataLoader's worker
    in which the garbage collector finds the hook, takes that process with it: its threads do not exist there.
    """
    weak = weakref.ref(group)

    def alive() -> dist.ProcessGroup:
        found = weak()
        if found is None:
            raise HookRunError(
                "the process group of this communication hook was destroyed (destroy_process_group): wrap the model "
                "anew after init_process_group, and attach a hook to it"
            )
        return found

    return alive
