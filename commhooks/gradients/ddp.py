"""`DistributedDataParallel` as a source of gradients: its buckets, its parameters, and its limits for hooks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import HookRunError
from commhooks.gradients import precision
from commhooks.gradients.bucket import Bucket


class DDPBucket(Bucket):
    """The bucket that DDP passes to a hook. Its parameters are read on demand: torch makes a new list at each call."""

    def __init__(self, grad_bucket: dist.GradBucket) -> None:
        super().__init__(grad_bucket.buffer(), (), grad_bucket.index(), grad_bucket.is_last())
        self._grad_bucket = grad_bucket

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        return self._grad_bucket.parameters()


def bucket_of(grad_bucket: object) -> DDPBucket:
    """Convert the `GradBucket` that DDP passes to a hook.

    Raises:
        HookRunError: it is not a GradBucket, which happens with compiled DDP; or a CUDA graph is being captured.
    """
    if not isinstance(grad_bucket, dist.GradBucket):
        raise HookRunError(
            "this hook was called without a GradBucket: compiled DDP with optimize_ddp='python_reducer' is not "
            "supported; set torch._dynamo.config.optimize_ddp = 'ddp_optimizer'"
        )
    bucket = DDPBucket(grad_bucket)
    if precision.has_streams(bucket.flat.device) and torch.cuda.is_current_stream_capturing():
        raise HookRunError(
            "this backward pass is being captured in a CUDA graph: communication hooks are Python, which a replay does "
            "not run. Capture parts of the model with torch.cuda.make_graphed_callables before wrapping it in DDP, so "
            "that the hook runs outside of the graphs; or train without a hook"
        )
    return bucket


def reduced_parameters(ddp_model: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Names and parameters that DDP reduces, in registration order. The prefix that `torch.compile` adds to names is
    removed, so that checkpoints fit with and without it."""
    return [
        (name.replace("_orig_mod.", ""), parameter)
        for name, parameter in ddp_model.module.named_parameters()
        if parameter.requires_grad and name not in ddp_model.parameters_to_ignore
    ]


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """ids of the parameters whose gradients will be sparse."""
    return {
        id(each.weight)
        for each in module.modules()
        if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and each.sparse
    }


def forbid_uneven_division(ddp_model: DistributedDataParallel) -> None:
    """Reject `Join(divide_by_initial_world_size=False)`, which requests the mean over the active ranks: DDP does not
    pass their number to hooks.

    Raises:
        HookRunError: that option is active.
    """
    # Private (torch 2.13): set by DDP's join hook; there is no public access.
    if getattr(ddp_model, "_divide_by_initial_world_size", True) is False:
        raise HookRunError(
            "a communication hook divides gradients by the world size; Join(divide_by_initial_world_size=False) asks "
            "for the number of active ranks instead. Use divide_by_initial_world_size=True, or no hook"
        )
