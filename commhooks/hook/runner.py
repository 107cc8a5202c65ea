"""The interface between `CommHook` and the kinds of hooks: those of the engine, and users' functions."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commhooks.comm.counters import Counters
from commhooks.compressors.base import Compressor
from commhooks.engine.arrangement import Flat
from commhooks.engine.kernel_choice import Choice, KernelSupport
from commhooks.errors import HookConfigError
from commhooks.gradients import precision
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.names import ParameterNames
from commhooks.hook.model_plan import ModelPlan

Future = torch.futures.Future[torch.Tensor]


class SavedState(Protocol):
    """Saves and loads the state of a hook."""

    @property
    def step(self) -> int: ...
    @property
    def not_begun_anew(self) -> str: ...
    def save(
        self, residual: str, *, gather: bool = False, joint: bool = True, limit_s: float = 60.0
    ) -> dict[str, Any]: ...
    def prepare_load(self, content: dict[str, Any], strict: bool) -> Callable[[], None]: ...
    def begin_anew(self) -> None: ...
    def resumed(self, content: dict[str, Any]) -> str:
        """The end of the log line about `content`, which was loaded."""


class Runner(ABC):
    """Base of the kinds of hooks; `CommHook` delegates to it.

    Attributes:
        counters: the counters of this rank.
        saved_state: saves and loads the state of the hook.
        counts_bytes: whether the sent bytes are known.
        choice: the kernel that all ranks use.
        counts_outcomes: whether it is known which steps were committed and which were compressed.
    """

    counters: Counters
    saved_state: SavedState
    choice = Choice()
    counts_bytes = True
    counts_outcomes = False

    @abstractmethod
    def run(self, bucket: Bucket, grad_bucket: dist.GradBucket | None) -> Future:
        """Reduce one bucket; `grad_bucket` is the same bucket as DDP passed it, None without DDP. All ranks must call
        this, in the same order."""

    def end_pass(self) -> None:
        """Complete the futures of all buckets, if the last one was not marked as the last."""
        return None

    def close(self) -> None:
        """Free the buffers; no further backward pass will follow."""
        return None

    def settle(self) -> None:
        """Bring counters and step up to date; may synchronise with an accelerator."""
        return None

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options in force, as plain types."""

    @abstractmethod
    def plan(self) -> ModelPlan:
        """See `CommHook.plan`."""

    @abstractmethod
    def announcement(self, plan: ModelPlan) -> str:
        """The text after the hook's name in the log line at the end of the first backward pass."""

    def announcement_alone(self, unit: str) -> str:
        """The same text where there is only one rank or one replica (`unit`), so that nothing is sent."""
        return f": there is one {unit}, so nothing is sent"

    @contextlib.contextmanager
    def residuals(self) -> Iterator[tuple[Mapping[str, torch.Tensor], float]]:
        """Context manager: the residuals (1-D) by parameter name, and the factor by which they are multiplied: the loss
        scale, times the ranks of a node. They may be read only in its body."""
        yield {}, 1.0

    def kept_residuals(self, names: ParameterNames) -> dict[str, torch.dtype] | None:
        """The parameters of a model with these parameters that could have a residual, and its dtype. None: the hook
        keeps no residuals."""
        return None

    def measured(self, names: set[str]) -> set[str]:
        """The subset of `names` that `CommHook.norms` covers."""
        return names

    def kernel_support(self, parameters: Mapping[str, torch.Tensor]) -> KernelSupport:
        """What this machine can compute with. It may differ between ranks."""
        return KernelSupport()

    def compute_with(self, choice: Choice) -> None:
        """Use the kernel on which all ranks have agreed."""
        self.choice = choice

    def arrange(self, arrangement: Flat) -> None:
        """Share the work among the ranks in this way. Called once, on all ranks, before the first backward pass."""
        raise NotImplementedError  # requests for hooks that cannot are refused

    def remarks(self, *, checked: bool) -> list[str]:
        """Warnings about the ranks' machines that rank 0 logs at the end of the first backward pass. `checked`: the
        replicas are compared now and then."""
        return []

    def said(self) -> list[str]:
        """What the hook has decided since the last call, for rank 0 to say; see `Session.remarks`."""
        return []

    @property
    def run_number(self) -> int | None:
        """See `CommHook.run_number`."""
        return None

    @property
    def chosen(self) -> tuple[str | None, int | None]:
        """What a hook that chooses has chosen, and since which step; None for others."""
        return None, None

    def problems(self) -> list[str]:
        """Warnings that rank 0 logs when the hook is attached."""
        return []


def several_devices(parameters: Mapping[str, torch.Tensor], compressor: Compressor[Any]) -> str:
    """An error message if they are on several devices, which this compressor cannot do; "" otherwise."""
    try:
        precision.check_one_device({p.device for p in parameters.values()}, compressor.display_name)
    except HookConfigError as error:
        return str(error)
    return ""
