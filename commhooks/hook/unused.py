"""Warn once about a hook without effect: it begins after the training ends, or is never called."""

import atexit
import collections
import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence

import torch

from commhooks.errors import logger_of
from commhooks.hook.protocol import Hook
from commhooks.report import Use

logger = logger_of(__name__)

_not_ended: "list[UnusedWarning]" = []
"""The warnings of hooks that were not closed, for the exit of the process."""


class UnusedWarning:
    """Logs the warning at most once, when the hook is closed or the process exits.

    Also passes it to a callback. Does not own the hook, which is freed with its model.
    """

    def __init__(
        self, name: str, hook: Hook, parameters: Sequence[torch.Tensor], *, logs: bool
    ) -> None:
        self._callback: Callable[[str], None] | None = None
        self._stop_counting: list[Callable[[], None]] = []
        # Nothing is left on the parameters when the hook is gone.
        stop = functools.partial(_call_all, self._stop_counting)
        self._hook = weakref.ref(hook, lambda _: stop())
        self._name = name
        self._counters = hook.counters
        self._last_use = hook.status().use  # as of the first pass, if the hook no longer exists
        self._logs = logs and self._last_use is not None
        self._parameters = set(map(id, parameters))
        self._process = os.getpid()
        self._called = False
        self._in_pass = False
        self._warned_before = False
        # backward passes by id of a parameter
        self._passes: collections.Counter[int] = collections.Counter()

    def begin(
        self, parameters: Sequence[torch.Tensor], callback: Callable[[str], None] | None
    ) -> None:
        """Watch the hook, and count the backward passes of `parameters` until it is called.

        It takes the place of an earlier hook of the same parameters, and of those whose model no
        longer exists. Passes count with and without synchronisation. `callback`: gets the warning.
        """
        self._callback = callback
        for warning in list(_not_ended):
            if warning._hook() is None or warning._parameters & self._parameters:
                warning.silence()
        if self._logs:
            _not_ended.append(self)
            atexit.unregister(_at_exit)  # once, and before what was registered earlier
            atexit.register(_at_exit)
            note = functools.partial(_count, self._passes)  # a method would keep this object alive
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            self._stop_counting += [
                parameter.register_post_accumulate_grad_hook(note).remove for parameter in trained
            ]

    def before_pass(self) -> None:
        self._called = self._in_pass = True
        _call_all(self._stop_counting)

    def after_pass(self) -> None:
        self._in_pass = False

    def after_first_pass(self) -> None:
        self._last_use = self._use()

    def silence(self) -> None:
        self._logs = False
        _call_all(self._stop_counting)
        if self in _not_ended:
            _not_ended.remove(self)

    def will_end(self, passes: int) -> None:
        """Log the warning now if the hook begins later than the run ends, after `passes` passes."""
        use = self._use()
        end = passes + self._passes_so_far()
        if self._logs and use is not None and not use.acted and use.begins >= end:
            self._warned_before = True
            logger.warning(
                "hook %r begins at step %s, but this run ends at step %s, so that it has no"
                " effect. %s.",
                self._name,
                use.begins,
                end,
                use.remedy,
            )

    def ended(self) -> None:
        """Log the warning if the run ends now. Does not log if an exception may have ended it, nor
        in a forked process, because the run continues in the parent.
        """
        logs = self._logs and os.getpid() == self._process
        failed = self._in_pass or sys.exc_info()[0] is not None
        use = self._use()
        self.silence()
        if not logs or failed or use is None:
            return
        text = self._without_effect(use) if self._called else self._never_called()
        if text and not self._warned_before:
            logger.warning("%s", text)
        if text and self._callback is not None:
            self._callback(text)

    def _never_called(self) -> str:
        passes = max(self._passes.values(), default=0)  # a pass need not use all parameters
        if not passes:
            return ""
        return (
            f"hook {self._name!r} was never called in {passes} backward passes of its model,"
            " and has averaged nothing. Train the wrapped model that it is attached to, and"
            " not in no_sync(), which leaves out the hook (Accelerate's LocalSGD uses it)."
        )

    def _without_effect(self, use: Use) -> str:
        begun = self._has_begun()
        if use.acted or self._has_acted() or not (begun or use.acts > 0):
            return ""
        nonfinite = self._counters.nonfinite_steps
        skipped = f" ({nonfinite} of them were not finite, and are no steps)" if nonfinite else ""
        why = use.why if begun else f"it begins at step {use.acts}. {use.remedy}"
        return (
            f"hook {self._name!r} has {use.missing} in {self._passes_so_far()} backward"
            f" passes{skipped}: {why}."
        )

    def _use(self) -> Use | None:
        hook = self._hook()
        return self._last_use if hook is None else hook.status().use

    def _has_begun(self) -> bool:
        return self._counters.numel_before > 0

    def _has_acted(self) -> bool:
        return self._counters.compressed_steps > 0 or self._counters.passes_acted > 0

    def _passes_so_far(self) -> int:
        return self._counters.cumulative()["backward_passes"]


def _at_exit() -> None:
    for warning in list(_not_ended):
        if getattr(sys, "last_value", None) is None:  # otherwise an exception ends the interpreter
            warning.ended()


def _call_all(functions: list[Callable[[], None]]) -> None:
    """Call each function once, and empty the list."""
    while functions:
        functions.pop()()


def _count(passes: "collections.Counter[int]", parameter: torch.Tensor) -> None:
    passes[id(parameter)] += 1
