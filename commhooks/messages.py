"""Loggers whose warnings begin with "commhooks:", so that users see where they come from."""

import logging
from typing import TYPE_CHECKING, Any

PREFIX = "commhooks: "

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class _Logger(_Adapter):
    def warning(self, msg: object, *args: Any, **kwargs: Any) -> None:
        super().warning(f"{PREFIX}{msg}", *args, **{"stacklevel": 2} | kwargs)  # the caller's line, not this one


def logger_of(module: str) -> _Logger:
    """The logger of a module. Its other messages, such as those that torch's hooks log, remain as they are."""
    return _Logger(logging.getLogger(module), None)
