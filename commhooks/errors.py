"""The errors that commhooks raises, and helpers for their texts. All derive from `CommHookError`, so that one `except`
catches them."""

import difflib
from collections.abc import Iterable


class CommHookError(Exception):
    """Base class of every error that this package raises on purpose."""


class HookConfigError(CommHookError, ValueError):
    """A hook, an option or a combination of options that cannot work; the text names the offender."""


class AttachError(CommHookError, RuntimeError):
    """A model to which no hook can be attached; the text says why and what to do."""


class HookRunError(CommHookError, RuntimeError):
    """A hook that misbehaved, or ranks that disagree, during a backward pass."""


class PayloadError(CommHookError, ValueError):
    """A checkpoint payload that does not fit; nothing was changed. The text lists the names that do not fit."""


class DoctorError(CommHookError, RuntimeError):
    """A measurement that `commhooks.doctor` cannot make; the text says why and what to do."""


def shown(value: object) -> str:
    """A short `repr` for a message. Not everything has one: an int of 5,000 digits, a list 100,000 levels deep."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:90]}... ({type(value).__name__})"


def closest(name: str, candidates: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"`, or nothing where no candidate is similar."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if not matches and len(name) > 2:  # "rank" for "matrix_approximation_rank"
        matches = [candidate for candidate in by_lower if name.lower() in candidate][:1]
    return f" (did you mean {by_lower[matches[0]]!r}?)" if matches else ""
