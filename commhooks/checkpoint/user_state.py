"""Saves and loads hooks without learned state: their step, and the state of a user's hook."""

import collections
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.payload import (
    COUNTERS,
    REPLICAS_EQUAL,
    VERSION,
    check_world_size,
    damaged,
)
from commhooks.comm.counters import Counters
from commhooks.errors import CommHookError, PayloadError, logger_of, shown
from commhooks.gradients.source import GradientSource

logger = logger_of(__name__)


class UserStateCheckpointer:
    """Saves and loads the step of a hook, and the user's state if it can be saved.

    That is, if the state has `state_dict` and `load_state_dict`. `replicas_equal`: False for a hook
    that averages nothing, so that each rank has different weights.
    """

    step_is = "step"

    def __init__(
        self,
        hook: str,
        options: dict[str, Any],
        counters: Counters,
        group: dist.ProcessGroup,
        state: Any = None,
        *,
        replicas_equal: bool = True,
    ) -> None:
        self._hook = hook
        self._options = options
        self._state = state
        self._replicas_equal = replicas_equal
        self._counters = counters
        self._rank = group.rank()
        self._world_size = group.size()
        self._passes_before = 0

    def begin_anew(self) -> None:
        self._passes_before = -self._counters.backward_passes

    @property
    def not_begun_anew(self) -> str:
        return (
            f"; its hook_state ({type(self._state).__name__}) stays as it is"
            if self.saves_state
            else ""
        )

    @property
    def step(self) -> int:
        """Synchronised backward passes, including passes before a resume."""
        return self._passes_before + self._counters.backward_passes

    @property
    def saves_state(self) -> bool:
        return all(
            callable(getattr(self._state, name, None)) for name in ("state_dict", "load_state_dict")
        )

    def save(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {
            "format": "commhooks",
            "version": VERSION,
            "hook": self._hook,
            "options": dict(self._options),
            "step": self.step,
            COUNTERS: self._counters.cumulative(),
            "world_size": self._world_size,
            "hook_state": self._users_state(),
            **({} if self._replicas_equal else {REPLICAS_EQUAL: False}),
        }

    def _users_state(self) -> Any:
        saved = self._state.state_dict() if self.saves_state else None
        problem = plain_types_problem(saved)
        if problem is None:
            return saved
        logger.warning(
            "the state_dict of hook %s's state is not saved: %s. torch.load(weights_only=True)"
            " would refuse the whole checkpoint; give it tensors and plain types only.",
            self._hook,
            problem,
        )
        return None

    def prepare_load(self, content: dict[str, Any], strict: bool) -> Callable[[], None]:
        check_world_size(content)
        if "hook_state" not in content:
            raise damaged("there is no 'hook_state', not even None")
        saved = content["hook_state"]
        kind = type(self._state).__name__
        problem = ""
        if saved is not None and not self.saves_state:
            problem = (
                f"the checkpoint holds a state of hook {self._hook!r}, but its hook_state now"
                f" ({kind}) has no load_state_dict"
            )
            if strict:
                raise PayloadError(
                    f"{problem}; strict=False, with hook=... or in the load, loads the step without"
                    " that state"
                )
            saved = None
            problem += ": it is left out (strict=False)"
        elif saved is None and self.saves_state:
            problem = (
                f"the checkpoint holds no state of hook {self._hook!r}: its hook_state ({kind})"
                " stays as it is"
            )
        if problem and self._rank == 0:
            logger.warning(problem)

        def take_over() -> None:
            if saved is not None:
                self._load_users_state(saved)
            self._passes_before = content["step"] - self._counters.backward_passes
            self._counters.resume_from(content[COUNTERS])

        return take_over

    def _load_users_state(self, saved: Any) -> None:
        try:
            self._state.load_state_dict(saved)
        except CommHookError:
            raise
        except Exception as error:
            raise PayloadError(
                f"load_state_dict of hook {self._hook!r}'s state ({type(self._state).__name__})"
                f" refused the saved hook_state ({type(error).__name__}: {shown(error)}). It may"
                " have changed a part of the state; the step is unchanged"
            ) from error

    def resumed(self, content: dict[str, Any]) -> str:
        return ""

    def kept_fields(self, source: GradientSource) -> dict[str, dict[str, torch.dtype]]:
        return {}


_LEAVES = {str, int, float, bool, type(None), complex, bytes, torch.dtype, torch.device, torch.Size}
_LEAVES |= {torch.Tensor, torch.nn.Parameter}
_MAPPINGS = (dict, collections.OrderedDict)


def plain_types_problem(
    value: Any, path: str = "", above: frozenset[int] = frozenset()
) -> str | None:
    """Return path and type of the first value that `torch.load(weights_only=True)` would reject.

    Returns None if it would reject none. A single such value makes the whole checkpoint unreadable.
    Types must match exactly: `numpy.float64` is a subclass of float, but its pickle is rejected.
    """
    kind = type(value)
    place = path or "the value itself"
    if kind in _LEAVES:
        return None
    if kind not in (list, tuple, set, *_MAPPINGS):
        return f"{place} is a {kind.__module__}.{kind.__qualname__}"
    if id(value) in above:
        return f"{path} contains itself"
    above |= {id(value)}
    inner: list[tuple[Any, str]] = []
    if kind in _MAPPINGS:
        for key, item in value.items():
            inner += [(key, f"the key {key!r} of {place}"), (item, f"{path}[{key!r}]")]
    elif kind is set:
        inner = [(item, f"an element of {path}") for item in value]
    else:
        inner = [(item, f"{path}[{index}]") for index, item in enumerate(value)]
    problems = (plain_types_problem(item, where, above) for item, where in inner)
    return next((problem for problem in problems if problem is not None), None)
