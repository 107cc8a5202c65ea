"""Connect the training with `schedule.py`: report events to it, and do what it decides."""

import threading
import time
from collections.abc import Callable

import torch
from torch.optim.optimizer import Optimizer

from commhooks.comm.collectives import new_future
from commhooks.comm.groups import is_logging_rank
from commhooks.comm.packing import all_finite
from commhooks.compressors.cast import AllReduce, AllReduceCompressor
from commhooks.engine.immediate import reduce_immediately
from commhooks.gradients.layout import Bucket
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.profiling import span
from commhooks.gradients.source import Future, GradientSource
from commhooks.gradients.torch_private import sparse_values
from commhooks.local_steps import schedule
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.common_weights import CommonWeights
from commhooks.local_steps.events import TrainingEvents, WeightSample
from commhooks.local_steps.notices import Notices, refuse_repeated_pass
from commhooks.local_steps.outer_step import ANCHOR
from commhooks.local_steps.outer_steps import OuterSteps
from commhooks.local_steps.partner import Due
from commhooks.local_steps.schedule import Action, Event, State


class LocalStepsDriver:
    """Drives the rounds of one model.

    Args:
        outer: runs the outer steps.

    Attributes:
        state: where this rank stands.
        still_sent: messages about what DDP still sends in every pass.
        thread: the thread in which the training runs; None before the first forward pass.
        sample: tells whether something other than the training has changed the weights.
    """

    def __init__(self, name: str, source: GradientSource, outer: OuterSteps) -> None:
        self.outer, self.counters, self.partner = outer, outer.counters, outer.partner
        self.rules, self.state = outer.rules, State(joined=self.partner.joined)
        self.still_sent = source.let_ranks_differ()
        self.thread: int | None = None
        self._name, self._source = name, source
        self.notices = Notices(name, logs=is_logging_rank(source.group, source.shard_group))
        self.sample = WeightSample(list(source.names.named_parameters().values()))
        self.events = TrainingEvents(self.module, source.stepped(), self)
        self.common = CommonState(
            source, self.events, outer.consensus.binding.loss_scale, self.counters
        )
        self.weights = CommonWeights(name, source, outer, logs=self.notices.logs)
        self.partner.bind(outer, self.common)
        self._exact = AllReduceCompressor(AllReduce())
        self._finite: list[torch.Tensor] = []

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
        # a save after the end does not wait for what was in flight
        self.state, _ = schedule.advance(self.rules, self.state, schedule.Failed())
        self.events.close()
        self.partner.close()
        self.outer.close()

    # ---- backward passes
    # ---------------------------------------------------------------------------------------------

    def run(self, bucket: Bucket) -> Future:
        """Leave the gradients as they are, or average them inside the node, or over all ranks
        before `start_iter`."""
        if bucket.is_first:
            self._begin_pass(bucket)
        flat = bucket.flat
        self.counters.bytes_uncompressed += bucket.nbytes
        if (
            self.rules.asks
            and not self.averages
            and schedule.may_end_a_turn(self.rules, self.state)
        ):
            self._finite.append(all_finite(sparse_values(flat) if flat.is_sparse else flat))
        if self.averages:
            future = reduce_immediately(self._exact, bucket, self._source.group, self.counters)
        elif (group := self.partner.averaging_group) is not None:
            future = reduce_immediately(self._exact, bucket, group, self.counters, "intra_node")
        else:
            future = new_future(flat.device)
            future.set_result(flat)
        if bucket.is_last:
            self.end_pass()
        return future

    @plain_mode()
    def _begin_pass(self, first: Bucket) -> None:
        self._check_repeated_pass()
        self.outer.consensus.reach(self._source.group, first.flat)
        self.rules = self.outer.rules  # a load, or the comparison, may have changed the start
        self.counters.begin_pass()
        self._finite.clear()
        self.on(
            schedule.PassBegins(self.counters.cumulative()["backward_passes"], self.module.training)
        )
        if not self.averages and len(self.outer.state[ANCHOR.key]) < len(
            self._source.names.named_parameters()
        ):
            self.weights.begin_first_round()

    def end_pass(self) -> None:
        """End this backward pass, after its last bucket."""
        self.on(schedule.PassEnds())

    def _check_repeated_pass(self) -> None:
        if self.state.repeats and self._source.group.size() > 1:
            refuse_repeated_pass(
                self._name,
                self.module,
                **{
                    "find_unused_parameters=True": bool(self.still_sent),
                    "ranks_per_node": self.partner.averaging_group is not None,
                    "start_iter": self.counters.cumulative()["backward_passes"]
                    < self.outer.compressor.start_step,
                },
            )

    def lr_factor(self, optimizer: Optimizer) -> float:
        """Return the factor of the learning rate of `optimizer` in its next step, and log it once
        per class."""
        if self.averages:
            return 1.0
        factor = self.outer.compressor.config.lr_factor_of(optimizer, self.partner.apart)
        if factor != 1.0:
            self.notices.rate_is_multiplied(optimizer, factor)
        return factor

    # ---- events and actions
    # ------------------------------------------------------------------------------------------

    def on(self, event: Event, limit_s: float | None = None) -> None:
        """Take an event, and do what is due now. All ranks must be at the same point of the
        training if it communicates. `limit_s`: see `Due`."""
        if isinstance(event, schedule.ForwardBegins):
            self.thread = threading.get_ident()
            self._check_repeated_pass()
        self.state, action = schedule.advance(self.rules, self.state, event)
        if (
            isinstance(event, schedule.ForwardBegins | schedule.LateBackwardEnds)
            and self.state.exchanging
        ):
            self.notices.outer_step_is_late(self.counters.backward_passes)
        if action is Action.CALL_BACK:
            self.events.call_after_backward()
        elif action is not Action.NOTHING:
            self._act(action, limit_s)
        if isinstance(event, schedule.StepEnds) and event.since >= 0:
            self.sample.keep(stepped=True)

    @plain_mode()
    def _act(self, action: Action, limit_s: float | None) -> None:
        """Do what the schedule has decided, and what follows."""
        discarded = self.outer.state.nonfinite_steps
        deadline = None if limit_s is None else time.monotonic() + limit_s
        writes = action not in (Action.ASK, Action.LOOK)
        try:
            while action is not Action.NOTHING:
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                event = self._perform(action, left_s)
                self.state, action = schedule.advance(self.rules, self.state, event)
        except BaseException:
            self.state, _ = schedule.advance(self.rules, self.state, schedule.Failed())
            raise
        if self.outer.state.nonfinite_steps > discarded:
            self.weights.go_to_anchor()  # the weights of other fragments may not be finite either
            self.events.reset_nonfinite()
            self.notices.round_is_discarded(self.counters.backward_passes)
        if writes:
            self.sample.keep(stepped=False)

    def _perform(self, action: Action, limit_s: float | None) -> Event:
        """Do one action, and return the event that says so."""
        match action:
            case Action.ASK:
                return schedule.Answered(
                    self.weights.all_will_step(torch.stack(self._finite).all())
                )
            case Action.LOOK:
                return schedule.Looked(self.partner.another_is_done())
            case Action.BEGIN:
                self.weights.begin_from_loaded()
                return schedule.Begun()
            case Action.SHARE:
                outcome = self.common.share(optimizers=False, flag=self.state.unstepped)
                return schedule.Shared(unstepped=outcome.flagged)
        with span("outer step", self._name):
            return self._outer_step(action, limit_s)

    def _outer_step(self, action: Action, limit_s: float | None) -> Event:
        """Send, apply or exchange a fragment."""
        self._source.before_weights_change()
        fragment = None if action is Action.EXCHANGE_ALL else self.state.turn
        due = Due(fragment=fragment, trained=self.state.trained, limit_s=limit_s)
        match action:
            case Action.SEND:
                return self.partner.send(self.outer, due)
            case Action.APPLY:
                return self.partner.apply(self.outer, due)
        return self.partner.exchange(self.outer, due)

    # ---- between two steps
    # -------------------------------------------------------------------------------------------

    def run_due(self, limit_s: float | None = None) -> None:
        """Run an exchange that waits for a step which this rank has skipped: the others run it. All
        ranks must call this between the same two steps, before anything else that communicates.
        Raises as `end_round`."""
        if self._source.group.size() > 1:
            self.on(schedule.BetweenSteps(self.events.all_stepped), limit_s)

    def end_round(self, limit_s: float | None = None) -> None:
        """End the round before its last pass. All ranks must call this between the same two steps.
        Raises HookRunError after `limit_s` seconds, or if the partner cannot exchange."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        self.run_due(limit_s)
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        self.on(schedule.EndRound(), left_s)

    def begin_from_load(self, take_over: Callable[[], None]) -> None:
        """Load a state by calling `take_over`, and begin a round."""
        self.run_due()
        # the exchange in flight would count as a step of the loaded state
        self.partner.forget()
        self.outer.forget(until_timeout=True)
        take_over()
        self.outer.place_state()
        self.sample.forget()
        self.on(schedule.Loaded())
