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
    """Logs the warning at most once, when the hook is closed or the process exits, and passes it to
    `callback`. Does not own the hook, which is freed with its model.
    """

    def __init__(
        self, name: str, hook: Hook, parameters: Sequence[torch.Tensor], *, logs: bool
    ) -> None:
        self.callback: Callable[[str], None] | None = None
        self._stop_counting: list[Callable[[], None]] = []
        # Nothing is left on the parameters when the hook is gone.
        stop = functools.partial(_call_all, self._stop_counting)
        self._name, self._hook, self._counters = (
            name,
            weakref.ref(hook, lambda _: stop()),
            hook.counters,
        )
        self._last_use = hook.status().use  # as of the first pass, if the hook no longer exists
        self._logs = logs and self._last_use is not None
        self._parameters, self._process = set(map(id, parameters)), os.getpid()
        self._called = self._in_pass = self._warned_before = False
        # backward passes by id of a parameter
        self._passes: collections.Counter[int] = collections.Counter()

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """Watch the hook instead of those that it replaces: an earlier one of the same parameters,
        or one whose model no longer exists. Count the backward passes of `parameters`, with and
        without synchronisation, until the hook is called.
        """
        for other in list(_not_ended):
            if other._hook() is None or other._parameters & self._parameters:
                other.silence()
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
        """Log the warning now if the training ends after `passes` more backward passes and the hook
        begins later.
        """
        use, end = self._use(), passes + self._passes_so_far()
        if self._logs and use is not None and not use.acted and use.begins >= end:
            self._warned_before = True
            logger.warning(
                "hook %r begins at step %s, but this training ends at step %s, so that it has no"
                " effect. %s.",
                self._name,
                use.begins,
                end,
                use.remedy,
            )

    def ended(self) -> None:
        """Log the warning if the training ends now. Does not log if an exception may have ended it,
        nor in a forked process, because the training continues in the parent.
        """
        logs, use = self._logs and os.getpid() == self._process, self._use()
        failed = self._in_pass or sys.exc_info()[0] is not None
        # a backward pass need not use all parameters
        uncalled, text = (
            max(self._passes.values(), default=0),
            "",
        )
        self.silence()
        if not logs or failed or use is None:
            return
        if uncalled and not self._called:
            text = (
                f"hook {self._name!r} was never called in {uncalled} backward passes of its model,"
                " and has averaged nothing. Train the wrapped model that it is attached to, and"
                " not in no_sync(), which leaves out the hook (Accelerate's LocalSGD uses it)."
            )
        elif (
            self._called
            and not (use.acted or self._has_acted())
            and (self._has_begun() or use.acts > 0)
        ):
            nonfinite = self._counters.nonfinite_steps
            skipped = (
                f" ({nonfinite} of them were not finite, and are no steps)" if nonfinite else ""
            )
            why = use.why if self._has_begun() else f"it begins at step {use.acts}. {use.remedy}"
            text = (
                f"hook {self._name!r} has {use.missing} in {self._passes_so_far()} backward"
                f" passes{skipped}: {why}."
            )
        if text and not self._warned_before:
            logger.warning("%s", text)
        if text and self.callback is not None:
            self.callback(text)

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
