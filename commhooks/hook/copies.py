"""What copies and pickles of a DDP model hold of its hook.

torch keeps the hook's function in the model and pickles it with the model: `torch.save(ddp_model)`, `copy.deepcopy` and
`torch.optim.swa_utils.AveragedModel(ddp_model)` do that. In the copy DDP registers no hook (torch 2.13): it averages
the gradients itself.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commhooks.errors import HookRunError, logger_of
from commhooks.gradients.source import Future

logger = logger_of(__name__)


class Registered:
    """What DDP calls. Copied, it leaves the hook behind, with process group and learned state.

    Args:
        name: name of the hook, which DDP's logging data show.
        function: its function; None in a copy.
        owner: lives as long as the model.
    """

    def __init__(
        self, name: str, function: Callable[[Any, dist.GradBucket], Future] | None, owner: object = None
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self._function = function
        self._owner = owner

    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future:
        if self._function is None:
            raise HookRunError(
                f"this function is from a copy of a model with the hook {self.__qualname__!r}, and copies have no "
                "hook: attach one with commhooks.attach(copied_model, ...)"
            )
        return self._function(state, bucket)

    run = __call__  # models that were pickled by commhooks 1.0 ask for it

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self.__qualname__,)


def _copied(name: str) -> Registered:
    logger.info("a model with hook %r was copied or loaded whole: the copy has no hook until one is attached.", name)
    return Registered(name, None)
