"""The extension point: a compressor defines how one bucket is reduced; the engine does everything else.

A compressor is one class: its options, its plan for a model, the fields of its learned state, and its exchange. The
exchange is a generator that reads like the algorithm: it yields a `Send` for each collective and receives the result,
and it yields a `Verdict` before it writes learned state. The engine runs the exchanges of all buckets.
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

    The answer is a bool on the CPU, and on an accelerator a 0-dim bool tensor, without synchronisation. An exchange
    writes learned state only after the answer, and only if it is true.
    """

    finite: torch.Tensor
    """Whether everything that this exchange received is finite: a 0-dim bool tensor on the bucket's device. Compute it
    from reduced tensors, because it must be equal on all ranks."""


Exchange = Generator[Send | Verdict, Any, torch.Tensor | None]
"""Yields each `Send` and receives the reduced tensor, and yields one `Verdict` if the compressor is transactional.
Writes the averaged gradient to the bucket and returns None, or returns a tensor with it."""


class State(Protocol):
    """The learned state for an exchange: per field a dict from the unit's name to its tensor."""

    def __getitem__(self, key: str) -> dict[str, torch.Tensor]: ...


@dataclass(slots=True)
class StepInfo:
    """The current step, for an exchange."""

    number: int
    """Committed steps before this one. On an accelerator this is a lower bound, unless `needs_exact_step`."""
    world_size: int
    residual_factor: LossScale = 1.0
    """The current loss scale divided by the loss scale with which fields with `scales_with_loss` were written: a float,
    or on an accelerator a 0-dim tensor."""
    rank: int = 0
    """This rank among the ranks that reduce the gradients."""
    unused: Collection[str] = ()
    """Parameters of this bucket that this rank has not used since the latest synchronised pass. The bucket contains
    their old gradients. DDP drops the results of parameters that no rank has used."""


class Compressor(ABC, Generic[ConfigT]):
    """Averages buckets of gradients over the ranks. Every model has its own instance.

    Attributes:
        Config: the class of its options; `Config.hook_name` is the name of the hook.
        title: name in messages; by default the hook's name.
        state_fields: the fields of its learned state; a property if they depend on the options.
        transactional: True: the engine waits for all collectives, and commits all buckets of a backward pass or none.
            False, for a compressor without learned state: hook calls return at once, and DDP waits; with nodes the
            engine waits.
        selective: whether it decides per parameter whether to compress it. Plans then show the reasons.
        collectives: the operations of the exchange of one bucket, to predict times. The counted bytes are divided
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
            cls.name = getattr(cls.Config, "hook_name", "")  # the registry rejects a Config without a hook_name
        if not cls.transactional and "selective" not in vars(cls):
            cls.selective = False  # it treats all parameters of a bucket alike

    def __init__(self, config: ConfigT, wire_dtype: torch.dtype | None = None) -> None:
        """
        Args:
            config: options with a start that is a number of steps (see `config.resolved`).
            wire_dtype: the dtype to which a wrapper casts messages; None: no wrapper.
        """
        self.config = config
        self.wire_dtype = wire_dtype

    # ---- for every author ----------------------------------------------------------------------------------------

    @abstractmethod
    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        """Average one bucket over the ranks. All ranks run it, with equal plans.

        Args:
            flat: the bucket's buffer, 1-D: this rank's gradient on entry, the result on exit, scratch memory in
                between.
            work: the result of `workspace` for the layout of this bucket.
            state: the learned state; write it only after `Verdict`.
        """

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        """Plan one parameter with a dense, real gradient. Read only its shape, strides and dtype: it may be on the meta
        device."""
        return UnitPlan.uncompressed(info, f"hook {self.name}")

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> Any:
        """Allocate the buffers that `exchange` needs for buckets with this layout. They are never saved. Not called if
        nothing in the bucket is compressed; `average` then reduces it."""
        return layout, plans

    # ---- rarely needed -----------------------------------------------------------------------------------------------

    def allocate(self, work: Any, step: StepInfo) -> None:
        """Allocate what depends on the number of ranks. Called right after `workspace`, so that a device without enough
        memory fails in the first backward pass and not when compression begins, perhaps a thousand steps later."""

    stats_every: int | None = None
    """Steps between two log lines with compression statistics; None: no such lines."""
    computes_from_received: ClassVar[bool] = True
    """False: each result is one correctly rounded operation on one received number. True: the last bits may differ
    between kinds of processors, so that replicas on such machines drift apart."""
    native: bool = False
    """Whether to compute with the native kernel, because all ranks have the same `native_build`. The engine sets it
    before it calls `workspace`."""

    @property
    def needs_exact_step(self) -> bool:
        """Whether the exchange reads the exact `step.number`, which synchronises with an accelerator."""
        return False

    @property
    def elementwise(self) -> bool:
        """Whether a bucket may be divided anywhere, even within a parameter, because nothing is learned per
        parameter."""
        return not self.transactional

    @property
    def start_step(self) -> int:
        """Number of committed steps before compression begins."""
        start = self.config.configured_start
        assert isinstance(start, int)
        return start

    @property
    def summary(self) -> str:
        """The main options, for the summary at the first backward pass."""
        return ""

    def initial_value(self, field: StateField, plan: UnitPlan, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the initial value of a field, on the CPU, for `StateField.refit`; None if it starts empty."""
        return None

    def check_here(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise HookConfigError if this machine cannot compress gradients of `dtype` on `device`."""

    def native_build(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return an id of this machine's native kernels for gradients of `dtype` on `device`; "" if there are none.
        Kernels with equal ids compute equal bits. Raises HookConfigError with the reason if kernels should exist but
        cannot be used."""
        return ""

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        """Return the bytes needed per rank. `buckets`: the plans by bucket; a single group if the buckets are
        unknown."""
        residual = others = 0
        for plan in plans:
            for each in self.state_fields if plan.compressed else ():
                size = each.size_bytes(plan)
                residual, others = (residual, others + size) if each.replicated else (residual + size, others)
        packed = sum(plan.numel_sent * plan.wire_itemsize(self.wire_dtype) for plan in plans if plan.compressed)
        copies = sum(plan.numel * max(4, real_itemsize(plan.dtype)) for plan in plans if plan.compressed)
        return MemoryPlan(residual, others, packed, copies=copies)

    def plan(self, parameters: Sequence[ParameterInfo]) -> list[UnitPlan]:
        """Plan the parameters of a bucket or of a model, and return one plan per parameter, in order. A compressor of
        whole buckets returns one plan for all, with a `state_name`."""
        return [self.plan_one(info) for info in parameters]

    def average(self, flat: torch.Tensor, world_size: int) -> Exchange:
        """Make the exchange to use before compression begins, and for a bucket in which nothing is compressed."""
        return average(flat, self.wire_dtype_for(flat.dtype), world_size)

    # ---- the same for all compressors --------------------------------------------------------------------------------

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        """Leave sparse, excluded, complex and empty parameters uncompressed, and call `plan_parameter` for the
        others."""
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
        return self.title or self.name

    def wire_dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        return wire_dtype_of(dtype, self.wire_dtype)

    def may_compress(self, infos: Sequence[ParameterInfo]) -> list[bool]:
        """Return for each parameter whether it can ever be compressed, and have a residual, with these options."""
        plans = self.plan(infos) if infos else []
        return [True] * len(infos) if any(plan.state_name for plan in plans) else [plan.compressed for plan in plans]

    def with_start(self, start: int) -> Any:
        """Return a copy with another start step."""
        made = copy.copy(self)  # the constructor of a subclass may have other arguments
        made.config = self.config.with_start(start)
        return made


def average(flat: torch.Tensor, wire_dtype: torch.dtype, world_size: int, *, check_finite: bool = True) -> Exchange:
    """Replace `flat` by its mean over the ranks, through another buffer if `wire_dtype` is narrower. Without
    `check_finite`, yield a true verdict without reading the result."""
    # Sparse gradients keep their dtype: they have few rows, and gloo sums their values by index.
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
    """`yield from exchange`, for an exchange within another. Returns its result, and the answer to its verdict."""
    answer = good = None
    while True:
        try:
            yielded = exchange.send(answer)
        except StopIteration as end:
            return end.value, good
        answer = yield yielded
        if isinstance(yielded, Verdict):
            good = answer
