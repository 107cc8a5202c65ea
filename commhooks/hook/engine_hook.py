"""A compressor behind `CommHook`: the engine's session runs it."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from commhooks.checkpoint.state import SavedLearnedState
from commhooks.checkpoint.user_state import SavedUserState
from commhooks.comm.nodes import Nodes, find_nodes
from commhooks.compressors.adaptive import AdaptiveCompressor
from commhooks.compressors.base import RESIDUAL, Compressor
from commhooks.compressors.cast import AllReduce
from commhooks.compressors.kernel import TORCH
from commhooks.compressors.noop import Noop
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.compressors.units import Unit
from commhooks.engine.kernel_choice import Choice, KernelSupport
from commhooks.engine.learning import Learning
from commhooks.engine.nodes import Arrangement, Hierarchy
from commhooks.engine.session import Session
from commhooks.errors import HookConfigError
from commhooks.gradients import precision
from commhooks.gradients.layout import Bucket
from commhooks.gradients.names import ParameterNames
from commhooks.gradients.source import Future, GradientSource
from commhooks.hook.model_plan import ModelPlan
from commhooks.hook.plan_model import parameter_infos, whole_plan
from commhooks.hook.runner import Runner
from commhooks.hook.unused import Use
from commhooks.request import HookRequest


class EngineHook(Runner):
    """
    Args:
        session: what runs the compressor, bound to the model.
        run: reduces a bucket with the session; None: a subclass has a method for it.
    """

    def __init__(
        self,
        request: HookRequest,
        source: GradientSource,
        session: Learning,
        run: Callable[[Bucket], Future] | None = None,
    ) -> None:
        name, config = request.name, session.compressor.config
        self._learns = self.counts_outcomes = session.compressor.transactional
        self.counts_bytes = not request.off
        # Not a method: bound, it would hold this object in a cycle, and with it the learned state.
        self._own_plans = functools.partial(_plans_of_parameters, session, source.sparse)
        super().__init__(
            request,
            source,
            session.counters,
            SavedLearnedState(name, session, source.group, self._own_plans)
            if self._learns
            else SavedUserState(
                name, dataclasses.asdict(config), session.counters, source.group, replicas_equal=config.sends
            ),
        )
        self.said = session.consensus.remarks
        self._session = session
        if run is not None:
            self.run = run

    def end_pass(self) -> None:
        assert isinstance(self._session, Session)
        self._session.end_pass()

    def close(self) -> None:
        super().close()
        self._session.close()

    def settle(self) -> None:
        self._session.held.settle()

    @property
    def options(self) -> dict[str, Any]:
        return dataclasses.asdict(self._session.compressor.config)

    @property
    def run_number(self) -> int | None:
        return self._session.consensus.nonce if self._learns else None

    def plan(self) -> ModelPlan:
        session, name = self._session, self._request.name
        if session.compressor.per_bucket:  # each row is a bucket
            return whole_plan(name, session.compressor, session.consensus.buckets.plans())
        return whole_plan(
            name,
            session.compressor,
            self._own_plans(session.compressor),
            session.consensus.buckets.names() if session.has_run else (),
            session.consensus.arrangement,
        )

    def use(self) -> Use | None:
        compressor = self._session.compressor
        if not self._learns:
            plain = isinstance(compressor.config, (AllReduce, Noop))
            return None if plain and self._request.wrapper is None else Use(acted=True)
        acted = self.counters.numel_before > 0
        return Use(
            acted,
            plain=not acted,
            begins=compressor.begins,
            acts=compressor.begins,
            remedy=compressor.how_to_begin_earlier,
            or_later=" or later" if isinstance(compressor, AdaptiveCompressor) else "",
        )

    def details(self) -> list[str]:
        kernel = f"{self.choice.kernel.name} kernel" if self._learns and self.choice.kernel != TORCH else ""
        found = (self._session.compressor.summary, kernel, self._session.consensus.arrangement.words)
        return [each for each in found if each]

    def effect(self) -> str:
        before, sent = self.counters.bytes_uncompressed, self.counters.last_pass.bytes_sent
        unit, compressor = Unit.of(before), self._session.compressor
        if not self._learns:
            return f"{unit.text(before)} -> {unit.text(sent)} per step and rank"
        if isinstance(compressor, AdaptiveCompressor) and not self.counters.numel_before:
            return f"the fastest hook here. Until then {unit.text(before)} per step and rank"
        return self.plan().summary()

    def alone(self) -> str:
        if not self._learns:
            return ""
        # Its residuals must be those that a run with several ranks can go on with, and take over from one.
        use = self.use()
        begin = f"From step {use.begins} on the" if use is not None and use.plain else "The"
        return (
            f". {begin} gradients are compressed as among several, so that the run can go on with any number of them; "
            "hook=None trains on exact gradients"
        )

    @contextlib.contextmanager
    def residuals(self) -> Iterator[tuple[Mapping[str, torch.Tensor], float]]:
        state = self._session.state
        with self._session.held.lock:
            self.settle()
            factor = float(state.loss_scale) * self._session.consensus.arrangement.ranks_per_residual
            yield {n: t for key in state.local for n, t in state[key].items()}, factor

    def kept_fields(self, names: ParameterNames) -> dict[str, dict[str, torch.dtype]]:
        compressor = self._session.compressor
        if not self._session.state.local:
            return {}
        infos = list(parameter_infos(names, compressor.config, self._source.sparse).values())
        if not compressor.per_bucket:
            infos = [info for info, may in zip(infos, compressor.may_compress(infos), strict=True) if may]
        dtypes = {each.name: precision.compute_dtype(each.parameter.dtype) for each in infos if not each.sparse}
        return {RESIDUAL.key: dtypes}

    def measured(self, names: set[str]) -> set[str]:
        if not self._learns:
            return names
        if self._session.compressor.per_bucket:
            state = self._session.state
            return {name for key in state.local for name in state[key]} or names
        keeps = self._session.consensus.arrangement.keeps
        plans = self._own_plans(self._session.compressor)
        return {plan.name for plan in plans if plan.compressed and keeps(plan.name)}

    def kernel_support(self) -> KernelSupport:
        compressor, parameters = self._session.compressor, self._source.names.known().values()
        devices = {p.device for p in parameters}
        if self._learns or self._request.ranks_per_node is not None:
            try:
                precision.check_one_device(devices, compressor.display_name)
            except HookConfigError as error:  # other ranks may support it
                return KernelSupport(cannot=str(error) if self._learns else f"{error}, without ranks_per_node")
        if not self._learns or not devices:
            return KernelSupport()
        return KernelSupport.of(compressor, devices.pop(), {p.dtype for p in parameters})

    def agreed(self, choice: Choice) -> None:
        super().agreed(choice)
        consensus = self._session.consensus
        consensus.compute_with(choice)
        nodes = find_nodes(self._request.ranks_per_node, consensus.binding.group(), self._source.device)
        if nodes is not None:
            consensus.arrangement = self._between(nodes)

    def _between(self, nodes: Nodes) -> Arrangement:
        """How the ranks of these nodes share the work."""
        return Hierarchy(nodes, self._source.names.known())

    def remarks(self, *, checked: bool) -> list[str]:
        compressor = self._session.compressor
        if not compressor.config.sends and self.world_size > 1:
            return [
                f"hook {self._request.name!r} averages nothing: every rank trains on its own data only, and the ranks "
                "drift apart. It is for measuring how long a step takes without a network; hook=None trains without a "
                "hook"
            ]
        return self.choice.remarks(compressor.display_name, checked=checked)

    @property
    def chosen(self) -> tuple[str | None, int | None]:
        compressor = self._session.compressor
        return (compressor.chosen, compressor.chosen_at) if isinstance(compressor, AdaptiveCompressor) else (None, None)

    def problems(self) -> list[str]:
        compressor = self._session.compressor
        if compressor.per_bucket or not compressor.selective:
            return []
        if any(plan.compressed for plan in self._own_plans(compressor)):
            return []
        name = f"{compressor.display_name} ({compressor.summary})" if compressor.summary else compressor.display_name
        return [f"{name} compresses no parameter of this model: print(hook.plan()) says why for each."]


def _plans_of_parameters(session: Learning, sparse: Collection[int], compressor: Compressor[Any]) -> list[UnitPlan]:
    """The plans of all parameters with `compressor`; empty for one of whole buckets. Computed at each call, because
    loading a state may change options."""
    if compressor.per_bucket:
        return []
    infos = parameter_infos(session.consensus.binding.names, compressor.config, sparse)
    return compressor.plan(list(infos.values()))
