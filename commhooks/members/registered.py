"""State that machines hand over beside the model's: schedulers, step counts, and what users
register.
"""

from collections.abc import Callable, Mapping
from typing import Any

from commhooks.errors import HookConfigError
from commhooks.local_steps.common_state import CommonState, Part, packed_values, set_packed


class Registered:
    """Keeps the functions that return and set further state of this machine."""

    _common: CommonState

    def __init__(self) -> None:
        self._functions: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def bind(self, common: CommonState) -> None:
        self._common = common

    def add(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        """Raises HookConfigError if the name is registered."""
        if name in self._functions:
            raise HookConfigError(f"members.register({name!r}): the name is registered already")
        self._functions[name] = get, set

    def parts(self) -> dict[str, Part]:
        """Return the state now, and the function that sets it, by label."""
        return {
            f"registered {name}": (get(), set_value)
            for name, (get, set_value) in self._functions.items()
        }

    # ---- the progress of a machine, which machines that have done less steps take over
    # ----------------------------------------------------------------------------------------------

    def progress(self) -> bytes:
        """Return where this machine stands: what is registered, and the learning rates."""
        return packed_values({label: value for label, (value, _) in self._progress().items()})

    def take_progress(self, content: bytes) -> None:
        """Go on from where another machine stands."""
        set_packed(content, self._progress())

    def _progress(self) -> Mapping[str, Part]:
        return self.parts() | self._common.rates()
