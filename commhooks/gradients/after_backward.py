"""Run a function at the end of the current backward pass."""

import contextlib
from collections.abc import Callable

from commhooks.gradients.torch_private import current_autograd_node, current_graph_task_id, queue_callback


def current_task() -> int:
    """The id of the backward pass that runs in this thread; -1 if none does."""
    return current_graph_task_id()


def in_backward() -> bool:
    """Whether a backward pass is running in this thread. False when `Join` shadows the collectives of other ranks."""
    return current_task() != -1


def run_after_backward(callback: Callable[[], None], within: Callable[[], None] | None = None) -> None:
    """Call `callback` at the end of the current backward pass unless that ends in an exception.

    Call this at every bucket: reentrant checkpointing runs backward passes inside the backward pass, and a callback
    queued in an inner pass is dropped at the end of that pass, where `within` is called instead. Outside of a backward
    pass (when `Join` shadows the collectives of other ranks) it does nothing.
    """

    def at_the_end() -> None:
        if current_autograd_node() is None:
            callback()
        elif within is not None:
            within()

    with contextlib.suppress(RuntimeError):
        queue_callback(at_the_end)
