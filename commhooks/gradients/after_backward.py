"""Run a function at the end of the current backward pass."""

import contextlib
from collections.abc import Callable

import torch


def current_task() -> int:
    """The id of the backward pass that runs in this thread; -1 if none does."""
    # Private (torch 2.13); also set when callbacks run at the end of the pass.
    return torch._C._current_graph_task_id()


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
        # Private (torch 2.13): the current node of the enclosing backward pass; None in the outermost one.
        if torch._C._current_autograd_node() is None:
            callback()
        elif within is not None:
            within()

    # Private (torch 2.13), and the only way to queue a callback for the end of a backward pass from within it; torch's
    # optimizer_overlap_hooks.py does the same. Raises RuntimeError outside of a backward pass.
    engine = torch.autograd.Variable._execution_engine
    with contextlib.suppress(RuntimeError):
        engine.queue_callback(at_the_end)
