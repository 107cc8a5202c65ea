"""The extension point: a compressor says what is done to a bucket; the engine does everything else.

A compressor is one class: its options, its plan of a model, the fields of its learned state, and its exchange. The
exchange is a generator that reads like the algorithm: it yields each collective (`Send`) and goes on with the answer,
and before it writes anything learned it asks for the `Verdict`. The engine runs the exchanges of all buckets, decides
the order of collectives, waits, counts, times, follows a loss scale, commits and abandons.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol

import torch

from commhooks.comm.collective import Send
from commhooks.comm.wire import wire_dtype_of
from commhooks.compressors.config import ConfigT
from commhooks.compressors.plan import MemoryPlan, ParameterInfo, UnitPlan, real_itemsize
from commhooks.compressors.state_field import RESIDUAL, StateField
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.loss_scale import LossScale

__all__ = ["RESIDUAL", "Compressor", "Exchange", "Send", "State", "StateField", "StepInfo", "Trial", "Verdict"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """Answered by: is every bucket of this backward pass finite on every rank? A bool on the CPU; a 0-dim bool tensor
    on an accelerator, where nobody waits for it. Learned state is written after it, and only where it is true."""

    finite: torch.Tensor
    """0-dim bool on the bucket's device: all that this exchange received is finite. It must be the same on all ranks,
    so it is read from what was reduced."""


Answer = torch.Tensor | bool | None
Exchange = Generator[Send | Verdict, Any, torch.Tensor | None]
"""Yields `Send` (answered by the reduced tensor) and once `Verdict`, and leaves the averaged gradient in the bucket, or
returns the tensor that has it. A compressor that is not transactional yields no `Verdict`."""


class State(Protocol):
    """The learned state as a compressor sees it: per field a dict from the unit's name to its tensor."""

    def __getitem__(self, key: str) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class StepInfo:
    """What an exchange may know of the step."""

    number: int
    """Committed steps before this one. On an accelerator a lower bound, unless `needs_exact_step`."""
    world_size: int
    residual_factor: LossScale = 1.0
    """The loss scale has changed by this factor since state that scales with the loss was written."""


@dataclass(frozen=True)
class Trial:
    """One way to use a hook that the doctor measures.

    Attributes:
        label: in its table.
        options: of the hook; compression begins at once.
        changes: how much it changes the gradients, to choose the most exact one of those that are equally fast: 0 not
            at all, up to 1 for another dtype, more beyond.
        note: said when it is recommended.
        slow_note: said where its codec takes longer than it waits.
    """

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: float = 2.0
    note: str = ""
    slow_note: str = ""


class Compressor(ABC, Generic[ConfigT]):
    """How a bucket of gradients is averaged over the ranks. One object serves one model.

    Attributes:
        Config: its options; `Config.hook_name` is the name of the hook.
        title: what it is called in sentences.
        state_fields: what it learns; overridden by a property where that depends on the options.
        transactional: the engine waits for the answers and commits all buckets of a backward pass together, or none.
            False for a compressor that learns nothing: its hook calls return at once, and DDP waits.
        selective: decides for each parameter whether to compress it, so that plans give reasons.
        per_bucket: compresses whole buckets: its plan is not known before DDP has shown its buckets.
        stats_every: steps between two log lines with compression statistics; None: there are none.
    """

    Config: ClassVar[type[Any]]
    title: ClassVar[str] = ""
    transactional: ClassVar[bool] = True
    selective: ClassVar[bool] = True
    per_bucket: ClassVar[bool] = False
    state_fields: Sequence[StateField] = ()
    stats_every: int | None = None

    def __init__(self, config: ConfigT, wire_dtype: torch.dtype | None = None) -> None:
        """
        Args:
            config: with a start that is a number of steps (`config.resolved`).
            wire_dtype: to which a wrapper narrows what travels; None: nothing is narrowed.
        """
        self.config = config
        self.wire_dtype = wire_dtype

    # ---- what a compressor defines -----------------------------------------------------------------------------------

    @abstractmethod
    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        """Average one bucket over the ranks. Runs on all ranks with equal plans.

        Args:
            flat: the bucket's buffer, 1-D; the result replaces it. It is this rank's own gradient until then, and may
                serve as scratch.
            work: what `workspace` made for the layout of this bucket.
            state: written only after `Verdict`.
            step: see `StepInfo`.
        """

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        """Decide for one parameter with a dense, real gradient. From shapes alone: it may be on the meta device."""
        return UnitPlan.left_alone(info, f"hook {self.name}")

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> Any:
        """What the exchange of such a bucket needs, allocated once and never saved. Not called where no unit is
        compressed: such a bucket is averaged as it is."""
        return layout, plans

    @property
    def needs_exact_step(self) -> bool:
        """`step.number` decides what is computed: an accelerator is asked for it, which makes the host wait."""
        return False

    def fresh(self, field: StateField, plan: UnitPlan, dtype: torch.dtype) -> torch.Tensor | None:
        """What a field begins with, on the CPU, for `StateField.refit`; None if that is nothing."""
        return None

    def check_here(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise HookConfigError where this machine cannot compress gradients of `dtype` on `device`."""

    @classmethod
    def trials(cls, ranks: Sequence[int], options: Mapping[str, Any]) -> Sequence[Trial]:
        """What the doctor tries. `ranks`, `options`: what its user asked for, of PowerSGD."""
        start = cls.Config.start_option
        return (Trial(cls.Config.hook_name, {} if start is None else {start: 0}),)

    # ---- what follows from it ----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        name: str = self.Config.hook_name
        return name

    @property
    def start_step(self) -> int:
        """Compression begins after so many committed steps; before that the engine averages buckets as they are."""
        start = self.config.configured_start
        assert isinstance(start, int)
        return start

    @property
    def words(self) -> str:
        """What it does, in a few words, for the line at the first backward pass."""
        return f"from step {self.start_step}"

    @property
    def phrase(self) -> str:
        """What it is called in a sentence about this model."""
        return self.title or self.name

    def plan(self, parameters: Sequence[ParameterInfo]) -> list[UnitPlan]:
        """Decide for the parameters of a bucket, or of a model: one plan each, in order."""
        return [self.plan_one(info) for info in parameters]

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        """What no compressor of single parameters takes is left alone; `plan_parameter` decides about the others."""
        because = None
        if info.sparse:
            because = "sparse gradient"
        elif info.excluded_by is not None:
            because = f"excluded by {info.excluded_by!r}"
        elif info.parameter.is_complex():
            because = "complex numbers"
        elif info.parameter.numel() == 0:
            because = "empty"
        return self.plan_parameter(info) if because is None else UnitPlan.left_alone(info, because)

    def lowered(self, dtype: torch.dtype) -> "Compressor[Any]":
        """The same behind a wrapper that narrows what travels to `dtype`."""
        return type(self)(self.config, dtype)

    def with_start(self, start: int) -> "Compressor[Any]":
        """The same with another start step."""
        return type(self)(self.config.with_start(start), self.wire_dtype)

    def computes(self, plan: UnitPlan) -> bool:
        """Whether there is work to do for a unit before it is sent."""
        return plan.compressed

    def wire_dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that travels for a bucket of `dtype`."""
        return wire_dtype_of(dtype, self.wire_dtype)

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        """Bytes needed on each rank. `buckets`: the plans again, per bucket; one of all where buckets are not known."""
        residual = others = 0
        for plan in plans:
            for each in self.state_fields if plan.compressed else ():
                size = each.size_bytes(plan)
                residual, others = (residual, others + size) if each.replicated else (residual + size, others)
        packed = sum(plan.numel_sent * plan.wire_itemsize(self.wire_dtype) for plan in plans if plan.compressed)
        copies = sum(plan.numel * max(4, real_itemsize(plan.dtype)) for plan in plans if plan.compressed)
        return MemoryPlan(residual, others, packed, copies=copies)
