"""The errors that commhooks raises. All derive from `CommHookError`, so that one `except` catches them."""


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
