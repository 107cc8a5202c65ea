"""`CompressorHook`: a compressor as a `Hook`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from commhooks.checkpoint.learned_state import LearnedStateCheckpointer
from commhooks.checkpoint.user_state import UserStateCheckpointer
from commhooks.comm.nodes import Nodes, find_nodes
from commhooks.compressors.cast import AllReduce, AllReduceCompressor, Noop
from commhooks.compressors.unit_plan import Unit
from commhooks.engine.consensus import Binding
from commhooks.engine.kernel_choice import KernelChoice
from commhooks.engine.reduction import HierarchicalReduction
from commhooks.engine.session import Session
from commhooks.engine.state import LearnedState
from commhooks.errors import AttachError
from commhooks.gradients.ddp import DDPGradients
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import Future, GradientSource, PassListener
from commhooks.hook.kinds import Prepared
from commhooks.hook.nonfinite import NonfiniteWarning
from commhooks.hook.protocol import Residuals
from commhooks.plan import ModelPlan, SavedBy, parameter_plans, session_plan
from commhooks.report import Status, Summary, Use
from commhooks.request import HookRequest


def prepare(
    request: HookRequest, source: GradientSource, binding: Binding, total_steps: int | None
) -> Prepared:
    compressor = (
        AllReduceCompressor(AllReduce()) if request.off else request.new_compressor(total_steps)
    )
    assert compressor is not None
    session = Session(compressor, binding, LearnedState.of(compressor.state_fields))
    return Prepared(compressor, functools.partial(build, request, source, session, session.run))


def build(
    request: HookRequest,
    source: GradientSource,
    session: Session,
    run: Callable[[Bucket], Future],
    choice: KernelChoice,
) -> "CompressorHook":
    """Make the hook of a session. `run`: reduces a bucket, by `session.run` in the end."""
    session.consensus.compute_with(choice)
    nodes = _nodes_for(request, session, source)
    if nodes is not None:
        session.consensus.reduction = HierarchicalReduction(nodes, source.names.named_parameters())
        session.consensus.replace_compressor(session.compressor.with_nodes(nodes.ranks_per_node))
    return CompressorHook(request, source, session, run)


def _nodes_for(request: HookRequest, session: Session, source: GradientSource) -> Nodes | None:
    """Divide the ranks into nodes. Without `ranks_per_node` some compressors use machines as
    nodes.
    """
    group = session.consensus.binding.group()
    chooses = session.compressor.uses_machines and request.ranks_per_node is None
    # Between nodes, stale gradients of unused parameters would count as new gradients.
    if not chooses or not isinstance(source, DDPGradients) or source.finds_unused:
        return find_nodes(request.ranks_per_node, group, source.device)
    try:
        return find_nodes("auto", group, source.device)
    except (
        AttachError
    ):  # on all ranks: machines with different numbers of ranks, or no groups for nodes
        return None


class CompressorHook:
    members = None

    def __init__(
        self,
        request: HookRequest,
        source: GradientSource,
        session: Session,
        run: Callable[[Bucket], Future],
    ) -> None:
        self.run, self.end_pass = run, session.end_pass
        name, config = request.name, session.compressor.config
        self.session, self.counters = session, session.counters
        self._request, self._source = request, source
        self._world_size = source.group.size()
        self._saved_by = SavedBy.of(request, source)
        self.learns = session.compressor.transactional
        # `plans_of(compressor)`. A bound method would keep this object, and with it the learned
        # state, in a reference cycle.
        self._plans_of = functools.partial(
            parameter_plans, names=session.consensus.binding.names, sparse=source.sparse
        )
        self.checkpointer: LearnedStateCheckpointer | UserStateCheckpointer = (
            LearnedStateCheckpointer(name, session, source.group, self._plans_of)
            if self.learns
            else UserStateCheckpointer(
                name,
                dataclasses.asdict(config),
                session.counters,
                source.group,
                replicas_equal=config.sends,
            )
        )

    def listeners(self, *, logs: bool) -> list[PassListener]:
        if not self.session.compressor.config.sends:
            return []
        nonfinite = NonfiniteWarning(self.session, self._source, logs=logs)
        self.run = nonfinite.watched(self.run)
        return [nonfinite]

    def status(self) -> Status:
        session = self.session
        return Status(
            dataclasses.asdict(session.compressor.config),
            self._use(),
            counts_bytes=not self._request.off,
            counts_outcomes=self.learns,
            run_number=session.consensus.nonce if self.learns else None,
        )

    def _use(self) -> Use | None:
        compressor = self.session.compressor
        if not self.learns:
            plain = isinstance(compressor.config, (AllReduce, Noop))
            return None if plain and self._request.wrapper is None else Use(acted=True)
        begun = self.counters.numel_before > 0
        return Use(
            acted=self.counters.passes_acted > 0,
            plain=not begun,
            begins=compressor.begins,
            acts=compressor.begins,
            why="it compresses no parameter of this model. print(hook.plan()) gives the reasons",
            remedy=compressor.how_to_begin_earlier,
            or_later="" if compressor.begins == compressor.start_step else " or later",
        )

    def stats(self) -> dict[str, Any]:
        session, compressor = self.session, self.session.compressor
        session.held.settle()
        found: dict[str, Any] = {"step": self.checkpointer.step}
        if not self._request.off:
            assert session.consensus.choice is not None
            found["kernel"] = session.consensus.choice.name
        return {**found, **compressor.further_stats}

    def summary(self) -> Summary:
        compressor, consensus = self.session.compressor, self.session.consensus
        before, sent = self.counters.bytes_uncompressed, self.counters.last_pass.bytes_sent
        unit, alone, warnings = Unit.of(before), "", []
        if not self.learns:
            effect = f"{unit.text(before)} -> {unit.text(sent)} per step and rank"
        elif compressor.effect and not self.counters.numel_before:
            effect = f"{compressor.effect}. Until then {unit.text(before)} per step and rank"
        else:
            effect = self.plan().summary()
        use = self._use()
        if self.learns and use is not None:
            # A run with several ranks may continue from these residuals.
            begin = f"From step {use.begins} on the" if use.plain else "The"
            alone = (
                f". {begin} gradients are compressed as among several, so that the run can go on"
                " with any number of them; hook=None trains on exact gradients"
            )
        assert consensus.choice is not None
        if compressor.config.sends or self._world_size == 1:
            warnings = consensus.choice.warnings(
                compressor.display_name, checked=self._request.check_every is not None
            )
        else:
            warnings = [
                f"hook {self._request.name!r} averages nothing: every rank trains on its own data"
                " only, and the ranks drift apart. It is for measuring how long a step takes"
                " without a network; hook=None trains without a hook"
            ]
        kernel = "native kernel" if self.learns and consensus.choice.native else ""
        details = [
            each for each in (compressor.summary, kernel, consensus.reduction.description) if each
        ]
        return Summary(details, effect, alone, warnings)

    def warnings(self) -> list[str]:
        compressor, plans = self.session.compressor, self._plans_of(self.session.compressor)
        if not plans or not compressor.selective or any(plan.compressed for plan in plans):
            return []
        name = (
            f"{compressor.display_name} ({compressor.summary})"
            if compressor.summary
            else compressor.display_name
        )
        return [
            f"{name} compresses no parameter of this model: print(hook.plan()) gives the reasons."
        ]

    def plan(self) -> ModelPlan:
        return session_plan(self._request.name, self.session, self._source.sparse, self._saved_by)

    @contextlib.contextmanager
    def residuals(self) -> Iterator[Residuals]:
        session, names = self.session, set(self._source.names.named_parameters())
        state, reduction = session.state, session.consensus.reduction
        with session.held.lock:
            session.held.settle()
            found = {n: t for key in state.local for n, t in state[key].items()}
            if self.learns and (plans := self._plans_of(session.compressor)):
                names = {
                    plan.name for plan in plans if plan.compressed and reduction.keeps(plan.name)
                }
            elif self.learns:  # whole buckets
                names = set(found) or names
            yield Residuals(found, float(state.loss_scale) * reduction.ranks_per_residual, names)

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        return True

    def close(self) -> None:
        self.session.close()
