"""The source of a sharded model without replicas: FSDP2 alone reduces its gradients."""

from typing import Any

from commhooks.gradients.fully_shard import FullyShardGradients
from commhooks.gradients.source import HookCallbacks
from commhooks.sharded.passes import Passes


class OneReplica(FullyShardGradients):
    """Passes no buckets to its hook, only the beginning and the end of a backward pass. So FSDP2
    may do what a hook between replicas must refuse: call a unit twice, step in the backward pass.
    """

    passes: Passes

    def register(self, callbacks: HookCallbacks, state: Any) -> None:
        self.passes.begins.append(callbacks.begin_pass)
        self.passes.ends.append(callbacks.end_pass)

    def unregister(self) -> None:
        self.passes.begins.clear()

    def close(self) -> None:
        self.unregister()
