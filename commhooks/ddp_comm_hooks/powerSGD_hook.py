"""Replace `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`.

Annotations must be real objects here (no `from __future__ import annotations`):
`register_comm_hook` checks them.
"""

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import resolve_group
from commhooks.comm.counters import Counters
from commhooks.compressors.powersgd.options import BatchedPowerSGD, PowerSGD
from commhooks.engine.consensus import Binding
from commhooks.engine.session import Session, SessionState
from commhooks.engine.state import LearnedState
from commhooks.errors import AttachError, HookConfigError, HookRunError, invalid, logger_of
from commhooks.gradients.ddp import BucketReader
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.names import PositionalNames, by_own_names
from commhooks.gradients.precision import dtype_name
from commhooks.options import DROP_INS, DropIn

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logger_of(__name__)
_as_torch = logging.getLogger(__name__)  # for lines that torch logs in the same words


@dataclass(frozen=True)
class Form:
    """Describes what a hook function runs.

    Attributes:
        batched: PowerSGD per bucket, not per parameter.
        wire_dtype: None: the bucket's.
    """

    batched: bool
    wire_dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        return "batched_powerSGD_hook" if self.batched else "powerSGD_hook"

    @property
    def kind(self) -> Any:
        # Here, because an import of commhooks imports no compressor and no kernel.
        from commhooks.compressors.powersgd.batched import BatchedPowerSGDCompressor
        from commhooks.compressors.powersgd.compressor import PowerSGDCompressor

        return BatchedPowerSGDCompressor if self.batched else PowerSGDCompressor

    def fits(self, session: Session) -> bool:
        return (
            type(session.compressor) is self.kind
            and session.compressor.wire_dtype == self.wire_dtype
        )


_forms: "weakref.WeakKeyDictionary[Callable[..., Any], Form]" = weakref.WeakKeyDictionary()
"""The form of each PowerSGD hook function. The wrappers add entries."""


def _form_of(hook: Callable[..., Any]) -> Form | None:
    try:
        return _forms.get(hook)
    except TypeError:  # a callable object may be unhashable
        return None


def _option(name: str) -> Any:
    return property(lambda state: getattr(state._options, name))


class PowerSGDState(SessionState):
    """Holds the options and the learned state of PowerSGD for one DDP model; replaces torch's
    `PowerSGDState`.

    Arguments, their order and their defaults are torch's. Unlike torch, it allows
    `start_powerSGD_iter` 0 and 1 with error feedback or warm start, ignores
    `orthogonalization_epsilon`, and needs no process group to load a pickled state. See
    `commhooks.PowerSGD` for the other arguments.

    Args:
        process_group: the ranks to average over; None: the default group at the time of the
            backward pass.

    Raises:
        HookConfigError: an argument has the wrong type or is out of range.
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
    ) -> None:
        arguments = locals()
        self.process_group = process_group
        names = [option.name for option in dataclasses.fields(PowerSGD)]
        options = PowerSGD(**{name: arguments[name] for name in names if name in arguments})
        if not isinstance(options.start_powerSGD_iter, int):
            raise HookConfigError(
                f"PowerSGDState: start_powerSGD_iter={start_powerSGD_iter!r}; expected a number of"
                " steps (int). A fraction of the run can be given to commhooks.attach, which takes"
                " the length of the run"
            )
        self._new_session(options, LearnedState(), Counters())
        _as_torch.info("PowerSGD config: %s", options)

    def _new_session(self, options: PowerSGD, state: LearnedState, counters: Counters) -> None:
        compressor = Form(batched=False).kind(options)
        self.session = Session(
            compressor, Binding(PositionalNames(), self._group_or()), state, counters
        )
        self._reader = BucketReader()

    def _group_or(self, otherwise: Callable[[], dist.ProcessGroup] = resolve_group) -> Any:
        """Return a function that returns `process_group`, or `otherwise()` if it is None.

        It refers to this object weakly, because this object owns the session that calls it.
        """
        weak = weakref.ref(self)

        def group() -> dist.ProcessGroup:
            state = weak()
            if state is None or state.process_group is None:
                return otherwise()
            return state.process_group

        return group

    def bind(
        self, binding: Binding, model: torch.nn.Module, function: Callable[..., Any]
    ) -> Session:
        bound = self._model() if self._model is not None else None
        if bound is not None and bound is not model:
            raise AttachError(
                "this PowerSGDState is already used by another model, whose gradients it remembers;"
                " make a PowerSGDState for each model"
            )
        self._model = weakref.ref(model)
        self._reader = BucketReader(len(binding.names.named_parameters()))
        binding = dataclasses.replace(binding, group=self._group_or(binding.group))
        consensus = self.session.consensus
        if self.session.has_run:  # in a second training the state keeps its parameter names
            consensus.binding = dataclasses.replace(binding, names=consensus.binding.names)
            # compare the states again: the ranks may be others
            consensus.replace_compressor(self.session.compressor)
        else:
            consensus.bind(binding)
            form = _form_of(function)
            if form is not None:
                self.use(form)
        return self.session

    @property
    def _options(self) -> PowerSGD:
        return self.session.compressor.config

    @property
    def iter(self) -> int:
        """Number of synchronised backward passes that were finite on every rank."""
        self.session.held.settle()
        return self.session.state.step

    matrix_approximation_rank: int = _option("matrix_approximation_rank")
    start_powerSGD_iter: int = _option("start_powerSGD_iter")
    min_compression_rate: float = _option("min_compression_rate")
    use_error_feedback: bool = _option("use_error_feedback")
    warm_start: bool = _option("warm_start")
    orthogonalization_epsilon: float = _option("orthogonalization_epsilon")
    random_seed: int = _option("random_seed")
    batch_tensors_with_same_shape: bool = _option("batch_tensors_with_same_shape")

    @property
    def compression_stats_logging_frequency(self) -> int:
        return max(1, self._options.compression_stats_logging_frequency)

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (compression rate, elements before, elements after) over all compressed passes."""
        return self.session.counters.compression_stats()

    def __getstate__(self) -> dict[str, Any]:
        """Return options and learned state as plain types and tensors, without process group."""
        _as_torch.warning(
            "NOTE: Process group is not serializable and excluded from a saved state."
        )
        session = self.session
        session.held.settle()
        saved_on = None
        with contextlib.suppress(HookRunError):  # the group was destroyed
            if dist.is_initialized():
                group = session.consensus.binding.group()
                saved_on = (dist.get_rank(group), dist.get_world_size(group))
        counters = {}
        for field in dataclasses.fields(Counters):
            value = getattr(session.counters, field.name)
            if isinstance(value, (int, str)):
                counters[field.name] = value
        return {
            "options": dataclasses.asdict(self._options),
            "learned": vars(session.state.compact_copy()),
            "counters": counters,
            "saved_on": saved_on,
            "names": type(session.consensus.binding.names).__name__,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Restore a pickled state. It uses the default process group, which need not exist yet."""
        _as_torch.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). If a"
            " different group is desired, please set `self.process_group` after PowerSGD state is"
            " loaded."
        )
        self.process_group = None
        counters = Counters()
        vars(counters).update(saved["counters"])
        learned = LearnedState(**saved["learned"])
        with plain_mode():  # the caller may read the pickle in inference mode
            for tensors in learned.entries.values():
                tensors.update(
                    (name, tensor.clone())
                    for name, tensor in tensors.items()
                    if tensor.is_inference()
                )
        self._new_session(PowerSGD(**saved["options"]), learned, counters)
        self._saved_on = saved["saved_on"]
        self._saved_names = saved["names"]

    # Set by __setstate__: the (rank, world size) that pickled the residual, and the class of the
    # names in its keys.
    _saved_on: tuple[int, int] | None = None
    _saved_names: str | None = None
    # Set by `bind`.
    _model: "weakref.ref[torch.nn.Module] | None" = None

    def _adapt_pickled_state(self) -> None:
        group = self.session.consensus.binding.group()
        state = self.session.state
        names = self.session.consensus.binding.names
        here = (dist.get_rank(group), dist.get_world_size(group))
        if self._saved_on is not None and self._saved_on != here:
            state.local_missing = state.has_local()
            state.forget_local()
        learned = state.local_missing or any(state.entries.values())
        if learned and self._saved_names not in (None, type(names).__name__):
            state.forget_replicated()
            state.drop_local()
            if here[0] == 0:
                logger.warning(
                    "PowerSGD: the pickled state has other names for the parameters than this hook"
                    " (commhooks.attach uses the model's names, a bare register_comm_hook"
                    " positions): Q and residuals start fresh, the step is kept. Load it as it was"
                    " used, or use state_dict and load_state_dict of the attached hook."
                )
        state.entries = {
            key: by_own_names(tensors, names) for key, tensors in state.entries.items()
        }
        self._saved_on = self._saved_names = None

    def run(self, bucket: dist.GradBucket, form: Form) -> torch.futures.Future[torch.Tensor]:
        session = self.session
        if not session.has_run:
            self.use(form)
            self._adapt_pickled_state()
        if not form.fits(session):
            raise HookRunError(
                "this PowerSGDState is already used by another hook (powerSGD_hook,"
                " batched_powerSGD_hook, or one of them in another wrapper): make a PowerSGDState"
                " of its own for each hook"
            )
        return session.run(self._reader.read(bucket, session.end_pass))

    def use(self, form: Form) -> None:
        if not form.fits(self.session):  # before the first backward pass
            # As in torch, a state can be used with either form, so both compressors take the same
            # options.
            self.session.consensus.replace_compressor(form.kind(self._options, form.wire_dtype))


def with_wire_dtype(
    hook: Callable[..., Any], wire_dtype: torch.dtype
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]] | None:
    """Return `hook` with another wire dtype if it is a PowerSGD hook, else None.

    If two wrappers are nested, the inner one decides.
    """
    form = _form_of(hook)
    if form is None:
        return None
    wire_dtype = form.wire_dtype or wire_dtype
    narrowed = Form(form.batched, wire_dtype)

    def low_rank(
        state: PowerSGDState, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return _checked(state).run(bucket, narrowed)

    low_rank.__name__ = low_rank.__qualname__ = f"{dtype_name(wire_dtype)}_wire_{form.name}"
    _forms[low_rank] = narrowed
    return low_rank


_EACH = Form(batched=False)
_WHOLE = Form(batched=True)


def powerSGD_hook(
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by PowerSGD, parameter by parameter, with warm start and error feedback.

    Two all-reduces per bucket, any number of buckets, on gloo and NCCL; a plain average for the
    first `state.start_powerSGD_iter` steps. All ranks of the group must run the same hook with
    equal options. The bucket is changed in place. The state changes once per backward pass, and
    only if all received numbers are finite.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, Algorithms 1 and 2. Replaces
    torch's `powerSGD_hook`.
    """
    return _checked(state).run(bucket, _EACH)


def batched_powerSGD_hook(
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by PowerSGD as one square matrix; otherwise as `powerSGD_hook`.

    The matrix is padded with zeros. Results depend on `bucket_cap_mb`. A rebuilt bucket starts from
    a new Q; residuals belong to parameters and are kept. Replaces torch's `batched_powerSGD_hook`.
    """
    return _checked(state).run(bucket, _WHOLE)


def _check_given(state: object) -> None:
    if not isinstance(state, PowerSGDState):
        raise invalid(
            "hook_state",
            state,
            "a commhooks.PowerSGDState, or None for one with the default options",
        )


_forms[powerSGD_hook] = _EACH
_forms[batched_powerSGD_hook] = _WHOLE
DROP_INS[powerSGD_hook] = DropIn(PowerSGD.hook_name, _check_given)
DROP_INS[batched_powerSGD_hook] = DropIn(BatchedPowerSGD.hook_name, _check_given)


def _checked(state: object) -> PowerSGDState:
    if not isinstance(state, PowerSGDState):
        raise HookRunError(
            "powerSGD_hook and batched_powerSGD_hook need a commhooks.PowerSGDState as their"
            f" state, got a {type(state).__module__}.{type(state).__qualname__}"
        )
    return state
