"""Find the module that runs a request: `compressor_hook`, `function_hook`, `local_steps_hook` or
`shards_hook`. It prepares the hook and, once all ranks have agreed on the request, builds it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commhooks.compressors.base import Compressor
from commhooks.engine.consensus import Binding
from commhooks.engine.kernel_choice import KernelChoice
from commhooks.gradients.source import GradientSource
from commhooks.hook.protocol import Hook
from commhooks.options import HookConfig
from commhooks.request import HookRequest

FUNCTION = "commhooks.hook.function_hook"
"""The kind of a user's function, which has no config; see `HookConfig.kind`."""

SHARDS = "commhooks.hook.shards_hook"
"""The kind of compressed collectives of FSDP2 without another hook."""


@dataclass(frozen=True)
class Prepared:
    """A hook before the ranks have compared what they attach.

    Attributes:
        compressor: the ranks compare its plan and choose a kernel for it; None for a user's
            function.
        build: makes the hook, given the kernel of all ranks. All ranks of the model must call it.
        state: the state of a user's function; None for compressors.
    """

    compressor: Compressor[Any] | None
    build: Callable[[KernelChoice], Hook]
    state: Any = None


def prepared(
    request: HookRequest, source: GradientSource, binding: Binding, total_steps: int | None
) -> Prepared:
    """Prepare the hook of a request. `total_steps`: see `attach`. Raises HookConfigError if the
    request cannot be served for this model.
    """
    if request.shards_alone:
        kind = SHARDS
    elif request.config is not None:
        kind = request.config.kind
    elif request.off:
        kind = HookConfig.kind  # no hook is registered; the ranks are only compared
    else:
        kind = FUNCTION
    made: Prepared = importlib.import_module(kind).prepare(request, source, binding, total_steps)
    return made
