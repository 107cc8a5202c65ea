"""Warn once about a hook without effect: it would begin after the training ends, or is never called."""

import collections
import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from commhooks.errors import logger_of
from commhooks.hook.protocol import Hook

logger = logger_of(__name__)

_waiting: "weakref.WeakSet[UnusedWarning]" = weakref.WeakSet()
"""Warnings for hooks that have not been called yet."""


class UnusedWarning:
    """Logs the warning at most once, and passes it to `callback` after the training."""

    def __init__(self, name: str, hook: Hook, *, logs: bool) -> None:
        self.callback: Callable[[str], None] | None = None
        self._name, self._hook, self._silent = name, hook, not logs
        self._warned_before = self._called = False
        self._process = os.getpid()
        self._parameters: set[int] = set()  # their ids
        self._passes: collections.Counter[int] = collections.Counter()  # backward passes by id of a parameter
        self._handles: dict[int, RemovableHandle] = {}

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Count the backward passes of these parameters, with and without synchronisation, until the hook is called."""
        self._parameters = set(map(id, parameters))
        if not self._silent:
            note = functools.partial(_count, self._passes)  # a method would keep this object alive
            trained = [each for each in parameters if each.requires_grad]
            self._handles = {id(each): each.register_post_accumulate_grad_hook(note) for each in trained}
            _waiting.add(self)

    def called(self) -> None:
        """Run in the hook's first backward pass. Hooks on other wrappers of the same parameters stop counting them."""
        self._called = True
        self._stop_counting()
        for other in list(_waiting):
            for each in other._handles.keys() & self._parameters:
                other._handles.pop(each).remove()
                other._passes.pop(each, None)

    def silence(self) -> None:
        self._silent = True
        self._stop_counting()

    def will_end(self, passes: int) -> None:
        """Log the warning now if the training ends after `passes` more backward passes and the hook begins later."""
        use, end = self._hook.status().use, passes + self._passes_so_far()
        if use is not None and not (self._silent or use.acted or use.begins < end):
            self._warned_before = True
            logger.warning(
                "hook %r begins at step %s, but this training ends at step %s, so that it has no effect. %s.",
                self._name,
                use.begins,
                end,
                use.remedy,
            )

    def ended(self) -> None:
        """Run at the end of the training. Does not log while an exception is being handled, which may have ended the
        training, nor in a forked process, because the training continues in the parent."""
        if sys.exc_info()[0] is not None or os.getpid() != self._process:
            self.silence()
        use = None if self._silent else self._hook.status().use
        # A backward pass need not use all parameters.
        uncalled, text = max(self._passes.values(), default=0), ""
        self.silence()
        if use is None:
            return
        if uncalled and not self._called:
            text = (
                f"hook {self._name!r} was never called in {uncalled} backward passes of its model, and has averaged "
                "nothing. Train the wrapped model that it is attached to, and not in no_sync(), which leaves out the "
                "hook (Accelerate's LocalSGD uses it)."
            )
        elif self._called and not use.acted and use.acts > 0:
            nonfinite = self._hook.counters.nonfinite_steps
            skipped = f" ({nonfinite} of them were not finite, and are no steps)" if nonfinite else ""
            text = (
                f"hook {self._name!r} has {use.missing} in {self._passes_so_far()} backward passes{skipped}: it begins "
                f"at step {use.acts}. {use.remedy}."
            )
        if text and not self._warned_before:
            logger.warning("%s", text)
        if text and self.callback is not None:
            self.callback(text)

    def _passes_so_far(self) -> int:
        return self._hook.counters.cumulative()["backward_passes"]

    def _stop_counting(self) -> None:
        _waiting.discard(self)
        while self._handles:
            self._handles.popitem()[1].remove()


def _count(passes: "collections.Counter[int]", parameter: torch.Tensor) -> None:
    passes[id(parameter)] += 1
