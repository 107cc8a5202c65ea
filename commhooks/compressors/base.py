"""The extension point: a compressor defines how one bucket is reduced; the engine does everything else.

A compressor is one class: its options, its plan of a model, the fields of its learned state, and its exchange. The
exchange is a generator that reads like the algorithm: it yields each collective (`Send`) and receives the result, and
it yields a `Verdict` before it writes learned state. The engine runs the exchanges of all buckets, orders the
collectives, waits for them, counts bytes, measures times, follows the loss scale, and commits or abandons the pass.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol

import torch

from commhooks.comm.collectives import Op, Send
from commhooks.comm.wire import all_finite, wire_dtype_of
from commhooks.compressors.state_field import RESIDUAL, StateField
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan, real_itemsize
from commhooks.errors import HookConfigError
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.loss_scale import LossScale
from commhooks.gradients.torch_private import sparse_values
from commhooks.options import ConfigT

__all__ = ["RESIDUAL", "Compressor", "Exchange", "Send", "State", "StateField", "StepInfo", "Verdict", "with_verdict"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """Asks whether every bucket of this backward pass is finite on every rank.

    The answer is a bool on the CPU and a 0-dim bool tensor on an accelerator, without synchronisation. An exchange
    writes learned state after the answer, and only where it is true.
    """

    finite: torch.Tensor
    """0-dim bool tensor on the bucket's device: everything that this exchange received is finite. It must be equal on
    all ranks, so compute it from reduced tensors."""


Exchange = Generator[Send | Verdict, Any, torch.Tensor | None]
"""Yields `Send` (answered by the reduced tensor) and once `Verdict`, and leaves the averaged gradient in the bucket, or
returns the tensor that has it. A compressor that is not transactional yields no `Verdict`."""


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
    """Parameters of this bucket that this rank has not used since the latest synchronised pass. Their gradient in the
    bucket is an old one. DDP drops the result for those that no rank has used."""


class Compressor(ABC, Generic[ConfigT]):
    """How a bucket of gradients is averaged over the ranks. One object for each model.

    Attributes:
        Config: the class of its options; `Config.hook_name` is the name of the hook.
        title: name in messages; by default the hook's name.
        state_fields: the fields of its learned state; a property where they depend on the options.
        transactional: True: the engine waits for all collectives and commits all buckets of a backward pass together,
            or none. False for a compressor without learned state: its hook calls return at once, and DDP waits;
            between nodes the engine waits.
        selective: it decides for each parameter whether to compress it; plans then show the reasons.
        collectives: the operations of the exchange of one bucket, to predict times; the counted bytes are divided
            equally among them.
        wrappers: whether it can be used with the fp16 and bf16 wrappers, which construct it with a `wire_dtype`.
    """

    Config: ClassVar[type[Any]]
    name: ClassVar[str]
    title: ClassVar[str] = ""
    state_fields: Sequence[StateField] = ()
    transactional: ClassVar[bool] = True
    selective: ClassVar[bool] = True
    collectives: Sequence[Op] = ("sum",)
    wrappers: ClassVar[bool] = True

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

    # ---- what its author defines -------------------------------------------------------------------------------------

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
        """Buffers for the exchange of buckets with this layout, allocated once and never saved. Not called if nothing
        in the bucket is compressed: `average` reduces such a bucket."""
        return layout, plans

    # ---- less often --------------------------------------------------------------------------------------------------

    stats_every: int | None = None
    """Steps between two log lines with compression statistics; None: no such lines."""
    computes_from_received: ClassVar[bool] = True
    """What it computes from what it has received may differ between kinds of processors in the last bits, so that
    replicas on such machines drift apart. False: one correctly rounded operation on each number alone."""
    native: bool = False
    """Compute with the native library: all ranks have the same `native_build`. The engine sets it before it asks for a
    workspace."""

    @property
    def needs_exact_step(self) -> bool:
        """True if the exchange depends on the exact `step.number`: reading it synchronises with an accelerator."""
        return False

    @property
    def start_step(self) -> int:
        """Committed steps of training before compression begins."""
        start = self.config.configured_start
        assert isinstance(start, int)
        return start

    @property
    def summary(self) -> str:
        """The main options, for the summary at the first backward pass; "" for none."""
        return ""

    def initial_value(self, field: StateField, plan: UnitPlan, dtype: torch.dtype) -> torch.Tensor | None:
        """The initial value of a field, on the CPU, for `StateField.refit`; None if it starts empty."""
        return None

    def check_here(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise HookConfigError if this machine cannot compress gradients of `dtype` on `device`."""

    def native_build(self, device: torch.device, dtype: torch.dtype) -> str:
        """What tells this machine's native kernels for gradients of `dtype` on `device` apart from others that compute
        other bits; "" if it has none. Raises HookConfigError with the reason if it should have some."""
        return ""

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        """Bytes needed on each rank. `buckets`: the same plans grouped by bucket; one group if buckets are unknown."""
        residual = others = 0
        for plan in plans:
            for each in self.state_fields if plan.compressed else ():
                size = each.size_bytes(plan)
                residual, others = (residual, others + size) if each.replicated else (residual + size, others)
        packed = sum(plan.numel_sent * plan.wire_itemsize(self.wire_dtype) for plan in plans if plan.compressed)
        copies = sum(plan.numel * max(4, real_itemsize(plan.dtype)) for plan in plans if plan.compressed)
        return MemoryPlan(residual, others, packed, copies=copies)

    def plan(self, parameters: Sequence[ParameterInfo]) -> list[UnitPlan]:
        """Decide for the parameters of a bucket or of a model: one plan each, in order. A compressor of whole buckets
        returns one plan for all of them, with a `state_name`."""
        return [self.plan_one(info) for info in parameters]

    def average(self, flat: torch.Tensor, world_size: int) -> Exchange:
        """The exchange before compression begins, and of a bucket in which nothing is compressed."""
        return average(flat, self.wire_dtype_for(flat.dtype), world_size)

    # ---- what every compressor shares --------------------------------------------------------------------------------

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        """Leave sparse, excluded, complex and empty parameters uncompressed; call `plan_parameter` for the others."""
        because = None
        if info.sparse:
            because = "sparse gradient"
        elif info.excluded_by is not None:
            because = f"excluded by {info.excluded_by!r}"
        elif info.parameter.is_complex():
            because = "complex numbers"
        elif info.parameter.numel() == 0:
            because = "empty"
        if because is not None:
            return UnitPlan.uncompressed(info, because)
        plan: object = self.plan_parameter(info)
        if not isinstance(plan, UnitPlan):
            raise HookConfigError(
                f"{type(self).__name__}.plan_parameter returned {plan!r} for {info.name}; expected a UnitPlan, such as "
                'UnitPlan.uncompressed(info, "why not")'
            )
        return plan

    @property
    def display_name(self) -> str:
        """Its name in messages."""
        return self.title or self.name

    def wire_dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that is sent for a bucket of `dtype`."""
        return wire_dtype_of(dtype, self.wire_dtype)

    def may_compress(self, infos: Sequence[ParameterInfo]) -> list[bool]:
        """Whether each parameter could come to be compressed, and have a residual, with these options."""
        plans = self.plan(infos) if infos else []
        return [True] * len(infos) if any(plan.state_name for plan in plans) else [plan.compressed for plan in plans]

    def with_start(self, start: int) -> Any:
        """A copy with another start step."""
        made = copy.copy(self)  # whatever arguments its class takes
        made.config = self.config.with_start(start)
        return made


def average(flat: torch.Tensor, wire_dtype: torch.dtype, world_size: int, *, check_finite: bool = True) -> Exchange:
    """Replace `flat` by its mean over the ranks; for a narrower `wire_dtype` through a buffer of that dtype.

    Args:
        check_finite: False: yield a true verdict without reading the result.
    """
    # Gradients of sparse embeddings keep their dtype: they send few rows, and gloo sums their values by index.
    wire = flat.div_(world_size)  # before it is narrowed, so that fewer numbers overflow
    if not flat.is_sparse:
        wire = wire.to(wire_dtype)
    reduced: torch.Tensor = yield Send(wire, last=True)
    if reduced is not flat:
        flat.copy_(reduced)
    if check_finite:
        yield Verdict(all_finite(sparse_values(reduced) if reduced.is_sparse else reduced))
    else:
        yield Verdict(torch.ones((), dtype=torch.bool, device=flat.device))
    return None


def with_verdict(
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
