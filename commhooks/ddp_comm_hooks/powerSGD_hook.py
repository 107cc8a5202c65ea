"""Replaces `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`.

Annotations must be real objects here (no `from __future__ import annotations`): `register_comm_hook` compares them.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.comm.counters import Stats
from commhooks.compressors.config import BatchedPowerSGD, PowerSGD
from commhooks.engine.session import Registration
from commhooks.engine.state import Memory
from commhooks.errors import HookConfigError, HookRunError
from commhooks.gradients.names import Names, PlaceNames

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)


class PowerSGDState:
    """Configuration and memory of PowerSGD for one DDP model; replaces torch's `PowerSGDState`.

    Arguments, their order and their defaults are torch's. What differs: `start_powerSGD_iter` may be 0 or 1 with error
    feedback or warm start; `orthogonalization_epsilon` is accepted and changes nothing; loading a pickled state needs
    no process group; `alternate` and `fused` are ours. See `commhooks.PowerSGD` for the meaning of each.

    Args:
        process_group: over which to average; None is the default group at the time of the backward pass.

    Raises:
        HookConfigError: an argument of the wrong type or out of range.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        alternate: bool = False,
        fused: bool = False,
    ) -> None:
        self.process_group = process_group
        self._options = PowerSGD(
            matrix_approximation_rank=matrix_approximation_rank,
            start_powerSGD_iter=start_powerSGD_iter,
            min_compression_rate=min_compression_rate,
            use_error_feedback=use_error_feedback,
            warm_start=warm_start,
            orthogonalization_epsilon=orthogonalization_epsilon,
            random_seed=random_seed,
            compression_stats_logging_frequency=compression_stats_logging_frequency,
            batch_tensors_with_same_shape=batch_tensors_with_same_shape,
            alternate=alternate,
            fused=fused,
        )
        if not isinstance(start_powerSGD_iter, int):
            raise HookConfigError(
                f"PowerSGDState: start_powerSGD_iter={start_powerSGD_iter!r}; expected a number of steps (int). "
                "A fraction of the run can be given to commhooks.attach, which is told the length of the run"
            )
        self._memory = Memory()
        self._stats = Stats()
        self._names: Names = PlaceNames()
        self._loss_scale: Callable[[], float | torch.Tensor] | None = None
        self._registration: Registration | None = None
        logger.info("PowerSGD config: %s", self._options)

    @classmethod
    def from_config(
        cls,
        config: PowerSGD | BatchedPowerSGD,
        process_group: dist.ProcessGroup | None,
        names: Names,
        loss_scale: Callable[[], float | torch.Tensor] | None = None,
    ) -> "PowerSGDState":
        """A state for `config`, whose start step must be a number, with parameters known by `names`."""
        state = cls(process_group)
        state._options = config
        state._names = names
        state._loss_scale = loss_scale
        return state

    @property
    def iter(self) -> int:
        """Synchronised backward passes that were committed: all that were finite on every rank."""
        if self._registration is not None:
            self._registration.pipeline.settle()
        return self._memory.step

    @property
    def matrix_approximation_rank(self) -> int:
        return self._options.matrix_approximation_rank

    @property
    def start_powerSGD_iter(self) -> int:
        start = self._options.start_powerSGD_iter
        assert isinstance(start, int)
        return start

    @property
    def min_compression_rate(self) -> float:
        return self._options.min_compression_rate

    @property
    def use_error_feedback(self) -> bool:
        return self._options.use_error_feedback

    @property
    def warm_start(self) -> bool:
        return self._options.warm_start

    @property
    def orthogonalization_epsilon(self) -> float:
        return self._options.orthogonalization_epsilon

    @property
    def random_seed(self) -> int:
        return self._options.random_seed

    @property
    def compression_stats_logging_frequency(self) -> int:
        return max(1, self._options.compression_stats_logging_frequency)

    @property
    def batch_tensors_with_same_shape(self) -> bool:
        return self._options.batch_tensors_with_same_shape

    def compression_stats(self) -> tuple[float, int, int]:
        """(compression rate, elements before, elements after), summed over the compressed backward passes so far."""
        before, after = self._stats.numel_before, self._stats.numel_after
        return (before / after if after else 0, before, after)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the process group and what belongs to a running registration."""
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        if self._registration is not None:
            self._registration.pipeline.settle()
        rank = dist.get_rank(self.process_group) if dist.is_initialized() else None
        return {
            "options": self._options,
            "memory": self._memory.apart(),
            "stats": self._stats,
            "saved_on": None if rank is None else (rank, dist.get_world_size(self.process_group)),
            "names": type(self._names).__name__,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """The process group becomes the default group, which need not exist yet."""
        logger.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). "
            "If a different group is desired, please set `self.process_group` after PowerSGD state is loaded."
        )
        self.process_group = None
        # One that was pickled by an earlier version lacks the options that are newer.
        self._options = type(saved["options"])(**vars(saved["options"]))
        self._memory = saved["memory"]
        self._stats = saved["stats"]
        self._names = PlaceNames()
        self._loss_scale = None
        self._registration = None
        self._saved_on = saved["saved_on"]
        self._saved_names = saved["names"]

    # Set by __setstate__ only: the residual of a pickled state belongs to the (rank, world size) that saved it, and its
    # memory is keyed by the names that the model gave or by places.
    _saved_on: tuple[int, int] | None = None
    _saved_names: str | None = None
    # Set by `commhooks.attach`.
    _attached_to: "weakref.ref[DistributedDataParallel] | None" = None

    def _adapt_pickled_memory(self) -> None:
        here = (dist.get_rank(self.process_group), dist.get_world_size(self.process_group))
        if self._saved_on is not None and self._saved_on != here:
            self._memory.residual_missing = bool(self._memory.residuals)
            self._memory.residuals.clear()
        known = bool(self._memory.q or self._memory.residuals or self._memory.residual_missing)
        if known and self._saved_names is not None and self._saved_names != type(self._names).__name__:
            self._memory.forget_factors()
            self._memory.drop_residuals()
            if here[0] == 0:
                logger.warning(
                    "PowerSGD: the pickled state knows parameters by other names than this use of it (commhooks.attach "
                    "uses the model's names, a bare register_comm_hook places): Q and residuals start fresh, the step "
                    "is kept. Load it the way it was used, or use state_dict and load_state_dict of the attached hook."
                )
        self._saved_on = self._saved_names = None

    def _run(
        self, bucket: dist.GradBucket, batched: bool, wrapper_dtype: torch.dtype | None
    ) -> torch.futures.Future[torch.Tensor]:
        registration = self._registration
        if registration is None:
            self._adapt_pickled_memory()
            registration = self._registration = Registration(
                self._options,
                self._memory,
                self._stats,
                self._names,
                lambda: self.process_group,
                wrapper_dtype=wrapper_dtype,
                batched=batched,
                loss_scale=self._loss_scale,
            )
        if (registration.batched, registration.wrapper_dtype) != (batched, wrapper_dtype):
            raise HookRunError(
                "this PowerSGDState already serves another hook (powerSGD_hook, batched_powerSGD_hook, or one of them "
                "in another wrapper): make a PowerSGDState of its own for each hook"
            )
        return registration.run(bucket)


def low_rank_hook(
    batched: bool, wrapper_dtype: torch.dtype | None
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """The hook function for one form of PowerSGD and one wire dtype (None: the bucket's)."""

    def low_rank(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _checked(state)._run(bucket, batched, wrapper_dtype)

    name = "batched_powerSGD_hook" if batched else "powerSGD_hook"
    low_rank.__name__ = low_rank.__qualname__ = f"{str(wrapper_dtype).removeprefix('torch.')}_wire_{name}"
    low_rank._commhooks_low_rank = (batched, wrapper_dtype)  # type: ignore[attr-defined]
    return low_rank


def powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by PowerSGD, parameter by parameter: low-rank factors, warm start, error feedback.

    Two all-reduces per bucket, any number of buckets, on gloo and NCCL. For the first `state.start_powerSGD_iter` steps
    a plain average. All ranks of the group must run the same hook with equal options. The bucket is changed in place;
    the state is written once per backward pass, and only if every number that arrived is finite.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, Algorithms 1 and 2. Replaces torch's `powerSGD_hook`.
    """
    return _checked(state)._run(bucket, False, None)


def batched_powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by PowerSGD as one square matrix, padded with zeros; otherwise as `powerSGD_hook`.

    What each bucket holds decides the matrix, so results depend on `bucket_cap_mb`, and a rebuilt bucket starts from a
    fresh Q; the residual belongs to the parameters and is kept. Replaces torch's `batched_powerSGD_hook`.
    """
    return _checked(state)._run(bucket, True, None)


powerSGD_hook._commhooks_low_rank = (False, None)  # type: ignore[attr-defined]
batched_powerSGD_hook._commhooks_low_rank = (True, None)  # type: ignore[attr-defined]


def _checked(state: object) -> PowerSGDState:
    if not isinstance(state, PowerSGDState):
        raise HookRunError(
            f"powerSGD_hook and batched_powerSGD_hook need a commhooks.PowerSGDState as their state, "
            f"got a {type(state).__module__}.{type(state).__qualname__}"
        )
    return state
