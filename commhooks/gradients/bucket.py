"""One bucket of gradients as the engine sees it: a flat buffer and the parameters in it.

Whoever reduces gradients makes it: DDP (`gradients.ddp`), or a plain call with tensors.
"""

from collections.abc import Sequence

import torch


class Bucket:
    """Gradients that are reduced together. Every rank passes the same buckets in the same order.

    Attributes:
        flat: 1-D, this rank's gradients, replaced in place by the result. A sparse tensor for a sparse gradient.
        index: buckets of a backward pass come with rising numbers; a number that does not rise begins another pass.
        is_last: the last one of its backward pass.
    """

    def __init__(
        self, flat: torch.Tensor, parameters: Sequence[torch.Tensor], index: int = 0, is_last: bool = True
    ) -> None:
        """`parameters`: in the order of the buffer."""
        self.flat = flat
        self.index = index
        self.is_last = is_last
        self._parameters = parameters

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """In the order of the buffer."""
        return self._parameters

    @property
    def numel_here(self) -> int:
        """Numbers in the buffer now: of a sparse gradient its values."""
        return self.flat._values().numel() if self.flat.is_sparse else self.flat.numel()

    @property
    def layout_key(self) -> tuple[int, ...]:
        """Which parameters, in which order. Valid as long as the layout that it finds keeps them alive."""
        return tuple(id(parameter) for parameter in self.parameters)
