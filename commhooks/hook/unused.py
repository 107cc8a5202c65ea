"""One warning for a hook that a training does not use: it begins after the end of the training, or is never called."""

import collections
import functools
import os
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from commhooks.comm.counters import Counters
from commhooks.errors import logger_of

logger = logger_of(__name__)

_not_called: "weakref.WeakSet[UnusedWarning]" = weakref.WeakSet()
"""Those that count the backward passes of their models."""


@dataclass(frozen=True)
class Use:
    """What a hook has done so far.

    Attributes:
        acted: it has compressed a step, or averaged weights.
        plain: the latest step was a plain all-reduce, because the hook has not begun.
        begins: the step at which it begins.
        acts: the step at which it acts for the first time; as a rule the same.
        missing: what it has not done, if it has not acted.
        remedy: how to make it act earlier.
        or_later: " or later" if `begins` is the earliest step.
    """

    acted: bool
    plain: bool = False
    begins: int = 0
    acts: int = 0
    missing: str = "compressed nothing"
    remedy: str = ""
    or_later: str = ""


class UnusedWarning:
    """Logs the warning, once.

    Args:
        name: the name of the hook.
        counters: its counters.
        logs: whether this rank logs.

    Attributes:
        callback: called with the warning after the training.
    """

    def __init__(self, name: str, counters: Counters, *, logs: bool) -> None:
        self.callback: Callable[[str], None] | None = None
        self._name, self._counters, self._silent = name, counters, not logs
        self._warned_before = self._called = False
        self._process = os.getpid()
        self._parameters: frozenset[int] = frozenset()
        self._uncalled: _BackwardPasses | None = None

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """The hook was registered: until it is called, count the backward passes of these parameters."""
        self._parameters = frozenset(map(id, parameters))
        if not self._silent:
            self._uncalled = _BackwardPasses(parameters)
            _not_called.add(self)

    def called(self) -> None:
        """A backward pass has called the hook. Hooks of other wrappers of the same parameters are not missed then."""
        if not self._called:
            self._called = True
            self._stop_counting()
            for each in list(_not_called):
                if each._uncalled is not None:
                    each._uncalled.leave_out(self._parameters)

    def silence(self) -> None:
        """Log nothing from now on."""
        self._silent = True
        self._stop_counting()

    def before(self, use: Use, passes: int) -> None:
        """The training will end after so many further backward passes."""
        end = passes + self._counters.cumulative()["backward_passes"]
        if not (self._silent or use.acted or use.begins < end):
            self._warned_before = True
            logger.warning(
                "hook %r begins at step %s, but this training ends at step %s, so that it has no effect. %s.",
                self._name,
                use.begins,
                end,
                use.remedy,
            )

    def after(self, use: Use) -> None:
        """The training has ended. Nothing is logged while an exception is being handled, which may have ended it, and
        in a forked process, where the training goes on elsewhere."""
        if sys.exc_info()[0] is not None or os.getpid() != self._process:
            self.silence()
        if self._silent:
            return
        uncalled, text = self._stop_counting(), ""
        if uncalled and not self._called:
            text = (
                f"hook {self._name!r} was never called in {uncalled} backward passes of its model, and has averaged "
                "nothing. Train the wrapped model that it is attached to, and not in no_sync(), which leaves out the "
                "hook (Accelerate's LocalSGD uses it)."
            )
        elif self._called and not use.acted and use.acts > 0:
            passes, nonfinite = self._counters.cumulative()["backward_passes"], self._counters.nonfinite_steps
            skipped = f" ({nonfinite} of them were not finite, and are no steps)" if nonfinite else ""
            text = (
                f"hook {self._name!r} has {use.missing} in {passes} backward passes{skipped}: it begins at step "
                f"{use.acts}. {use.remedy}."
            )
        self._silent = True
        if text and not self._warned_before:
            logger.warning("%s", text)
        if text and self.callback is not None:
            self.callback(text)

    def _stop_counting(self) -> int:
        passes, self._uncalled = self._uncalled, None
        _not_called.discard(self)
        return 0 if passes is None else passes.stop()


class _BackwardPasses:
    """Counts the backward passes that give these parameters gradients, whoever averages them, until `stop`."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._by_parameter: collections.Counter[int] = collections.Counter()
        note = functools.partial(_count, self._by_parameter)  # it holds no more than the counter
        trained = [each for each in parameters if each.requires_grad]
        self._handles = {id(each): each.register_post_accumulate_grad_hook(note) for each in trained}

    def leave_out(self, parameters: Collection[int]) -> None:
        """Do not count the passes of the parameters with these `id()`s, not even the earlier ones."""
        for each in self._handles.keys() & parameters:
            self._handles.pop(each).remove()
            self._by_parameter.pop(each, None)

    def stop(self) -> int:
        """Returns the number of passes: that of the parameter with the most, because a pass may leave out others."""
        for each in self._handles.values():
            each.remove()
        self._handles.clear()
        return max(self._by_parameter.values(), default=0)


def _count(by_parameter: "collections.Counter[int]", parameter: torch.Tensor) -> None:
    by_parameter[id(parameter)] += 1
