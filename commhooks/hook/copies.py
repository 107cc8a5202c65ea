"""What copies and pickles of a DDP model hold of its hook.

torch keeps the hook's function in the model and pickles it with the model: `torch.save(ddp_model)`, `copy.deepcopy` and
`torch.optim.swa_utils.AveragedModel(ddp_model)` do that. In the copy DDP registers no hook (torch 2.13): it averages
the gradients itself.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commhooks.errors import HookRunError, logger_of
from commhooks.gradients.source import Future

logger = logger_of(__name__)


class Registered(functools.partial[Future]):
    """What DDP calls. Copied, it leaves the hook behind, with process group and learned state.

    Args:
        name: name of the hook, which DDP's logging data show.
        function: its function.
        owner: lives as long as the model.
    """

    __name__: str
    __qualname__: str
    _owner: object

    def __new__(
        cls, name: str, function: Callable[[Any, dist.GradBucket], Future], owner: object = None
    ) -> "Registered":
        made = super().__new__(cls, function)
        made.__name__ = made.__qualname__ = name
        made._owner = owner
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self.__qualname__,)


def _copied(name: str) -> Registered:
    logger.info("a model with hook %r was copied or loaded whole: the copy has no hook until one is attached.", name)

    def refuse(state: Any, bucket: dist.GradBucket) -> Future:
        raise HookRunError(
            f"this function is from a copy of a model with the hook {name!r}, and copies have no hook: attach one with "
            "commhooks.attach(copied_model, ...)"
        )

    return Registered(name, refuse)
