"""Count backward passes and decide when the ranks exchange weights.

A round has `sync_every` backward passes; the passes of one step with a closure (LBFGS) count once. After the last pass
of a round, or the pass at which a fragment is applied (`fragments.py`), an outer step is due. It runs at the first of
these events: the optimizers have stepped all parameters; the next forward pass begins; the next backward pass ends (for
models whose own forward is not called). It also runs before anything that needs equal weights on all ranks: a joint
save, and `CommHook.synchronize`.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from commhooks.comm.collectives import gather_rows, good_on_all, new_future
from commhooks.comm.groups import is_logging_rank
from commhooks.comm.joint_save import JointSave
from commhooks.comm.wire import all_finite
from commhooks.compressors.cast import AllReduce, AllReduceCompressor
from commhooks.engine.immediate import reduce_immediately
from commhooks.errors import HookRunError, log_summary, logger_of
from commhooks.gradients.layout import Bucket, to_logical
from commhooks.gradients.loss_scale import LossScale
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.source import Future, GradientSource
from commhooks.gradients.torch_private import run_after_backward, sparse_values
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.flat_weights import set_weights
from commhooks.local_steps.fragments import FragmentSession
from commhooks.local_steps.optimizers import OptimizerSteps
from commhooks.local_steps.outer_step import ANCHOR

logger = logger_of(__name__)


class LocalStepsDriver:
    """Drives the rounds of one model. Its counts are the same on all ranks.

    Args:
        outer: runs the outer steps.
        loss_scale: as passed to `attach`. With a GradScaler a rank may skip a step, and would come late to the outer
            step. So in each pass before an outer step the ranks agree whether any of them will skip; if so, the round
            continues.

    Attributes:
        in_round: number of passes in the running round.
        diverged: whether the ranks have trained since they had equal weights.
        still_sent: messages about what DDP still sends in every pass.
    """

    def __init__(
        self,
        name: str,
        source: GradientSource,
        outer: FragmentSession,
        loss_scale: Callable[[], LossScale] | None,
    ) -> None:
        self.outer = outer
        self.counters = outer.counters
        self.in_round = 0
        self.diverged = False
        self.still_sent = source.let_ranks_differ()
        self._name, self._source = name, source
        self._logs = is_logging_rank(source.group, source.shard_group)
        self._scaled = loss_scale is not None
        self._exact = AllReduceCompressor(AllReduce())
        self._passes = 0  # in this run
        self._shared_at = {False: 0, True: 0}  # passes at which `CommonState.share` ran: without, with optimizers
        self._due = False  # an outer step waits for the optimizers
        self._loaded = False  # the model may have other weights than the anchor of the loaded state
        self._trained_in_mode = True  # `Module.training` in the latest pass
        self._finite: list[torch.Tensor] = []
        self._differences: list[str] = []  # what differed between the ranks at the latest joint save
        self._thread: int | None = None  # the thread in which the training runs
        self._logged: set[str] = set()
        self._optimizers = OptimizerSteps(
            source.stepped(), weakref.WeakMethod(self._after_steps), weakref.WeakMethod(self._lr_factor)
        )
        self._common = CommonState(name, source, self._optimizers, loss_scale, self.counters, logs=self._logs)
        self.partner = outer.partner
        self.partner.bind(outer, self._common)
        # Run before torch's own hooks, because the hook of fully_shard gathers the weights.
        self._before_forward = self.module.register_forward_pre_hook(_BeforeForward(self), prepend=True)

    @property
    def module(self) -> torch.nn.Module:
        module = self._source.module
        assert module is not None  # the model holds this hook
        return module

    @property
    def averages(self) -> bool:
        """Whether the running pass is one of the first `start_iter`, which average gradients."""
        return self.counters.cumulative()["backward_passes"] <= self.outer.compressor.start_step

    def close(self) -> None:
        self.outer.forget()
        self._optimizers.close()
        self._before_forward.remove()
        self.partner.close()
        self.outer.close()

    # ---- backward passes ---------------------------------------------------------------------------------------------

    def run(self, bucket: Bucket) -> Future:
        """Leave the gradients as they are, or average them inside the node, or over all ranks before `start_iter`."""
        if bucket.is_first:
            self._begin_pass(bucket)
        flat, group = bucket.flat, self._source.group
        self.counters.bytes_uncompressed += bucket.nbytes
        if self._scaled and not self.averages and self._is_due():
            self._finite.append(all_finite(sparse_values(flat) if flat.is_sparse else flat))
        if self.averages:
            future = reduce_immediately(self._exact, bucket, group, self.counters)
        elif (own := self.partner.averaging_group) is not None:
            future = reduce_immediately(self._exact, bucket, own, self.counters, "intra_node")
        else:
            future = new_future(flat.device)
            future.set_result(flat)
        if bucket.is_last:
            self.end_pass()
        return future

    @plain_mode()
    def _begin_pass(self, first: Bucket) -> None:
        self._refuse_repeated_pass()
        self.outer.consensus.reach(self._source.group, first.flat)
        self.counters.begin_pass()
        if not self._optimizers.repeats:
            self._passes += 1
        self._trained_in_mode = self.module.training
        self._finite.clear()
        anchor, known = self.outer.state[ANCHOR.key], self._source.names.named_parameters()
        if not self.averages and len(anchor) < len(known):
            # The run starts, or a distributed checkpoint was loaded, which does not distinguish zeros from no entry.
            missing = {n: p for n, p in known.items() if n not in anchor}
            self._common.equalize(missing)
            self.outer.set_anchor(missing)

    def _refuse_repeated_pass(self) -> None:
        """Raise HookRunError before a repeated pass of a step if passes communicate, because LBFGS may call its closure
        a different number of times on each rank."""
        if not self._optimizers.repeats or self._source.group.size() == 1:
            return
        starting = self.counters.cumulative()["backward_passes"] < self.outer.compressor.start_step
        batch_norms = (each for each in self.module.modules() if isinstance(each, torch.nn.SyncBatchNorm))
        for what, communicates in {
            "find_unused_parameters=True": bool(self.still_sent),
            "ranks_per_node": self.partner.averaging_group is not None,
            "start_iter": starting,
            "SyncBatchNorm": any(each.training for each in batch_norms),
        }.items():
            if communicates:
                raise HookRunError(
                    f"hook {self._name!r}: an optimizer calls its closure again within one step, as LBFGS does, and "
                    f"each rank may call it a different number of times. That cannot be combined with {what}, which "
                    "communicates in every backward pass: leave it out"
                )

    def end_pass(self) -> None:
        """Count this backward pass, after its last bucket."""
        repeated = self._optimizers.on_pass_end()
        if (self._due or self._loaded) and not repeated and not self._optimizers.stepping:
            run_after_backward(self._late)
        else:
            self._count(repeated)

    def _late(self) -> None:
        with plain_mode():
            self._catch_up()
        self._count(repeated=False)

    def _count(self, repeated: bool) -> None:
        if self.averages:
            return
        self.diverged = True
        if repeated:
            return
        if self._is_due() and self._all_step():
            self._due = True
            self._optimizers.expect()
        self.in_round += 1

    def _is_due(self) -> bool:
        return not self.partner.has_met or self.outer.due(self.in_round + 1)

    def _all_step(self) -> bool:
        """Return whether no rank will skip the step of this pass; the same on all ranks. Also True if the weights of a
        rank are not finite, because its gradients will never be finite again."""
        if not self._scaled:
            return True
        good = self._on_all_shards(torch.stack(self._finite).all())
        lost = not good and not self._on_all_shards(
            torch.stack([all_finite(each) for each in self._source.names.named_parameters().values()]).all()
        )
        rows = self._rows(good, lost, what="whether all gradients are finite")
        return bool(rows[:, 0].all() or rows[:, 1].any())

    # ---- optimizers --------------------------------------------------------------------------------------------------

    def _lr_factor(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the factor of the learning rate of `optimizer` in its next step, and log it once per class."""
        if self.averages:
            return 1.0
        factor = self.outer.compressor.config.lr_factor_of(optimizer, self.partner.apart)
        if factor != 1.0 and self._logs and (name := type(optimizer).__name__) not in self._logged:
            self._logged.add(name)
            log_summary(f"{self._name} multiplies the learning rate of {name} by {factor:.3g} in each step (lr_factor)")
        return factor

    # ---- outer steps -------------------------------------------------------------------------------------------------

    def _after_steps(self) -> None:
        if self._due:
            self._outer_step()

    @plain_mode()
    def before_forward(self, module: torch.nn.Module) -> None:
        self._thread = threading.get_ident()
        self._refuse_repeated_pass()
        # A forward pass in the other mode may run on rank 0 alone. A model may be trained in evaluation mode.
        if module.training == self._trained_in_mode and not self._optimizers.stepping:
            self._catch_up()

    def _catch_up(self) -> None:
        if self._loaded:
            self._loaded = False
            self._begin_from_loaded()
        if self._due:
            self._warn_once(
                "no torch.optim optimizer has stepped all parameters since backward pass %s, so this outer step comes "
                "late, with the next forward or backward pass. Until then each rank has its own weights. Reasons: an "
                "optimizer that is not a torch.optim.Optimizer, several optimizers that take turns, or parameters in "
                "no optimizer.",
                self.counters.backward_passes,
            )
            self._outer_step()

    @plain_mode()
    def _outer_step(self, *, early: bool = False, limit_s: float | None = None) -> None:
        """Run the outer step that is due, or with `early` end the round before its last pass. All ranks must call this
        between the same two steps. `limit_s`: see `Partner.end_round`."""
        self._due = False
        self._optimizers.forget()
        self._source.before_weights_change()
        state = self.outer.state
        discarded = state.nonfinite_steps
        exchange = self.outer.end_round if early else functools.partial(self.outer.advance, self.in_round)
        ended = self.partner.end_round(exchange, trained=self.partner.has_met, limit_s=limit_s)
        if ended:
            self.in_round, self.diverged = 0, not (early or self.outer.immediate)
            self._common.share(optimizers=False)
            self._shared_at[False] = self._passes
        if state.nonfinite_steps > discarded:
            self._go_to_anchor()  # the weights of other fragments may not be finite either
            self._optimizers.reset_nonfinite()
            self._warn_once(
                "the weights of at least one rank are not finite, so the round that ended after %s backward passes is "
                "discarded: all ranks go back to the weights from before it, and optimizers reset state that is not "
                "finite. stats()['nonfinite_steps'] counts such rounds.",
                self.counters.backward_passes,
            )

    def end_round(self, limit_s: float) -> None:
        """End the round that is under way before its last pass, between two steps. Raises HookRunError after `limit_s`
        seconds, or if the partner cannot exchange."""
        self._outer_step(limit_s=limit_s)

    def _go_to_anchor(self) -> None:
        self._source.before_weights_change()
        set_weights(self._source.names.named_parameters(), self.outer.state[ANCHOR.key])

    def load(self, take_over: Callable[[], None]) -> None:
        """Load a state by calling `take_over`, and begin a round."""
        self.outer.forget(until_timeout=True)  # the exchange in flight would count as a step of the loaded state
        take_over()
        self.outer.place_state()
        self.in_round, self._due, self.diverged = 0, False, False
        self._shared_at = {False: self._passes, True: self._passes}
        self._loaded = True
        self._optimizers.forget()

    def _begin_from_loaded(self) -> None:
        """Choose the weights to begin from if the model's weights differ from the loaded anchor: the model's weights if
        they are equal on all ranks, else the anchor."""
        anchor, known = self.outer.state[ANCHOR.key], self._source.names.named_parameters()
        self._source.before_weights_change()
        same = all(torch.equal(p.detach(), to_logical(anchor[n], p).to(p)) for n, p in known.items() if n in anchor)
        if not self._on_some_rank(not same):
            return
        common = not self._on_some_rank(bool(self._common.differing_weights()))
        if common:
            self.outer.set_anchor(known)
        else:
            self._go_to_anchor()
        if self._logs:
            logger.warning(
                "hook %s: the weights of the model differ from the common weights that were saved with the hook. "
                "The training goes on from %s.",
                self._name,
                "the weights of the model" if common else "the common weights, because the ranks have different models",
            )

    # ---- saves and validations ---------------------------------------------------------------------------------------

    def synchronize(self, saver: JointSave | None, limit_s: float, *, optimizers: bool) -> bool:
        """Give all ranks equal weights and buffers; see `CommHook.synchronize`. `saver` is None before the first
        backward pass."""
        self._differences = []
        trained = self.diverged or self._passes > self._shared_at[optimizers]
        if not trained and not (optimizers and self.outer.has_run):
            return True
        if self._thread not in (None, threading.get_ident()):
            if trained:
                self._warn_once(
                    "a save or synchronize() outside of the training thread cannot end a round, because it would "
                    "change weights in the middle of a step. Call hook.synchronize(optimizers=True) between two steps, "
                    "on all ranks, before the thread saves.",
                    on_every_rank=True,
                )
            return not trained
        share = functools.partial(self._share, optimizers)
        with plain_mode():  # frameworks validate in inference mode
            if saver is None or self._source.group.size() == 1:
                share()
                return True
            rounds = self.outer.state.step + self.outer.state.nonfinite_steps
            failure = saver.run(-1 - rounds, lambda _: share(), limit_s, passes=self._passes, own_group=True)
        if failure is not None and failure.logged_here:
            logger.warning(
                "hook %s: the weights of the ranks were not averaged after %s backward passes, because %s. A save or "
                "validation now has the weights of a single rank.",
                self._name,
                self.counters.backward_passes,
                failure.reason,
            )
        return failure is None

    def _share(self, optimizers: bool) -> None:
        if self.diverged and not self.partner.only_whole_rounds:
            self._outer_step(early=True)
        self._differences = self._common.share(optimizers=optimizers)
        self._shared_at[False] = self._passes
        if optimizers:
            self._shared_at[True] = self._passes
            if differing := self._common.differing_weights():
                more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
                self._differences.insert(0, f"the weights ({differing[0]}{more})")

    def is_exact(self, *, together: bool) -> bool:
        """Return whether a run that resumes from the state saved now continues exactly as this run. Warn if not.
        `together`: whether `synchronize` succeeded before the save."""
        if self.partner.only_whole_rounds and self.diverged:
            self._warn_once(
                "this save in the middle of a round is marked inexact, because %s. A run that resumes from it begins a "
                "round with the saved weights.",
                self.partner.only_whole_rounds,
            )
            return False
        if not together and (self.diverged or self._passes > self._shared_at[True]):
            if self.diverged:
                logger.warning(
                    "hook %s was saved by rank %s alone, in the middle of a round, and is marked inexact. A run that "
                    "resumes begins from the saved weights if every rank loads the same ones, else from the weights at "
                    "the start of the round.",
                    self._name,
                    self._source.group.rank(),
                )
            return False
        if self._differences and self._logs:
            logger.warning(
                "hook %s: the saved state is marked inexact, because the ranks differ in %s. Code beside the training "
                "has changed them: for example, a callback has put an average of the weights into the model, or an "
                "optimizer is in evaluation mode. Save when the model has the weights that are trained.",
                self._name,
                ", ".join(self._differences),
            )
        return not self._differences

    # ---- agreement ---------------------------------------------------------------------------------------------------

    def _rows(self, *own: bool, what: str) -> torch.Tensor:
        row = torch.tensor(own, device=self._source.device, dtype=torch.int64)
        return gather_rows(row, self._source.group, self.counters, what)

    def _on_some_rank(self, own: bool) -> bool:
        return not self._on_all_shards(~self._rows(own, what="whether the weights are those of the anchor").any())

    def _on_all_shards(self, good: torch.Tensor) -> bool:
        shards = self._source.shard_group
        return bool(good if shards is None else good_on_all(good, shards, "all shards"))

    def _warn_once(self, text: str, *arguments: Any, on_every_rank: bool = False) -> None:
        if (self._logs or on_every_rank) and text not in self._logged:
            self._logged.add(text)
            logger.warning("hook %s: " + text, self._name, *arguments)


class _BeforeForward:
    """Calls the driver before forward passes that record gradients. References the driver weakly, and does nothing in a
    copy or pickle of the module."""

    def __init__(self, driver: LocalStepsDriver | None = None) -> None:
        self._driver = None if driver is None else weakref.ref(driver)

    @torch.compiler.disable
    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        alive = None if self._driver is None else self._driver()
        if alive is not None and torch.is_grad_enabled():
            alive.before_forward(module)

    def __reduce__(self) -> Any:
        return _BeforeForward, ()
