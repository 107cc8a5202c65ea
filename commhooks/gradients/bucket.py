"""One bucket of gradients as the engine sees it: a flat buffer and the parameters in it.

Made from DDP's buckets (`gradients.ddp`), or directly from tensors.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks.gradients.torch_private import sparse_values


class Bucket:
    """Gradients that are reduced together. Every rank passes the same buckets in the same order.

    Attributes:
        flat: 1-D, this rank's gradients, replaced in place by the result. A sparse tensor for a sparse gradient.
        parameters: in their order in the buffer.
        index: increases within a backward pass.
        nbytes: of the buffer; for a sparse gradient those of its values.
        is_first, is_last: this is the first, the last bucket of its backward pass.
        grad_bucket: the same bucket as DDP passed it; None without DDP.
        unused: the places of parameters that this rank has not used since the latest synchronised pass, although they
            have a gradient.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        index: int = 0,
        is_last: bool = True,
        is_first: bool | None = None,
        grad_bucket: dist.GradBucket | None = None,
    ) -> None:
        """`is_first`: None: the one with index 0 is."""
        self.flat = flat
        self.parameters = parameters
        self.nbytes = sparse_values(flat).nbytes if flat.is_sparse else flat.nbytes
        self.index = index
        self.is_first = index == 0 if is_first is None else is_first
        self.is_last = is_last
        self.grad_bucket = grad_bucket
        self.unused: Sequence[int] = ()
