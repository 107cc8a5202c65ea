"""Define `Compressor`, the base class of all compressors.

A compressor has options, a plan of a model, fields of learned state, and an exchange that reduces
one bucket. The exchange is a generator that reads like the algorithm: it yields a `Send` for each
collective and receives the result, and it yields a `Verdict` before it writes learned state. The
engine runs the exchanges of all buckets.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol

import torch

from commhooks.comm.collectives import Op, Send
from commhooks.comm.packing import all_finite, wire_dtype_of
from commhooks.compressors.state_field import RESIDUAL, StateField, memory_of
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.errors import HookConfigError
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.loss_scale import LossScale
from commhooks.gradients.torch_private import sparse_values
from commhooks.options import ConfigT

__all__ = [
    "RESIDUAL",
    "Compressor",
    "Exchange",
    "Send",
    "State",
    "StateField",
    "StepInfo",
    "Verdict",
    "with_verdict",
]


@dataclass(frozen=True, eq=False)
class Verdict:
    """Asks whether every bucket of this backward pass is finite on every rank.

    An exchange may write learned state only after a true answer: a bool on the CPU and a 0-dim bool
    tensor on an accelerator, without synchronisation.
    """

    finite: torch.Tensor
    """Whether everything that this exchange received is finite.

    A 0-dim bool tensor on the bucket's device. Compute it from reduced tensors, because it must be
    equal on all ranks.
    """


Exchange = Generator[Send | Verdict, Any, torch.Tensor | None]
"""A generator that yields a `Send` for each collective.

It receives the reduced tensor. If the compressor is transactional it also yields one `Verdict`, and
receives the answer. It leaves the averaged gradient in the bucket and returns None, or returns
another tensor that holds it.
"""


class State(Protocol):
    """Provides the learned state: `state[field][name]` is the tensor of one unit."""

    def __getitem__(self, key: str) -> dict[str, torch.Tensor]: ...


@dataclass(slots=True)
class StepInfo:
    """Describes the current step to an exchange."""

    number: int
    """Number of committed steps before this one.

    On an accelerator a lower bound unless `needs_exact_step` is True.
    """
    world_size: int
    residual_factor: LossScale = 1.0
    """Current loss scale divided by the loss scale of the stored fields with `scales_with_loss`.

    A float, or on an accelerator a 0-dim tensor.
    """
    rank: int = 0
    """This rank in the process group that reduces the gradients."""
    unused: Collection[str] = ()
    """Names of parameters that this rank has not used since the last synchronised backward pass.

    The bucket holds their old gradients. DDP discards the result for a parameter that no rank has
    used.
    """


class Compressor(ABC, Generic[ConfigT]):
    """Averages buckets of gradients over the ranks. Each model has its own instance.

    Attributes:
        Config: the options class; `Config.hook_name` is the name of the hook.
        title: the name shown in messages; defaults to the hook's name.
        state_fields: the fields of the learned state; a property if they depend on the options.
        transactional: if True, the engine waits for all collectives and commits all buckets of a
            backward pass or none. If False (no learned state), hook calls return at once and DDP
            waits; with nodes the engine waits.
        selective: whether the compressor decides per parameter. Plans then show the reasons.
        collectives: the operations in one exchange, for predicting its time; each sends an equal
            part of the counted bytes.
        wrappers: whether the fp16 and bf16 wrappers may construct it with a `wire_dtype`.
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
            cls.name = getattr(cls.Config, "hook_name", "")  # the registry refuses an empty name
        if not cls.transactional and "selective" not in vars(cls):
            cls.selective = False  # all parameters of a bucket are treated alike

    def __init__(self, config: ConfigT, wire_dtype: torch.dtype | None = None) -> None:
        """Keep the options.

        Args:
            config: options whose start is a number of steps (see `config.resolved`).
            wire_dtype: the dtype to which a wrapper casts messages; None: no wrapper.
        """
        self.config = config
        self.wire_dtype = wire_dtype

    # ---- for every author ------------------------------------------------------------------------

    @abstractmethod
    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        """Average one bucket over the ranks. Every rank runs it with equal plans.

        Args:
            flat: the bucket's 1-D buffer. It holds this rank's gradient on entry and the result on
                exit, and may be overwritten in between.
            work: the result of `workspace` for the layout of this bucket.
            state: the learned state; write it only after `Verdict`.
        """

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        """Decide whether to compress one parameter with a dense, real gradient.

        The parameter may be on the meta device: read only its shape, strides and dtype.
        """
        return UnitPlan.uncompressed(info, f"hook {self.name}")

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> Any:
        """Allocate the buffers of `exchange` for buckets with this layout; they are never saved.

        Not called if nothing in the bucket is compressed: `average` then reduces the bucket.
        """
        return layout, plans

    # ---- rarely needed ---------------------------------------------------------------------------

    def allocate(self, work: Any, step: StepInfo) -> None:
        """Allocate what depends on the number of ranks.

        The engine calls this right after `workspace`, so that a device without enough memory fails
        in the first backward pass and not when compression begins.
        """

    stats_every: int | None = None
    """Number of steps between two log lines with compression statistics; None: log none."""
    computes_from_received: ClassVar[bool] = True
    """Set this to False if each result is one correctly rounded operation on one received number.

    If True, the last bits may differ between kinds of processors, so that replicas drift apart.
    """
    native: bool = False
    """Whether to compute with the native kernel.

    Set before `workspace`, if all ranks have the same `native_build`.
    """

    @property
    def needs_exact_step(self) -> bool:
        """Whether `exchange` needs the exact `step.number`, for which the host waits on CUDA."""
        return False

    @property
    def elementwise(self) -> bool:
        """Whether a bucket may be split anywhere, because no parameter has learned state."""
        return not self.transactional

    @property
    def checks_finite(self) -> bool:
        """Whether its verdicts say whether the averages are finite."""
        return self.transactional

    @property
    def start_step(self) -> int:
        start = self.config.configured_start
        assert isinstance(start, int)
        return start

    @property
    def begins(self) -> int:
        """The earliest step at which compression can begin; `start_step` if that is certain."""
        return self.start_step

    @property
    def how_to_begin_earlier(self) -> str:
        """Advice for the message about a run that ends before `begins`."""
        return f"Set {self.config.start_option} to a smaller number"

    @property
    def summary(self) -> str:
        """The main options, shown in the summary at the first backward pass."""
        return ""

    effect: str = ""
    """What the summary shows instead of the plan while nothing is compressed; "": the plan."""
    label: str = ""
    """What the compressor does now, shown beside the hook's name in plans; "": the name says it."""
    further_stats: Mapping[str, Any] = {}
    """Further entries of `CommHook.stats`, of plain types."""

    def initial_value(
        self, field: StateField, plan: UnitPlan, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the initial value of a field, on the CPU; None if the field starts empty.

        `StateField.refit` uses it.
        """
        return None

    def check_here(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise HookConfigError if this machine cannot compress such gradients."""

    def native_build(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return the id of this machine's native kernels for such gradients; "" if it has none.

        Kernels with equal ids compute equal bits. Raises HookConfigError with the reason if kernels
        should exist but cannot be used.
        """
        return ""

    def memory_plan(
        self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]
    ) -> MemoryPlan:
        """Return the bytes needed per rank.

        `buckets` has the plans of each bucket; a single group if the buckets are unknown.
        """
        return memory_of(plans, self.state_fields, self.wire_dtype)

    def plan(self, parameters: Sequence[ParameterInfo]) -> list[UnitPlan]:
        """Return a plan per parameter, in order.

        A compressor of whole buckets returns one plan with a `state_name`.
        """
        return [self.plan_one(info) for info in parameters]

    def average(self, flat: torch.Tensor, world_size: int) -> Exchange:
        """Average a bucket before compression begins, or one in which nothing is compressed."""
        return average(flat, self.wire_dtype_for(flat.dtype), world_size)

    # ---- for compressors that change during a run ------------------------------------------------

    uses_machines: ClassVar[bool] = False
    """Whether machines count as nodes if `ranks_per_node` is None."""

    @property
    def between_nodes(self) -> bool:
        """Whether, if the ranks form nodes, `exchange` averages between the nodes only."""
        return True

    def with_nodes(self, ranks_per_node: int) -> Any:
        """Return the compressor to use where the ranks form nodes.

        Called once, before the first backward pass.
        """
        return self

    notes: Any = None
    """What a checkpoint keeps beside the learned state; None: nothing.

    Plain types, equal on all ranks.
    """

    def with_notes(self, notes: Any, step: int, *, same_ranks: bool) -> Any:
        """Return a compressor that continues with saved `notes`; None: nothing was saved.

        The notes may be damaged. `step`: number of committed steps at the save. Raises
        HookConfigError if the notes cannot be used.
        """
        return self

    def listener(self, session: Any) -> Any:
        """Return a listener to the backward passes of `session`; None: no listener.

        It may replace the compressor between two passes; see `Listener` in `engine/session.py`.
        """
        return None

    # ---- the same for all compressors ------------------------------------------------------------

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        """Call `plan_parameter`, unless the parameter is sparse, excluded, complex or empty."""
        if info.incompressible is not None:
            return UnitPlan.uncompressed(info, info.incompressible)
        plan: object = self.plan_parameter(info)
        if not isinstance(plan, UnitPlan):
            raise HookConfigError(
                f"{type(self).__name__}.plan_parameter returned {plan!r} for {info.name}; expected"
                ' a UnitPlan, such as UnitPlan.uncompressed(info, "why not")'
            )
        return plan

    @property
    def display_name(self) -> str:
        return self.title or self.name

    def wire_dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        return wire_dtype_of(dtype, self.wire_dtype)

    def may_compress(self, infos: Sequence[ParameterInfo]) -> list[bool]:
        """Return for each parameter whether these options can ever compress it.

        If so, it may have a residual.
        """
        plans = self.plan(infos) if infos else []
        if any(plan.state_name for plan in plans):
            return [True] * len(infos)
        return [plan.compressed for plan in plans]

    def with_start(self, start: int) -> Any:
        compressor = copy.copy(self)  # a subclass may have a constructor with other arguments
        compressor.config = self.config.with_start(start)
        return compressor


def average(
    flat: torch.Tensor, wire_dtype: torch.dtype, world_size: int, *, check_finite: bool = True
) -> Exchange:
    """Replace `flat` by its mean over the ranks, sent in `wire_dtype`.

    A narrower `wire_dtype` takes another buffer. Without `check_finite`, yield a true verdict
    without reading the result.
    """
    wire = flat.div_(world_size)  # divide before the cast, so that fewer numbers overflow
    # Sparse gradients keep their dtype: they have few rows, and gloo sums their values by index.
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
    """Run an exchange inside another one, as `yield from` does.

    Return its result and the answer to its verdict.
    """
    answer = None
    good = None
    while True:
        try:
            yielded = exchange.send(answer)
        except StopIteration as end:
            return end.value, good
        answer = yield yielded
        if isinstance(yielded, Verdict):
            good = answer
