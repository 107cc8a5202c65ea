"""What runs a hook behind `CommHook`: the engine, or a user's own function."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commhooks.checkpoint.learned_state import SaveRequest
from commhooks.comm.counters import Counters
from commhooks.gradients.bucket import Bucket
from commhooks.hook.plan import ModelPlan

Future = torch.futures.Future[torch.Tensor]


class SavedState(Protocol):
    """A hook's state on its way to a checkpoint and back."""

    @property
    def step(self) -> int: ...
    @property
    def not_begun_anew(self) -> str: ...
    def save(self, request: SaveRequest) -> dict[str, Any]: ...
    def prepare_load(self, content: dict[str, Any], strict: bool) -> Callable[[], None]: ...
    def begin_anew(self) -> None: ...


class Runner(ABC):
    """One kind of hook. `CommHook` asks it everything that depends on the kind.

    Attributes:
        counters: of this rank.
        saved_state: see there.
        counts_bytes: whether it is known what is sent.
        counts_outcomes: whether it is known which steps were committed and which compressed.
    """

    counters: Counters
    saved_state: SavedState
    counts_bytes = True
    counts_outcomes = False

    @abstractmethod
    def run(self, bucket: Bucket, grad_bucket: dist.GradBucket) -> Future:
        """Reduce one bucket; `grad_bucket` is the same as DDP passed it. All ranks, in the same order."""

    def begin_pass(self) -> None:
        """Called before the first bucket of a backward pass."""
        return None

    def settle(self) -> None:
        """Bring counters and step up to date; may wait for an accelerator."""
        return None

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options in force, plain types."""

    @abstractmethod
    def plan(self) -> ModelPlan:
        """See `CommHook.plan`."""

    @abstractmethod
    def announcement(self, plan: ModelPlan) -> str:
        """What the line at the end of the first backward pass says after the hook's name."""

    @contextlib.contextmanager
    def residuals(self) -> Iterator[tuple[Mapping[str, torch.Tensor], float]]:
        """Residuals by parameter name, flat, and the loss scale by which they are multiplied; valid in the body."""
        yield {}, 1.0

    def measured(self, names: set[str]) -> set[str]:
        """Those of the parameters `names` that `CommHook.norms` is about."""
        return names

    def check_here(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raise HookConfigError where this machine cannot do what is asked for. Other ranks may be able to."""
        return None

    def problems(self) -> list[str]:
        """What rank 0 warns of when the hook is attached."""
        return []
