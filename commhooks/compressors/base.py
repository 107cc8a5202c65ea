"""The extension point: a compressor defines how one bucket is reduced; the engine does everything else.

A compressor is one class: its options, its plan of a model, the fields of its learned state, and its exchange. The
exchange is a generator that reads like the algorithm: it yields each collective (`Send`) and receives the result, and
it yields a `Verdict` before it writes learned state. The engine runs the exchanges of all buckets, orders the
collectives, waits for them, counts bytes, measures times, follows the loss scale, and commits or abandons the pass.
"""

from abc import abstractmethod
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from commhooks.comm.collectives import Op, Send
from commhooks.compressors.rules import CompressorRules
from commhooks.compressors.state_field import RESIDUAL, StateField
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.loss_scale import LossScale
from commhooks.options import ConfigT

__all__ = ["RESIDUAL", "Compressor", "Exchange", "Send", "State", "StateField", "StepInfo", "Verdict", "judged"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """Asks whether every bucket of this backward pass is finite on every rank. The answer is a bool on the CPU and a
    0-dim bool tensor on an accelerator, without synchronisation. Learned state is written after the answer, and only
    where it is true."""

    finite: torch.Tensor
    """0-dim bool tensor on the bucket's device: everything that this exchange received is finite. It must be equal on
    all ranks, so compute it from reduced tensors."""


Exchange = Generator[Send | Verdict, Any, torch.Tensor | None]
"""Yields `Send` (answered by the reduced tensor) and once `Verdict`, and leaves the averaged gradient in the bucket, or
returns the tensor that has it. A compressor that is not transactional yields no `Verdict`."""


def judged(
    exchange: Exchange,
) -> Generator[Send | Verdict, Any, tuple[torch.Tensor | None, torch.Tensor | bool | None]]:
    """`yield from exchange`, for an exchange that is a part of another. Also returns the answer to its verdict."""
    answer = good = None
    while True:
        try:
            yielded = exchange.send(answer)
        except StopIteration as end:
            return end.value, good
        answer = yield yielded
        if isinstance(yielded, Verdict):
            good = answer


class State(Protocol):
    """The learned state as a compressor sees it: per field a dict from the unit's name to its tensor."""

    def __getitem__(self, key: str) -> dict[str, torch.Tensor]: ...


@dataclass(slots=True)
class StepInfo:
    """The current step, as passed to an exchange."""

    number: int
    """Committed steps before this one. On an accelerator a lower bound, unless `needs_exact_step`."""
    world_size: int
    residual_factor: LossScale = 1.0
    """Current loss scale / loss scale at the time when fields with `scales_with_loss` were written. A float, or a
    0-dim tensor on an accelerator."""
    rank: int = 0
    """This rank's number among the ranks that reduce the gradients."""
    unused: Collection[str] = ()
    """Names of parameters of this bucket that this rank has not used since the latest synchronised pass, although they
    have a gradient: an old one, which is in the bucket. DDP drops the result for those that no rank has used."""


class Compressor(CompressorRules[ConfigT]):
    """How a bucket of gradients is averaged over the ranks. One object serves one model.

    Attributes:
        Config: the class of its options; `Config.hook_name` is the name of the hook.
        title: display name in messages.
        state_fields: the fields of its learned state; a property where they depend on the options.
        transactional: True: the engine waits for all collectives and commits all buckets of a backward pass together,
            or none. False for a compressor without learned state: its hook calls return at once, and DDP waits;
            between nodes the engine waits.
        collectives: those of the exchange of one bucket, to predict times; the counted bytes are divided equally among
            them.
    """

    title: ClassVar[str] = ""
    transactional: ClassVar[bool] = True
    state_fields: Sequence[StateField] = ()
    collectives: Sequence[Op] = ("sum",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in vars(cls):
            cls.name = getattr(cls.Config, "hook_name", "")  # the registry refuses one without
        if not cls.transactional and "selective" not in vars(cls):
            cls.selective = False  # it treats all parameters of a bucket alike

    def __init__(self, config: ConfigT, wire_dtype: torch.dtype | None = None) -> None:
        """
        Args:
            config: options whose start is a number of steps (see `config.resolved`).
            wire_dtype: the dtype to which a wrapper casts what is sent; None: no wrapper.
        """
        self.config = config
        self.wire_dtype = wire_dtype

    @abstractmethod
    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        """Average one bucket over the ranks. All ranks run it, with equal plans.

        Args:
            flat: the bucket's buffer, 1-D: this rank's gradient on entry, the result on exit. It may serve as scratch
                memory in between.
            work: the result of `workspace` for the layout of this bucket.
            state: the learned state; write it only after `Verdict`.
            step: see `StepInfo`.
        """

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        """Decide for one parameter with a dense, real gradient. Only its shape, strides and dtype may be read: it may
        be on the meta device."""
        return UnitPlan.uncompressed(info, f"hook {self.name}")

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> Any:
        """Buffers for the exchange of buckets with this layout, allocated once and never saved. Not called if no unit
        of the bucket is compressed: the engine averages such a bucket itself."""
        return layout, plans

    @property
    def needs_exact_step(self) -> bool:
        """True if the exchange depends on the exact `step.number`: reading it synchronises with an accelerator."""
        return False

    def initial_value(self, field: StateField, plan: UnitPlan, dtype: torch.dtype) -> torch.Tensor | None:
        """The initial value of a field, on the CPU, for `StateField.refit`; None if it starts empty."""
        return None
