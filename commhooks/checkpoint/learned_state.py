"""Saves learned state as a checkpoint payload, and loads a payload completely or not at all."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.from_payload import PayloadReader
from commhooks.checkpoint.payload import COUNTERS, check_count, damaged
from commhooks.checkpoint.residuals import ResidualCollector
from commhooks.checkpoint.to_payload import payload_of
from commhooks.comm.groups import is_logging_rank
from commhooks.comm.joint_save import JointSave
from commhooks.compressors.base import RESIDUAL, Compressor
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.engine.session import ExchangeDriver
from commhooks.engine.state import LearnedState
from commhooks.errors import HookConfigError
from commhooks.gradients.precision import compute_dtype
from commhooks.gradients.source import GradientSource


class LearnedStateCheckpointer:
    """Saves and loads the learned state of a session on this rank.

    `plans_of`: returns a compressor's plan for every parameter; an empty list for a compressor of
    whole buckets.
    """

    step_is = "step"
    """What to call `step` in messages."""
    not_begun_anew = ""
    """The end of a message: what `begin_anew` does not reset."""

    def __init__(
        self,
        hook: str,
        session: ExchangeDriver,
        group: dist.ProcessGroup,
        plans_of: Callable[[Compressor[Any]], list[UnitPlan]],
    ) -> None:
        self._hook = hook
        self._session = session
        self._plans_of = plans_of
        self._rank = group.rank()
        self._world_size = group.size()
        self._logs = is_logging_rank(group, session.consensus.binding.shard_group)
        self._residuals = ResidualCollector(hook, session, group, plans_of)
        self._first_start = session.compressor.start_step

    @property
    def step(self) -> int:
        return self._session.state.step

    def joint_save(self) -> JointSave | None:
        """See `ResidualCollector.joint_save`."""
        return self._residuals.joint_save()

    def save(
        self, residual: str, *, limit_s: float, gather: bool = False, joint: bool = True
    ) -> dict[str, Any]:
        """Return the payload; see `CommHook.state_dict` and `ResidualCollector.collect`."""
        held = self._session.held
        with held.lock, contextlib.ExitStack() as body:
            # A signal handler may interrupt a commit of the same thread, which holds this reentrant
            # lock.
            mid_commit = held.in_commit
            if not mid_commit:
                body.enter_context(held.settled())
            residuals = self._residuals.collect(
                residual, mid_commit=mid_commit, gather=gather, joint=joint, limit_s=limit_s
            )
            return payload_of(self._session, self._hook, self._world_size, residuals)

    def prepare_load(self, content: dict[str, Any], strict: bool) -> Callable[[], None]:
        """Check all of `content` without changing anything, and return a function that applies it.
        Raises PayloadError if `content` is damaged, or, with `strict`, belongs to another model.
        """
        compressor = self._compressor_for(content)
        reader = PayloadReader(
            self._hook,
            self._session.consensus.binding.names,
            compressor,
            {plan.name: plan for plan in self._plans_of(compressor)},
            self._rank,
            self._world_size,
            self._logs,
            self._device_of,
        )
        state = reader.read(content, strict=strict)

        def take_over() -> None:
            self._take_over(state, compressor)
            self._session.counters.resume_from(content[COUNTERS])

        return take_over

    def begin_anew(self) -> None:
        compressor = self._session.compressor.with_start(self._first_start)
        self._take_over(LearnedState.of(compressor.state_fields), compressor)

    def resumed(self, content: dict[str, Any]) -> str:
        """Return the end of the line that says where the run resumes, after a load of `content`."""
        compressor = self._session.compressor
        option = compressor.config.start_option
        start = compressor.start_step
        text = self._resumed_residuals(content)
        overruled = option is not None and start != self._first_start
        if overruled and content["step"] < max(start, self._first_start):
            text += f"; {option}={start} as it was saved, not {self._first_start}"
        return text

    def _resumed_residuals(self, content: dict[str, Any]) -> str:
        state = self._session.state
        saved_by = content["world_size"]
        begun = content["step"] > self._session.compressor.start_step
        if not state.local:
            text = ""
        elif not begun and not content[COUNTERS]["compressed_steps"]:
            text = "; not yet compressing"
        elif state.local_missing or content["residual"] == "none":
            text = "; residuals: none, they start from zero"
        elif all(entry["residual"] is None for entry in content["parameters"].values()):
            text = "; no parameter has a residual"
        elif content["residual"] == "per_rank" and saved_by == self._world_size:
            text = "; residuals: each rank's own"
        else:
            text = f"; residuals: mean of {saved_by} rank{'s' if saved_by > 1 else ''}"
        return text

    def kept_fields(self, source: GradientSource) -> dict[str, dict[str, torch.dtype]]:
        """Return which fields Distributed Checkpoint saves, as field -> parameter -> dtype.

        They have one number per element of a parameter, as "residual" has. All whole parameters of
        the model that could have the field are listed.
        """
        if not self._session.state.local:
            return {}
        compressor = self._session.compressor
        names = source.whole
        parameters = [
            ParameterInfo.of(
                name, parameter, names, compressor.config, id(parameter) in source.sparse
            )
            for name, parameter in names.named_parameters().items()
        ]
        may_be_compressed = compressor.may_compress(parameters)
        dtypes = {
            info.name: compute_dtype(info.parameter.dtype)
            for info, may in zip(parameters, may_be_compressed, strict=True)
            if may and not info.sparse
        }
        return {RESIDUAL.key: dtypes}

    def _compressor_for(self, content: dict[str, Any]) -> Compressor[Any]:
        """Return the compressor that continues from `content`, with its start step and notes."""
        current = self._session.compressor
        start = current.start_step
        option = current.config.start_option
        if option is not None:
            start = content["options"].get(option, start)
            check_count({option: start}, option, 0)
        same_ranks = content.get("world_size") == self._world_size
        try:
            return current.with_start(start).with_notes(
                content.get("notes"), content["step"], same_ranks=same_ranks
            )
        except HookConfigError as error:
            raise damaged(str(error)) from error

    def _device_of(self, field: StateField, parameter: torch.Tensor) -> torch.device:
        return parameter.device

    def _take_over(self, state: LearnedState, compressor: Compressor[Any]) -> None:
        session = self._session
        with session.held.lock:
            # Unread outcomes of earlier steps belong to the old state.
            session.held.settle()
            # In one statement, so that a signal handler never saves a half-replaced state.
            vars(session.state).update(vars(state))
            session.consensus.replace_compressor(compressor)
