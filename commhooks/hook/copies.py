"""What copies and pickles of a DDP model hold of its hook.

torch keeps the hook's function in the model and pickles it with the model: `torch.save(ddp_model)`, `copy.deepcopy` and
`torch.optim.swa_utils.AveragedModel(ddp_model)` do that. In the copy DDP registers no hook (torch 2.13): it averages
the gradients itself.
"""

import types
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commhooks.errors import HookRunError, logger_of
from commhooks.hook.runner import Future

logger = logger_of(__name__)

Run = Callable[[Any, dist.GradBucket], Future]


class Registered:
    """Its method `run` is what DDP calls. Copied, it leaves the hook behind, with process group and learned state.

    Args:
        name: name of the hook.
        function: its function; None in a copy.
    """

    def __init__(self, name: str, function: Run | None) -> None:
        self._name = name
        self._function = function

    def run(self, state: Any, bucket: dist.GradBucket) -> Future:
        if self._function is None:
            raise HookRunError(
                f"this function is from a copy of a model with the hook {self._name!r}, and copies have no hook: "
                "attach one with commhooks.attach(copied_model, ...)"
            )
        return self._function(state, bucket)

    @property
    def named_run(self) -> Run:
        """`run`, with the name of the hook: DDP's logging data show the qualified name of the function."""

        def run(self: Registered, state: Any, bucket: dist.GradBucket) -> Future:
            return self.run(state, bucket)

        run.__qualname__ = self._name
        return types.MethodType(run, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self._name,)


def _copied(name: str) -> Registered:
    logger.info("a model with hook %r was copied or loaded whole: the copy has no hook until one is attached.", name)
    return Registered(name, None)
