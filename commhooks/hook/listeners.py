"""What watches the backward passes of an attached hook."""

from commhooks.comm.groups import is_logging_rank
from commhooks.gradients.source import GradientSource, PassListener
from commhooks.hook.late_parameters import LateParameters, warn_of_unsharded
from commhooks.hook.protocol import Hook
from commhooks.hook.replica_check import ReplicaCheck
from commhooks.request import HookRequest


def listeners_of(request: HookRequest, hook: Hook, source: GradientSource) -> list[PassListener]:
    """Return the listeners of a hook. Call this once, before `hook.run` is registered."""
    logs = is_logging_rank(source.group, source.shard_group)
    listeners: list[PassListener] = []
    if request.check_every is not None:
        listeners.append(ReplicaCheck(source, hook, request.check_every))
    if logs and source.shard_group is not None:
        warn_of_unsharded(source.not_averaged())
    elif logs and (source.group.size() > 1 or hook.members is not None):
        listeners.append(LateParameters(source))
    return listeners + hook.listeners(logs=logs)
