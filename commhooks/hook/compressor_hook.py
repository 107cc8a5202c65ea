"""`CompressorHook`: a compressor as a `Hook`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from commhooks.checkpoint.learned_state import LearnedStateCheckpointer
from commhooks.checkpoint.user_state import UserStateCheckpointer
from commhooks.comm.nodes import Nodes, find_nodes
from commhooks.compressors.cast import AllReduce, AllReduceCompressor, Noop
from commhooks.compressors.unit_plan import Unit
from commhooks.engine.consensus import Binding
from commhooks.engine.kernel_choice import KernelChoice
from commhooks.engine.node_reduction import HierarchicalReduction
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
    except AttachError:
        # On all ranks: machines with different numbers of ranks, or no groups for nodes.
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
        self.run = run
        self.end_pass = session.end_pass
        self.session = session
        self.counters = session.counters
        self._request = request
        self._source = source
        self._world_size = source.group.size()
        self._saved_by = SavedBy.of(request, source)
        self.learns = session.compressor.transactional
        # `plans_of(compressor)`. A bound method would keep this object, and with it the learned
        # state, in a reference cycle.
        self._plans_of = functools.partial(
            parameter_plans, names=session.consensus.binding.names, sparse=source.sparse
        )
        self.checkpointer: LearnedStateCheckpointer | UserStateCheckpointer = (
            LearnedStateCheckpointer(request.name, session, source.group, self._plans_of)
            if self.learns
            else UserStateCheckpointer(
                request.name,
                dataclasses.asdict(session.compressor.config),
                session.counters,
                source.group,
                replicas_equal=session.compressor.config.sends,
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
        self.session.held.settle()
        stats: dict[str, Any] = {"step": self.checkpointer.step}
        if not self._request.off:
            choice = self.session.consensus.choice
            assert choice is not None
            stats["kernel"] = choice.name
        return {**stats, **self.session.compressor.further_stats}

    def summary(self) -> Summary:
        compressor = self.session.compressor
        consensus = self.session.consensus
        assert consensus.choice is not None
        kernel = "native kernel" if self.learns and consensus.choice.native else ""
        details = filter(None, (compressor.summary, kernel, consensus.reduction.description))
        return Summary(
            list(details),
            self._effect(),
            self._effect_alone(),
            self._first_warnings(),
        )

    def _effect(self) -> str:
        compressor = self.session.compressor
        before = self.counters.bytes_uncompressed
        unit = Unit.of(before)
        if not self.learns:
            sent = self.counters.last_pass.bytes_sent
            return f"{unit.text(before)} -> {unit.text(sent)} per step and rank"
        if compressor.effect and not self.counters.numel_before:
            return f"{compressor.effect}. Until then {unit.text(before)} per step and rank"
        return self.plan().summary()

    def _effect_alone(self) -> str:
        use = self._use()
        if not self.learns or use is None:
            return ""
        # A run with several ranks may continue from these residuals.
        begin = f"From step {use.begins} on the" if use.plain else "The"
        return (
            f". {begin} gradients are still compressed, so the run can resume on more ranks;"
            " hook=None trains on exact gradients"
        )

    def _first_warnings(self) -> Sequence[str]:
        compressor = self.session.compressor
        if not compressor.config.sends and self._world_size > 1:
            return [
                f"hook {self._request.name!r} averages nothing: every rank trains on its own data"
                " only, and the ranks drift apart. It is for measuring how long a step takes"
                " without a network; hook=None trains without a hook"
            ]
        choice = self.session.consensus.choice
        assert choice is not None
        return choice.warnings(
            compressor.display_name, checked=self._request.check_every is not None
        )

    def warnings(self) -> list[str]:
        compressor = self.session.compressor
        plans = self._plans_of(compressor)
        if not plans or not compressor.selective or any(plan.compressed for plan in plans):
            return []
        summary = f" ({compressor.summary})" if compressor.summary else ""
        return [
            f"{compressor.display_name}{summary} compresses no parameter of this model:"
            " print(hook.plan()) gives the reasons."
        ]

    def plan(self) -> ModelPlan:
        return session_plan(self._request.name, self.session, self._source.sparse, self._saved_by)

    @contextlib.contextmanager
    def residuals(self) -> Iterator[Residuals]:
        session = self.session
        state = session.state
        reduction = session.consensus.reduction
        names = set(self._source.names.named_parameters())
        with session.held.lock:
            session.held.settle()
            tensors = {name: tensor for key in state.local for name, tensor in state[key].items()}
            if self.learns and (plans := self._plans_of(session.compressor)):
                names = {
                    plan.name for plan in plans if plan.compressed and reduction.keeps(plan.name)
                }
            elif self.learns:  # whole buckets
                names = set(tensors) or names
            yield Residuals(tensors, float(state.loss_scale) * reduction.ranks_per_residual, names)

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        return True

    def close(self) -> None:
        self.session.close()
