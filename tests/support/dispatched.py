"""Records what torch dispatches: operators, views, new memory, and reads of the host."""

import traceback
from collections import Counter
from typing import Any

import torch

# the only way to see what is dispatched; torch 2.13
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)

WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal")


class Dispatched(TorchDispatchMode):
    """Counts what torch dispatches inside the context.

    Attributes:
        operators: by name, without views.
        views: operators that only describe memory.
        new_bytes: bytes of tensors that are not made from another tensor.
        waits: where the host read a number of a tensor, for which it would wait on an accelerator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.views = self.new_bytes = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            self.views += 1
        else:
            self.operators[str(func)] += 1
        if isinstance(result, torch.Tensor) and not any(
            "Tensor" in str(x.type) for x in func._schema.arguments
        ):
            self.new_bytes += result.nbytes
        if func._schema.name.split("::")[1] in WAITING:
            self.waits.append("".join(traceback.format_stack(limit=6)))
        return result
