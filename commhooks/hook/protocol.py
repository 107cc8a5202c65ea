"""The interface of the three kinds of hooks: compressors, users' functions and local steps."""

import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from commhooks.checkpoint.learned_state import LearnedStateCheckpointer
from commhooks.checkpoint.user_state import UserStateCheckpointer
from commhooks.comm.counters import Counters
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import Future, PassListener
from commhooks.plan import ModelPlan
from commhooks.report import Status, Summary

if TYPE_CHECKING:
    from commhooks.members.members import Members


class Residuals(NamedTuple):
    """Holds the 1-D residuals by parameter name, the factor by which they are scaled (loss scale
    times ranks per node), and the names of the parameters that the hook compresses. For
    `CommHook.norms`.
    """

    tensors: Mapping[str, torch.Tensor]
    factor: float
    measured: Collection[str]


class Hook(Protocol):
    counters: Counters

    @property
    def members(self) -> "Members | None":
        """The machines, if they come and go; None otherwise."""

    def run(self, bucket: Bucket, /) -> Future:
        """Reduce one bucket, and return a future of the result."""

    def end_pass(self) -> None:
        """End a pass in which no bucket was marked as the last."""

    def listeners(self, *, logs: bool) -> list[PassListener]:
        """Return what watches the backward passes of this hook. Called once, before `run` is
        registered. `logs`: whether this rank logs.
        """

    @property
    def checkpointer(self) -> LearnedStateCheckpointer | UserStateCheckpointer: ...

    def status(self) -> Status: ...

    def stats(self) -> dict[str, Any]:
        """Return the entries of `CommHook.stats` that are not counters, always including "step".
        Updates the counters, which may wait for an accelerator.
        """

    def summary(self) -> Summary: ...

    def warnings(self) -> list[str]:
        """Return the warnings that rank 0 logs in `attach`."""

    def plan(self) -> ModelPlan: ...

    def residuals(self) -> contextlib.AbstractContextManager[Residuals]:
        """Context manager: the residuals are valid inside its body."""

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        """See `CommHook.synchronize`. `limit_s`: seconds to wait for the other ranks."""

    def close(self) -> None: ...
