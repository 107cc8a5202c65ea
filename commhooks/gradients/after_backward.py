"""Something to do at the end of the backward pass that is running now."""

import contextlib
from collections.abc import Callable

import torch


def in_backward() -> bool:
    """Whether a backward pass is running in this thread. Where `Join` shadows the other ranks' collectives none is."""
    # Private (torch 2.13): the pass that is running; set also where DDP calls hooks at its very end (static_graph).
    return torch._C._current_graph_task_id() != -1


def run_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once the running backward pass has come to its end without an exception.

    Ask again at every bucket: reentrant checkpointing runs backward passes within the backward pass, and what is asked
    for in an inner one is dropped at its end. Outside of a backward pass (where `Join` shadows the others' collectives)
    nothing happens.
    """

    def at_the_end() -> None:
        # Private (torch 2.13): the node that the pass around this one is at, if there is one.
        if torch._C._current_autograd_node() is None:
            callback()

    # Private, and the only way to run something at the end of a backward pass from within it (torch 2.13; torch's own
    # optimizer_overlap_hooks.py does the same). Outside of one it raises a RuntimeError.
    engine = torch.autograd.Variable._execution_engine
    with contextlib.suppress(RuntimeError):
        engine.queue_callback(at_the_end)
