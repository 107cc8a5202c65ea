"""Exceptions, all derived from `CommHookError`, and their messages; loggers; versions."""

import atexit
import contextlib
import difflib
import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any


class CommHookError(Exception):
    """Base class of every error that this package defines."""

    printed = False
    """Whether rank 0 has printed the message."""


class HookConfigError(CommHookError, ValueError):
    """Raised for an invalid hook, option or combination of options; the message names it."""


class AttachError(CommHookError, RuntimeError):
    """No hook can be attached to this model; the message gives the reason and the remedy."""


class HookRunError(CommHookError, RuntimeError):
    """Raised if a hook failed during a backward pass, or the ranks disagreed."""


class PayloadError(CommHookError, ValueError):
    """Raised if a checkpoint payload does not fit the model; nothing was changed. The message lists
    the mismatched names.
    """


class CommandError(CommHookError, RuntimeError):
    """A command of `commhooks` cannot run here; the message gives the reason and the remedy."""


@contextlib.contextmanager
def errors_begin_with(
    place: object, kind: type[CommHookError] = PayloadError, *, remedy: str = ""
) -> Iterator[None]:
    """Context manager: prefix the messages of `kind` errors in the body with `place`, a file or
    setting. If the error means that a saved state is damaged, append `remedy`.
    """
    try:
        yield
    except kind as error:
        damaged = "damaged" in str(error) or "not the state" in str(error)
        raise kind(f"{place}: {error}" + (f". {remedy}" if remedy and damaged else "")) from error


MOST_LISTED = 8
"""How many numbers of a list a message shows."""


def shown(value: object) -> str:
    """Return a `repr` of at most about 100 characters, or the type's name if `repr` raises (an int
    of 5,000 digits, a list 100,000 levels deep).
    """
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:90]}... ({type(value).__name__})"


def listed(values: Iterable[object], separator: str = ", ") -> str:
    """Join the first eight values for a message, which names the number of the others: a run may
    have 1,000 ranks.
    """
    texts = [str(value) for value in values]
    more = f" and {len(texts) - MOST_LISTED} more" if len(texts) > MOST_LISTED else ""
    return separator.join(texts[:MOST_LISTED]) + more


def invalid(where: str, value: object, expected: str, near: Iterable[str] = ()) -> HookConfigError:
    """Return the error about the `value` of an argument, option or setting.

    `where`: its name or key path. `near`: valid values, to suggest the closest.
    """
    hint = did_you_mean(value, near) if isinstance(value, str) else ""
    return HookConfigError(f"{where}={shown(value)}; expected {expected}{hint}")


def no_such(whose: str, kind: str, name: str, names: Collection[str]) -> HookConfigError:
    """Return the error about an unknown `name`. `kind`: "argument", "option" or "setting"."""
    if not names:
        return HookConfigError(f"{whose} has no {kind}s, got {name!r}")
    hint = ""
    if kind == "argument" and "hook_options" in names:
        hint = "; options of the hook go into hook_options"
    meant = did_you_mean(name, names)
    return HookConfigError(
        f"{whose} has no {kind} {name!r}{meant}; known are {', '.join(names)}{hint}"
    )


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"`, or "" if no candidate is similar.

    A similar one begins with `name` ("start" for "start_iter"), is spelt similarly, or contains
    `name` ("rank" for "matrix_approximation_rank", but not for "ranks_per_node").
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    typed = name.lower()
    contain = []
    if len(name) > 2:
        contain = [lower for lower in by_lower if typed in lower.replace(f"{typed}s", "")]
    matches = sorted((lower for lower in contain if lower.startswith(typed)), key=len)
    matches += difflib.get_close_matches(typed, by_lower, n=1, cutoff=0.5 if len(name) > 4 else 0.6)
    matches += contain
    return f" (did you mean {by_lower[matches[0]]!r}?)" if matches else ""


WARNING_PREFIX = "commhooks: "

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class _Logger(_Adapter):
    def warning(self, msg: object, *args: Any, **kwargs: Any) -> None:
        # Without a stack level the record would name this line instead of the caller's.
        super().warning(f"{WARNING_PREFIX}{msg}", *args, **{"stacklevel": 2} | kwargs)


def logger_of(module: str) -> _Logger:
    """Return the logger of a module, which prefixes warnings with "commhooks:".

    Other records are unchanged, because torch's hooks log the same lines.
    """
    return _Logger(logging.getLogger(module), None)


_summary_logger = logging.getLogger("commhooks.summary")


def log_summary(line: str) -> None:
    """Log a line for users, or print it if logging is not configured."""
    text = f"commhooks: {line}"
    if _summary_logger.isEnabledFor(logging.INFO) and _summary_logger.hasHandlers():
        _summary_logger.info(text)
    else:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def print_error_on_rank_zero() -> Iterator[None]:
    """Context manager: rank 0 prints the message of a CommHookError that the body raises.

    All ranks raise such errors, and their interleaved tracebacks would hide the message. A single
    process prints it as its last line if it ends by an error of another library that holds the
    message somewhere in the middle.
    """
    try:
        yield
    except CommHookError as error:
        import torch.distributed as dist  # local, because it is slow to import

        if dist.is_initialized():
            rank = dist.get_rank()
            ranks = dist.get_world_size()
        else:  # set by launchers
            rank = int(os.environ.get("RANK") or 0)
            ranks = int(os.environ.get("WORLD_SIZE") or 1)
        if rank == 0:
            atexit.unregister(_repeat_if_buried)
            atexit.register(_repeat_if_buried, str(error))
        if rank == 0 and ranks > 1 and not error.printed:
            error.printed = True
            _print_error(str(error))
        raise


def _print_error(message: str) -> None:
    print(f"commhooks: error: {message}", file=sys.stderr, flush=True)


def _repeat_if_buried(message: str) -> None:
    """Print `message` if another library has caught our error and raised its own.

    jsonargparse puts its values below our sentence, and Hydra the name of a key.
    """
    last = getattr(sys, "last_value", None)  # set by Python for the traceback that it has printed
    if isinstance(last, CommHookError):
        return
    texts = []
    while last is not None:
        texts.append(str(last))
        last = last.__cause__ or last.__context__
    if any(message in text for text in texts):
        _print_error(message)


# ---- versions
# --------------------------------------------------------------------------------------------------

OLDEST = {
    "accelerate": "1.10.0",
    "lightning": "2.6.0",
    "lightning_fabric": "2.6.0",
    "pytorch_lightning": "2.6.0",
    "transformers": "5.3.0",
}
"""The oldest supported versions, as in pyproject.toml; docs/versions.md explains them."""


def check_version(framework: ModuleType) -> None:
    name, version = framework.__name__, framework.__version__
    if _numbers(version) < _numbers(OLDEST[name]):
        raise ImportError(
            f"commhooks needs {name} {OLDEST[name]} or newer, and {version} is installed: "
            f'pip install --upgrade "{name.replace("_", "-")}>={OLDEST[name]}"'
        )


@contextlib.contextmanager
def needed(*packages: str, sentence: str) -> Iterator[None]:
    """Context manager for importing `packages`, which are keys of `OLDEST`.

    Raises ImportError if a package is too old, or, with the message `sentence`, is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        raise ImportError(sentence) from error
    for package in packages:
        check_version(sys.modules[package])


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"\d+(\.\d+){0,2}", version)
    return tuple(map(int, f"{leading[0]}.0.0".split(".")))[:3] if leading else (0, 0, 0)
