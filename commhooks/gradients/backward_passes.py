"""How many backward passes a model has had."""

import collections
import functools
from collections.abc import Collection, Iterable

import torch


class BackwardPasses:
    """Counts the backward passes that give these parameters gradients, whoever averages them, until `stop`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._by_parameter: collections.Counter[int] = collections.Counter()
        note = functools.partial(_count, self._by_parameter)  # it holds no more than the counter
        trained = [each for each in parameters if each.requires_grad]
        self._handles = {id(each): each.register_post_accumulate_grad_hook(note) for each in trained}

    def leave_out(self, parameters: Collection[int]) -> None:
        """Do not count the passes of the parameters with these `id()`s, not even the earlier ones."""
        for each in self._handles.keys() & parameters:
            self._handles.pop(each).remove()
            self._by_parameter.pop(each, None)

    def stop(self) -> int:
        """Returns the number of passes: that of the parameter with the most, because a pass may leave out others."""
        for each in self._handles.values():
            each.remove()
        self._handles.clear()
        return max(self._by_parameter.values(), default=0)


def _count(by_parameter: "collections.Counter[int]", parameter: torch.Tensor) -> None:
    by_parameter[id(parameter)] += 1
