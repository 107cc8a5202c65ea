"""Internals of `CommHook` for tests: the engine's session and its learned state."""

from typing import Any

from commhooks import CommHook
from commhooks.engine.session import Session
from commhooks.hook.compressor_hook import CompressorHook


def session_of(hook: CommHook | None) -> Session:
    """Return the session of a hook with learned state."""
    assert hook is not None and learns(hook)
    return hook._hook.session  # type: ignore[attr-defined, no-any-return]


def learns(hook: CommHook) -> bool:
    """Whether the hook has learned state."""
    return isinstance(hook._hook, CompressorHook) and hook._hook.learns


def user_state(hook: CommHook) -> Any:
    """Return the state of a user's hook."""
    return hook._hook.state  # type: ignore[attr-defined]
