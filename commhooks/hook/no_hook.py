"""No hook behind `CommHook`: DDP averages its gradients itself, for comparisons with a training that has a hook."""

import torch.distributed as dist

from commhooks.compressors.cast import AllReduce, AllReduceCompressor
from commhooks.compressors.registry import OFF
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.names import ParameterNames
from commhooks.hook.plan import ModelPlan
from commhooks.hook.runner import Future
from commhooks.hook.stateless_hook import StatelessHook


class NoHook(StatelessHook):
    """It is never registered, so it counts nothing; its plan is that of plain averaging.

    Args:
        names, group, sparse: see `StatelessHook`.
        ignored: the arguments that were given and are of no use without a hook.
    """

    counts_bytes = False

    def __init__(
        self, names: ParameterNames, group: dist.ProcessGroup, sparse: set[int], ignored: tuple[str, ...]
    ) -> None:
        super().__init__(OFF, AllReduceCompressor(AllReduce()), names, group, sparse)
        self._ignored = ignored

    def run(self, bucket: Bucket, grad_bucket: dist.GradBucket | None) -> Future:
        raise NotImplementedError  # it is never registered

    def announcement(self, plan: ModelPlan) -> str:
        ignored = f" ({' and '.join(self._ignored)} without effect)" if self._ignored else ""
        return f": no hook, DDP averages the gradients itself{ignored}"
