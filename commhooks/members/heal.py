"""Healing: a machine that is behind takes the state of another one, which serves it."""

import functools
from collections.abc import Mapping

import torch

from commhooks.errors import log_summary
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.common_state import CommonState, Part
from commhooks.local_steps.flat_weights import set_weights
from commhooks.local_steps.outer_step import ANCHOR, MOMENTUM
from commhooks.local_steps.outer_steps import OuterSteps
from commhooks.members.catch_up import CatchUp
from commhooks.members.client import NETWORK_ERRORS, NoState
from commhooks.members.registered import Registered
from commhooks.members.report import Decision, Report
from commhooks.members.this_machine import ThisMachine


class Healing:
    """Serves this machine's state, and takes that of others.

    Attributes:
        registered: further state for a machine that comes.
        failed: how often in turn the state of another machine was unavailable.
        reads: the id of the machine whose state this one has taken; "" if it needs none.
    """

    _outer: OuterSteps
    _common: CommonState

    def __init__(self, machine: ThisMachine, source: GradientSource) -> None:
        self.registered = Registered()
        self.failed = 0
        self.reads = ""
        self._machine = machine
        self._source = source
        self._name = machine.id.rpartition(":")[0]
        self._ranks = machine.ranks
        self._connections = machine.connections
        self._lines = machine.lines

    def bind(self, steps: OuterSteps, common: CommonState) -> None:
        self._outer = steps
        self._common = common
        self.registered.bind(common)

    def serve(self, decision: Decision) -> None:
        """Serve the state of this machine for the machines that heal from it, while the training
        goes on.
        """
        server, history, own_id = self._machine.server, self._machine.history, self._machine.id
        kept = history.is_kept
        readers = [machine for machine in decision.heals if not (kept and machine.reads == own_id)]
        if not readers or server is None:
            return
        # A machine that reads needs the present copy, and others can catch up from it, too.
        if kept and server.serve_also(decision.step, [machine.id for machine in readers]):
            return
        state = self._outer.state
        more = {
            "anchor": dict(state[ANCHOR.key]),
            "momentum": dict(state[MOMENTUM.key]),
            "counts": [state.step, state.nonfinite_steps],
            **{label: value for label, (value, _) in self.registered.parts().items()},
        }
        form, tensors = self._common.described(more)
        history.begin(sum(tensor.nbytes for tensor in tensors))
        server.serve(decision.step, form, tensors, [machine.id for machine in readers])
        if self._ranks.is_first:
            names = ", ".join(machine.name for machine in readers)
            log_summary(
                f"members: this machine gives the state of outer step {decision.step} to {names}"
            )

    def heal(self, decision: Decision, limit_s: float) -> bool:
        """Take the state of `decision.source` after outer step `decision.step`, while the others go
        on without this machine, and the outer steps that it has taken since; or the few outer steps
        that are missing, for which the others wait. Return whether they were available.
        """
        source = decision.source
        assert source is not None
        self._machine.history.end()
        reads_on = self.reads == source.id
        if self._machine.lighthouse is not None and not reads_on:
            self._machine.lighthouse.step_aside()
        if not reads_on and not self._take_state_of(source, decision.step, limit_s):
            return False
        first = self._outer.state.step
        caught_up = CatchUp(self._machine, self._source, self._outer).run(source, limit_s)
        self.reads = source.id if caught_up else ""
        if caught_up and not reads_on and self._ranks.is_first:
            last = self._outer.state.step
            more = f", and has read the last {last - first} of them later" if last > first else ""
            log_summary(
                f"members: {self._name} goes on from outer step {last} of {source.name}{more}"
            )
        return caught_up

    def _take_state_of(self, source: Report, step: int, limit_s: float) -> bool:
        server, form, failure = source.servers[self._ranks.shard], b"", ""
        arrived: Mapping[int, torch.Tensor] = {}
        if self._ranks.exchanges:
            try:
                if not self._connections.all_answer([source]):
                    raise OSError(self._connections.silence_of(source))
                moved_on = functools.partial(self._connections.has_moved_on, source)
                form, read_tensor = self._machine.client.fetch(
                    server, step, limit_s, lambda: not moved_on()
                )
                arrived = self._common.read(form, read_tensor)
            except NETWORK_ERRORS as error:
                failure = str(error) or type(error).__name__
                # its exchange has failed, and is repeated
                self.failed += not isinstance(error, NoState)
            else:
                self._machine.client.has_read(server, step, self._machine.id)
        if not self._ranks.all_agree(not failure):
            self._lines.say(
                "the state of machine %s at %s is unavailable: %s",
                source.name,
                server,
                failure,
                about=server,
            )
            return False
        self.failed = 0
        differing = self._take(*self._common.spread(form, arrived))
        if differing:
            self._lines.say("%s keeps its own: %s", self._name, ", ".join(differing))
        return True

    @torch.no_grad()
    def _take(self, form: bytes, arrived: Mapping[int, torch.Tensor]) -> list[str]:
        """Set all state of this rank from another machine's. Return the labels of the parts that
        only one has.
        """
        state, counts = self._outer.state, [0, 0]
        parts: dict[str, Part] = {
            "anchor": ({}, lambda value: _replace(state[ANCHOR.key], value)),
            "momentum": ({}, lambda value: _replace(state[MOMENTUM.key], value)),
            "counts": (counts, lambda value: None),
            **self.registered.parts(),
        }
        self._source.before_weights_change()
        with self._outer.held.settled():
            differing = self._common.take(form, arrived, parts)
            state.step, state.nonfinite_steps = counts
            state.drop_local()
        self._outer.place_state()
        set_weights(self._source.names.named_parameters(), state[ANCHOR.key])
        return differing


def _replace(kept: dict[str, torch.Tensor], value: dict[str, torch.Tensor]) -> None:
    kept.clear()
    kept.update(value)
