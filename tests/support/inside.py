"""What tests look at behind `CommHook`: the engine's session and what it has learned."""

from typing import Any

from commhooks import CommHook
from commhooks.engine.session import Session
from commhooks.hook.compressor_hook import CompressorHook


def session_of(hook: CommHook | None) -> Session:
    """The session of a hook with learned state."""
    assert hook is not None and learns(hook)
    return hook._hook.session  # type: ignore[attr-defined, no-any-return]


def learns(hook: CommHook) -> bool:
    """Whether the engine runs it with learned state."""
    return isinstance(hook._hook, CompressorHook) and hook._hook.learns


def user_state(hook: CommHook) -> Any:
    """The state of a user's own hook."""
    return hook._hook.state  # type: ignore[attr-defined]
