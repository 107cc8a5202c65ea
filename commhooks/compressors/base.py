"""The extension point: a compressor defines how one bucket is reduced; the engine does everything else.

A compressor is one class: its options, its plan of a model, the fields of its learned state, and its exchange. The
exchange is a generator that reads like the algorithm: it yields each collective (`Send`) and receives the result, and
it yields a `Verdict` before it writes learned state. The engine runs the exchanges of all buckets, orders the
collectives, waits for them, counts bytes, measures times, follows the loss scale, and commits or abandons the pass.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol

import torch

from commhooks.comm.collective import Op, Send
from commhooks.comm.wire import WIRE_BITS, WIRE_DTYPES, dtype_name, wire_dtype_of
from commhooks.compressors.config import ConfigT, HookConfig
from commhooks.compressors.kernel import TORCH, Kernel, KernelsHere
from commhooks.compressors.plan import MemoryPlan, ParameterInfo, UnitPlan, real_itemsize
from commhooks.compressors.state_field import RESIDUAL, StateField
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.loss_scale import LossScale

__all__ = ["RESIDUAL", "Compressor", "Exchange", "Send", "State", "StateField", "StepInfo", "Verdict"]


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


class Compressor(ABC, Generic[ConfigT]):
    """How a bucket of gradients is averaged over the ranks. One object serves one model.

    Attributes:
        Config: the class of its options; `Config.hook_name` is the name of the hook.
        title: display name in messages.
        state_fields: the fields of its learned state; a property where they depend on the options.
        transactional: True: the engine waits for all collectives and commits all buckets of a backward pass together,
            or none. False for a compressor without learned state: its hook calls return at once, and DDP waits;
            between nodes the engine waits.
        computes_from_received: what it computes from what it has received may differ between kinds of processors in
            the last bits, so that replicas on such machines drift apart. False: one correctly rounded operation on
            each number alone, which gives the same bits everywhere.
        selective: it decides per parameter whether to compress; plans then show the reasons.
        per_bucket: it compresses whole buckets, so its plan is unknown until DDP has built its buckets.
        stats_every: steps between two log lines with compression statistics; None: no such lines.
        collectives: those of the exchange of one bucket, to predict times; the counted bytes are divided equally among
            them.
        wrappers: what the option `wrapper` can be; see `lowered` and `quantised`.
        flat_only: it works where all ranks compress all of every parameter: neither between nodes only, nor on shards.
        judges_averages: buckets that the engine averages for it are read, to see whether they are finite. False: what
            is in them does not matter for what it has learned, and they count as finite.
        kernel: the kernel to compute with, one of `kernels_here`. The engine sets it, to the same one on all ranks,
            before it asks for a workspace.
    """

    Config: ClassVar[type[Any]]
    title: ClassVar[str] = ""
    transactional: ClassVar[bool] = True
    computes_from_received: ClassVar[bool] = True
    selective: ClassVar[bool] = True
    per_bucket: ClassVar[bool] = False
    wrappers: ClassVar[tuple[str, ...]] = tuple(WIRE_DTYPES)
    flat_only: ClassVar[bool] = False
    state_fields: Sequence[StateField] = ()
    stats_every: int | None = None
    collectives: Sequence[Op] = ("sum",)
    kernel: Kernel = TORCH
    judges_averages: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
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

    # ---- what a compressor defines -----------------------------------------------------------------------------------

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
        return UnitPlan.left_alone(info, f"hook {self.name}")

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> Any:
        """Buffers for the exchange of buckets with this layout, allocated once and never saved. Not called if no unit
        of the bucket is compressed: the engine averages such a bucket itself."""
        return layout, plans

    @property
    def needs_exact_step(self) -> bool:
        """True if the exchange depends on the exact `step.number`: reading it synchronises with an accelerator."""
        return False

    def fresh(self, field: StateField, plan: UnitPlan, dtype: torch.dtype) -> torch.Tensor | None:
        """The initial value of a field, on the CPU, for `StateField.refit`; None if it starts empty."""
        return None

    def check_here(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise HookConfigError if this machine cannot compress gradients of `dtype` on `device`."""

    def kernels_here(self, device: torch.device, dtype: torch.dtype) -> KernelsHere:
        """The kernels that this machine has for gradients of `dtype` on `device`. They need not be equal on all ranks:
        the engine chooses the first one of rank 0 that all ranks have."""
        return KernelsHere()

    @classmethod
    def not_between_nodes(cls) -> str:
        """Why it cannot work between nodes only, to follow "which"; "" if it can."""
        if not cls.Config.sends:
            return "sends nothing"
        if cls.flat_only:
            return "measures ranks that all compress the whole model"
        return "compresses whole buckets" if cls.per_bucket else ""

    # ---- derived from the definitions above --------------------------------------------------------------------------

    @property
    def name(self) -> str:
        name: str = self.Config.hook_name
        return name

    @property
    def planning_config(self) -> HookConfig:
        """The config with whose globs parameters are compared before `plan`; see `ParameterInfo`."""
        config: HookConfig = self.config
        return config

    @property
    def start_step(self) -> int:
        """Number of committed steps before compression begins; until then the engine averages buckets uncompressed."""
        start = self.config.configured_start
        assert isinstance(start, int)
        return start

    @property
    def called(self) -> str:
        """Display name in messages."""
        return self.title or self.name

    @property
    def wire(self) -> str:
        """What a wrapper makes of the numbers that are sent, such as "float16" or "int8"; "" without a wrapper."""
        return dtype_name(self.wire_dtype)

    @property
    def words(self) -> str:
        """Short summary of the options for the log line at the first backward pass."""
        return f"from step {self.start_step}"

    @property
    def phrase(self) -> str:
        """Display name with its main option, for messages about a model."""
        return self.called

    def plan(self, parameters: Sequence[ParameterInfo]) -> list[UnitPlan]:
        """Decide for the parameters of a bucket or of a model: one plan each, in order."""
        return [self.plan_one(info) for info in parameters]

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
        return self.plan_parameter(info) if because is None else UnitPlan.left_alone(info, because)

    def lowered(self, dtype: torch.dtype) -> "Compressor[Any]":
        """A copy that sends `dtype` where that is narrower, for the fp16 and bf16 wrappers."""
        return type(self)(self.config, dtype)

    def quantised(self, bits: int) -> "Compressor[Any]":
        """A copy that sends integers of that width, for the int8 and int4 wrappers if they are in `wrappers`."""
        raise NotImplementedError(f"{self.name} has no wrapper that quantises")

    def wrapped(self, wrapper: str) -> "Compressor[Any]":
        """A copy that sends as `wrapper`, one of `wrappers`, says."""
        if wrapper in WIRE_DTYPES:
            return self.lowered(WIRE_DTYPES[wrapper])
        return self.quantised(WIRE_BITS[wrapper])

    def with_start(self, start: int) -> "Compressor[Any]":
        """A copy with another start step."""
        made = copy.copy(self)  # whatever arguments its class takes
        made.config = self.config.with_start(start)
        return made

    def never_acts(self, total_steps: int) -> str:
        """What to tell the user if it begins only after a run of so many steps has ended; "" if it begins before."""
        start, option = self.start_step, self.config.start_option
        if option is None or start < total_steps:
            return ""
        return (
            f"{self.called} begins after {start} steps, but this run has only {total_steps}: nothing will be "
            f"compressed. Set {option} to a smaller number, or to a fraction of the run."
        )

    def may_compress(self, infos: Sequence[ParameterInfo]) -> list[bool]:
        """Whether each parameter could come to be compressed, and have a residual, with these options."""
        return [plan.compressed for plan in self.plan(infos)]

    def computes(self, plan: UnitPlan) -> bool:
        """Whether the codec has work to do for this unit before it is sent."""
        return plan.compressed

    def wire_dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that is sent for a bucket of `dtype`."""
        return wire_dtype_of(dtype, self.wire_dtype)

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
