"""The driver of the hooks that average weights once in several steps: it counts backward passes, and says when the
ranks come together.

A round is `sync_every` backward passes, of which those of one step with a closure count once. An outer step comes at
the first event after the optimizer's step that follows the last of them, or the pass at which it is the turn of a part
of the weights (`fragments.py`): when the optimizers have stepped all parameters; else before the next forward pass;
else, for models whose own forward is not called, at the end of the next backward pass. It also comes before anything
that looks at the model as a whole: a joint save, and `CommHook.synchronize`.
"""

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.state import SavedLearnedState
from commhooks.comm.collectives import gather_rows, good_on_all, new_future
from commhooks.comm.groups import is_logging_rank
from commhooks.comm.nodes import Nodes
from commhooks.comm.wire import all_finite
from commhooks.compressors.base import Compressor
from commhooks.compressors.cast import AllReduce, AllReduceCompressor
from commhooks.compressors.kernel import TORCH
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.engine.immediate import reduce_and_time
from commhooks.errors import HookRunError
from commhooks.gradients.layout import Bucket, to_logical
from commhooks.gradients.loss_scale import LossScale
from commhooks.gradients.precision import compute_dtype
from commhooks.gradients.source import Future, GradientSource
from commhooks.gradients.torch_private import run_after_backward, sparse_values
from commhooks.hook.hooks import Residuals
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.fragments import OuterSteps, copied, set_weights
from commhooks.local_steps.optimizers import OptimizerSteps
from commhooks.local_steps.outer_step import ANCHOR
from commhooks.local_steps.round_warnings import RoundWarnings
from commhooks.plan import ModelPlan, parameter_plans, session_plan
from commhooks.report import Status, Summary, Use
from commhooks.request import HookRequest


class LocalStepsDriver:
    """The third kind of hook, beside `CompressorHook` and `FunctionHook`.

    Args:
        outer: runs the outer steps.
        loss_scale: as of `attach`. With a GradScaler a rank may skip a step. The ranks agree then, in the last pass of
            a round, whether none will; otherwise the round goes on, because one that skips would be late for the outer
            step, and meet the others in collectives of the user's. The same for every turn in a round.
    """

    def __init__(
        self,
        request: HookRequest,
        source: GradientSource,
        outer: OuterSteps,
        loss_scale: Callable[[], LossScale] | None,
        nodes: Nodes | None,
    ) -> None:
        self.counters = outer.counters
        self.rank, self.world_size = source.group.rank(), source.group.size()
        self._logs = is_logging_rank(source.group, source.shard_group)
        self._request, self._source = request, source
        self._outer = outer
        self._exact = AllReduceCompressor(AllReduce())
        self._nodes = nodes
        self._scaled = loss_scale is not None
        self._in_round = self._passes = 0  # that count, the same on all ranks, of the round and of the run
        self._shared_at = self._saved_at = (
            0  # passes after which the rest was rank 0's, without and with the optimizers
        )
        self._due = False  # an outer step waits for the optimizers
        self._apart = False  # the ranks have trained since they had the same weights
        self._trained_in_mode = True  # `Module.training` of the latest pass
        self._loaded = False  # a state, after which the model may have other weights than those of the anchor
        self._finite: list[torch.Tensor] = []
        self._differences: list[str] = []  # between the ranks, at the latest joint save
        self._discarded = 0  # outer steps of this run
        self._thread: int | None = None  # that of the training
        self._warn = RoundWarnings(request.name, self.counters, self.rank, logs=self._logs)
        # Bound methods would keep this object, and with it the learned state, as long as torch's hooks.
        this = weakref.ref(self)
        self._optimizers = OptimizerSteps(source.stepped(), functools.partial(_after_steps, this))
        self._common = CommonState(request.name, source, self._optimizers, loss_scale, self.counters, logs=self._logs)
        # Before torch's own hooks: those of fully_shard gather the weights.
        self._before_forward = self._module().register_forward_pre_hook(_BeforeForward(self), prepend=True)
        self._still_sent = source.let_ranks_differ()
        # Not a method, and held weakly: a cycle would hold the learned state.
        plans = functools.partial(parameter_plans, names=source.names, sparse=source.sparse)
        self.saved = _SavedRounds(request.name, outer, source.group, plans, this)

    # ---- backward passes ---------------------------------------------------------------------------------------------

    def run(self, bucket: Bucket) -> Future:
        if bucket.is_first:
            self._begin_local_pass(bucket)
        flat, group = bucket.flat, self._source.group
        self.counters.gradients(bucket.nbytes)
        if self._scaled and not self._averages and self._outer.due(self._in_round + 1):
            self._finite.append(all_finite(sparse_values(flat) if flat.is_sparse else flat))
        if self._averages:
            future = reduce_and_time(self._exact, bucket, group, self.counters)
        elif self._nodes is not None:
            future = reduce_and_time(self._exact, bucket, self._nodes.node, self.counters, over="node")
        else:
            future = new_future(flat.device)
            future.set_result(flat)
        if bucket.is_last:
            self.end_pass()
        return future

    def _begin_local_pass(self, first: Bucket) -> None:
        self._refuse_repeated_pass()
        self._outer.consensus.reach(self._source.group, first.flat)
        self.counters.begin_pass()
        if not self._optimizers.repeats:
            self._passes += 1
        self._trained_in_mode = self._module().training
        self._finite.clear()
        anchor, known = self._outer.state[ANCHOR.key], self._source.names.known()
        if not self._averages and len(anchor) < len(known):
            # A distributed checkpoint does not say which of them were zero.
            missing = {n: p for n, p in known.items() if n not in anchor}
            self._common.equalize(missing)
            anchor.update(copied(missing))

    @property
    def _averages(self) -> bool:
        """Whether the running pass averages gradients: it is one of the first `start_iter` ones."""
        return self.counters.cumulative()["backward_passes"] <= self._outer.compressor.start_step

    def _refuse_repeated_pass(self) -> None:
        """Raise HookRunError before a further pass of a step if passes communicate: LBFGS calls its closure on each
        rank as often as the numbers of that rank ask for."""
        if not self._optimizers.repeats or self.world_size == 1:
            return
        what = ""
        if self._still_sent:
            what = "find_unused_parameters=True, with which DDP sends a message in every pass: leave it out"
        elif self._nodes is not None:
            what = "ranks_per_node, with which the ranks of a node average gradients in every pass: leave it out"
        elif self.counters.cumulative()["backward_passes"] < self._outer.compressor.start_step:
            what = "start_iter, with which the first passes average gradients: leave it out"
        elif any(isinstance(each, torch.nn.SyncBatchNorm) and each.training for each in self._module().modules()):
            what = "SyncBatchNorm, which sends in every pass: use BatchNorm"
        if what:
            raise HookRunError(
                f"hook {self._request.name!r}: an optimizer calls its closure again within one step, and each rank may "
                f"call it a different number of times, as LBFGS does. That cannot be combined with {what}"
            )

    def end_pass(self) -> None:
        repeated = self._optimizers.passed()
        if (self._due or self._loaded) and not repeated and not self._optimizers.stepping:
            run_after_backward(functools.partial(_late, weakref.ref(self)))
            return
        self._count(repeated)

    def late(self) -> None:
        """At the end of a backward pass before which there was no event at which the outer step could come."""
        with torch.no_grad():
            self._catch_up()
        self._count(repeated=False)

    def _count(self, repeated: bool) -> None:
        """Count a pass that has ended."""
        if self._averages:
            return
        self._apart = True
        if repeated:
            return
        if self._outer.due(self._in_round + 1) and self._all_step():
            self._due = True
            self._optimizers.expect()
        self._in_round += 1

    def _all_step(self) -> bool:
        """Whether no rank will skip the step of this pass, as far as that can happen; or one needs the outer step: its
        weights are not finite, and so its gradients never will be. The same on all ranks."""
        if not self._scaled:
            return True
        good = self._on_all_shards(torch.stack(self._finite).all())
        lost = not good and not self._on_all_shards(
            torch.stack([all_finite(each) for each in self._source.names.known().values()]).all()
        )
        row = torch.tensor([good, lost], device=self._source.device, dtype=torch.int64)
        rows = gather_rows(row, self._source.group, self.counters, "whether all gradients are finite")
        return bool(rows[:, 0].all() or rows[:, 1].any())

    def _on_all_shards(self, good: torch.Tensor) -> bool:
        shards = self._source.shard_group
        return bool(good if shards is None else good_on_all(good, shards, "all shards"))

    # ---- outer steps -------------------------------------------------------------------------------------------------

    def after_steps(self) -> None:
        """The optimizers have stepped all parameters since the last pass of the round."""
        if self._due:
            self._outer_step()

    @torch.no_grad()
    def before_forward(self, module: torch.nn.Module) -> None:
        """Before a forward pass in which gradients are recorded."""
        self._thread = threading.get_ident()
        self._refuse_repeated_pass()
        # A model may be trained in evaluation mode. A forward pass in another mode may be one of rank 0 alone.
        if module.training == self._trained_in_mode and not self._optimizers.stepping:
            self._catch_up()

    def _catch_up(self) -> None:
        """Do what no step of the optimizers has led to."""
        if self._loaded:
            self._loaded = False
            self._begin_from_what_was_loaded()
        if self._due:
            self._warn.late()
            self._outer_step()

    @torch.no_grad()
    def _outer_step(self, *, early: bool = False) -> None:
        """All ranks must call this, between the same two steps. `early`: end the round, although it is not its turn."""
        self._due = False
        self._optimizers.forget()
        self._source.before_weights_change()
        if early:
            self._outer.end_round()
        if early or self._outer.advance(self._in_round):
            self._in_round, self._apart = 0, not (early or self._outer.immediate)
            self._common.share(optimizers=False)
            self._shared_at = self._passes
        if self._outer.discarded > self._discarded:
            self._discarded = self._outer.discarded
            self._go_to_anchor()  # other parts may not be finite, either
            if parameters := self._optimizers.begin_anew():
                self._warn.begun_anew(parameters)
            self._warn.discarded(self._discarded)

    def _go_to_anchor(self) -> None:
        self._source.before_weights_change()
        set_weights(self._source.names.known(), self._outer.state[ANCHOR.key])

    def _begin_from_what_was_loaded(self) -> None:
        """After a load: if the model has other weights than the anchor, begin from these if they are equal on all
        ranks, else from the anchor."""
        anchor, known = self._outer.state[ANCHOR.key], self._source.names.known()
        self._source.before_weights_change()
        same = all(torch.equal(p.detach(), to_logical(anchor[n], p).to(p)) for n, p in known.items() if n in anchor)
        if self._on_some_rank(not same):
            common = not self._on_some_rank(bool(self._common.differing_weights()))
            if common:
                anchor.update(copied(known))
            else:
                self._go_to_anchor()
            self._warn.loaded_others(common=common)

    def _on_some_rank(self, here: bool) -> bool:
        row = torch.tensor([here], device=self._source.device, dtype=torch.int64)
        rows = gather_rows(row, self._source.group, self.counters, "whether the weights are those of the anchor")
        return not self._on_all_shards(~rows.any())

    # ---- where the model is looked at as a whole ---------------------------------------------------------------------

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        def share() -> None:
            if self._apart:
                self._outer_step(early=True)
            self._differences = self._common.share(optimizers=optimizers)
            self._shared_at = self._passes
            if optimizers:
                self._saved_at = self._passes
                if differing := self._common.differing_weights():
                    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
                    self._differences.insert(0, f"the weights ({differing[0]}{more})")

        self._differences = []
        trained = self._apart or self._passes > (self._saved_at if optimizers else self._shared_at)
        if not trained and not (optimizers and self._outer.has_run):
            return True
        if self._thread not in (None, threading.get_ident()):
            if trained:
                self._warn.in_another_thread()
            return not trained
        with torch.inference_mode(False), torch.no_grad():  # frameworks validate in inference mode
            return self._together(share, limit_s)

    def _together(self, work: Callable[[], None], limit_s: float) -> bool:
        """Do `work`, which communicates, if all ranks come within the limit. Returns whether it is done."""
        saver = self.saved.joint_save()
        if saver is None or self.world_size == 1:
            work()
            return True
        rounds = self._outer.state.step + self._outer.state.nonfinite_steps
        reason = saver.run(-1 - rounds, lambda _: work(), limit_s, passes=self._passes)
        if reason and self.rank == saver.logging_rank:
            self._warn.not_averaged(reason)
        return not reason

    def vouched(self, content: dict[str, Any], *, together: bool) -> dict[str, Any]:
        """The payload `content`, marked inexact if a run that resumes from it would not go on as this one.
        `together`: all ranks took part in the save."""
        if not together and (self._apart or self._passes > self._saved_at):
            if self._apart:
                self._warn.saved_alone()
            return content | {"exact": False}
        if self._differences:
            self._warn.inexact(self._differences)
            return content | {"exact": False}
        return content

    def load(self, take_over: Callable[[], None]) -> None:
        """Load a state, which `take_over` does."""
        self._outer.forget(until_timeout=True)  # what is on its way would count as a step of the loaded state
        take_over()
        self._in_round, self._due, self._apart = 0, False, False
        self._shared_at = self._saved_at = self._passes
        self._loaded = True
        self._optimizers.forget()

    # ---- what `CommHook` asks for ------------------------------------------------------------------------------------

    def status(self) -> Status:
        compressor = self._outer.compressor
        use = Use(
            acted=self.counters.compressed_steps + self.counters.nonfinite_steps > 0,
            plain=self._averages,
            begins=compressor.begins,
            acts=compressor.begins + compressor.config.sync_every,
            missing="averaged no weights",
            remedy=f"{compressor.how_to_begin_earlier}, or sync_every",
        )
        return Status(
            dataclasses.asdict(compressor.config),
            use,
            counts_bytes=True,
            counts_outcomes=True,
            replicas_agree=not self._apart,
            run_number=self._outer.consensus.nonce,
        )

    def stats(self) -> dict[str, Any]:
        self._outer.held.settle()
        norm, cosine = self._outer.norm_and_cosine()
        assert self._outer.consensus.choice is not None
        return {
            "step": self.saved.step,
            "kernel": self._outer.consensus.choice.kernel.name,
            "step_in_round": self._in_round,
            "outer_gradient_norm": norm,
            "outer_gradient_cosine": cosine,
        }

    def summary(self) -> Summary:
        buffers = any(True for _ in self._module().buffers())
        more = "; DDP no longer broadcasts buffers, which are rank 0's from each outer step on" if buffers else ""
        compressor, consensus = self._outer.compressor, self._outer.consensus
        assert consensus.choice is not None
        kernel = f"{consensus.choice.kernel.name} kernel" if consensus.choice.kernel != TORCH else ""
        return Summary(
            [each for each in (compressor.summary, kernel, consensus.arrangement.words) if each],
            f"{self.plan().summary()}{more}",
            ". Outer steps are done as among several, so that the run can go on with any number of them; hook=None "
            "trains without",
            consensus.choice.remarks(compressor.display_name, checked=self._request.check_every is not None),
        )

    def plan(self) -> ModelPlan:
        return session_plan(self._request.name, self._outer, self._source.sparse)

    @contextlib.contextmanager
    def residuals(self) -> Iterator[Residuals]:
        # Its residuals are of weights, and cannot be compared with gradients.
        keeps, plans = self._outer.consensus.arrangement.keeps, self.plan().parameters
        yield Residuals({}, 1.0, {plan.name for plan in plans if plan.compressed and keeps(plan.name)})

    def warnings(self) -> list[str]:
        found = list(self._still_sent)
        if self._request.check_every is not None and not self._outer.immediate:
            found.append(
                "check_every compares weights when they should be equal on all ranks: with fragments or delay that is "
                "after a save or a validation only"
            )
        return [f"hook {self._request.name}: {each}" for each in found]

    def close(self) -> None:
        self._outer.forget()
        self._optimizers.close()
        self._before_forward.remove()
        self._outer.close()

    def _module(self) -> torch.nn.Module:
        module = self._source.module
        assert module is not None  # a hook like this one is attached to models only, and ends with them
        return module


class _SavedRounds(SavedLearnedState):
    """Saves at the end of a round, with weights and optimizers that are the same on all ranks."""

    step_is = "round"

    def __init__(
        self,
        hook: str,
        outer: OuterSteps,
        group: dist.ProcessGroup,
        plans: Callable[[Compressor[Any]], list[UnitPlan]],
        driver: "weakref.ref[LocalStepsDriver]",
    ) -> None:
        super().__init__(hook, outer, group, plans)
        self._driver_or_none = driver

    def save(self, residual: str, *, limit_s: float, gather: bool = False, joint: bool = True) -> dict[str, Any]:
        together = joint and self._driver.synchronize(limit_s, optimizers=True)
        content = super().save(residual, limit_s=limit_s, gather=gather, joint=together)
        return self._driver.vouched(content, together=together)

    def prepare_load(self, content: dict[str, Any], strict: bool) -> Callable[[], None]:
        return functools.partial(self._driver.load, super().prepare_load(content, strict))

    def begin_anew(self) -> None:
        self._driver.load(super().begin_anew)

    def kept_fields(self, source: GradientSource) -> dict[str, dict[str, torch.dtype]]:
        dtypes = {name: compute_dtype(each.dtype) for name, each in source.whole.known().items()}
        return {each.key: dict(dtypes) for each in self._session.compressor.state_fields}

    @property
    def _driver(self) -> LocalStepsDriver:
        alive = self._driver_or_none()
        assert alive is not None  # it holds this
        return alive


def _after_steps(hook: "weakref.ref[LocalStepsDriver]") -> None:
    alive = hook()
    if alive is not None:
        alive.after_steps()


def _late(hook: "weakref.ref[LocalStepsDriver]") -> None:
    alive = hook()
    if alive is not None:
        alive.late()


class _BeforeForward:
    """What a module calls before a forward pass in which gradients are recorded; to be registered as a forward
    pre-hook. It holds the driver weakly. In a copy or a pickle of the module it does nothing."""

    def __init__(self, driver: LocalStepsDriver | None = None) -> None:
        self._driver = None if driver is None else weakref.ref(driver)

    @torch.compiler.disable
    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        alive = None if self._driver is None else self._driver()
        if alive is not None and torch.is_grad_enabled():
            alive.before_forward(module)

    def __reduce__(self) -> Any:
        return _BeforeForward, ()
