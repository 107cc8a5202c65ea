"""Outer steps among machines that join and leave while the training runs.

All live machines meet before an outer step (`Membership.ask`), and each reports its number of committed outer steps and
a digest of its anchor. The machines with the latest anchor exchange their differences. The others copy the state of one
of them, and train the next round with them.

An outer step is committed on all machines or on none:

1. All buffers are exchanged, and nothing is written.
2. All machines confirm, in one small collective, that everything has arrived. It ends only if all have begun it.
3. A machine whose confirmation ends writes the new anchor.

If the exchange or the confirmation fails, because a machine has died, nothing is lost. The machines meet again at once,
and each reports whether everything had arrived there. If it has arrived on all of them, they write the new anchor: a
machine that is no longer here may have done so, and will have the same one. If something is missing on one of them, no
machine can have confirmed, so the remaining machines exchange the same differences again.

In a sharded model each rank exchanges its shard with the ranks that hold the same shard, in a group per shard, and
confirms in this group. The ranks of a machine agree before they confirm and again before they write
(`Membership.on_all_ranks`), so that a machine still acts as one:

- A rank begins its confirmation only after all ranks of its machine have reported that everything has arrived. So if
  the confirmation of any shard ends on any machine, everything has arrived on all ranks of all machines.
- If something is missing on one rank, no rank of its machine confirms. So no confirmation of any shard ends anywhere,
  and no machine writes before all meet again.
- A machine writes only if all of its confirmations have ended. If some have failed, all of its ranks keep what has
  arrived, and the machine reports it as complete: another machine may have written.
- A machine of which a rank has died does not act any more, because its other ranks wait for that rank in every
  agreement, until their process group reports an error.

All other decisions follow from the list of machines, which one rank of the machine receives for all.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm import collectives
from commhooks.comm.membership import Machine, Membership
from commhooks.comm.nodes import Nodes
from commhooks.errors import AttachError, HookConfigError, HookRunError, log_summary, logger_of
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.exchange import OuterExchange
from commhooks.local_steps.flat_weights import set_weights
from commhooks.local_steps.fragments import FragmentSession
from commhooks.local_steps.outer_step import ANCHOR, MOMENTUM

logger = logger_of(__name__)

_MOST_FAILURES = 5
_MOST_SAME_NAMES = 10
_LINE_EVERY_S = 10.0


class MemberSteps:
    """Implements `Partner` for machines that come and go. The ranks of a machine average gradients.

    Attributes:
        joined: whether this machine has met the others.
        registered: further state for a machine that joins: name -> functions that return and set it.
    """

    description = "among machines that come and go"
    nodes: Nodes | None = None
    first_rank_exchanges = True
    only_whole_rounds = "machines meet only at the ends of rounds"
    _outer: FragmentSession
    _common: CommonState

    def __init__(self, membership: Membership, source: GradientSource, signature: Mapping[str, Any]) -> None:
        self.membership, self.joined = membership, False
        self.registered: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._source = source
        self._signature = dict(signature)
        self._failures = 0
        self._left = False

    @property
    def has_met(self) -> bool:
        return self.joined

    @property
    def apart(self) -> int:
        return max(1, len(self.membership.machines))

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        return self._source.group if self._source.group.size() > 1 else None

    @property
    def group(self) -> dist.ProcessGroup:
        assert self.membership.group is not None  # connected for this outer step
        return self.membership.group

    def bind(self, steps: FragmentSession, common: CommonState) -> None:
        self._outer, self._common = steps, common

    def end_round(self, exchange: Callable[[], None], *, trained: bool, limit_s: float | None) -> bool:
        return self.run(trained, limit_s)

    def stats(self) -> dict[str, Any]:
        return {"members": max(1, len(self.membership.machines))}

    def close(self) -> None:
        self.membership.close()

    # ---- an outer step -----------------------------------------------------------------------------------------------

    def run(self, trained: bool, limit_s: float | None = None) -> bool:
        """Meet the other machines, and take an outer step with them or the state of one of them. All ranks of the
        machine must call this between the same two steps. Returns whether a new round begins; False if all machines
        have only begun: they go on with the round, and so do those of them that take the state of another one.
        `trained`: whether this machine has trained the current round, and not only begun. `limit_s`: how long to wait
        for the other machines.

        Raises:
            AttachError: before the first outer step, if this machine does not match the others.
            HookRunError: the exchange fails again and again, or `limit_s` is over.
        """
        if self._left:
            raise HookRunError("members: this machine has left the training (members.leave)")
        changed, failures, held = False, 0, None
        attempt: str | None = None
        while True:
            machines = self._meet(trained, attempt, held is not None, limit_s)
            if any(each.record["attempt"] is not None for each in machines):
                if held is not None and all(
                    each.record["complete"] for each in machines if each.record["attempt"] == attempt
                ):
                    self._outer.commit_held(held)
                    trained, changed = False, True
                held = attempt = None
                continue  # the number of steps may have changed, here or elsewhere
            latest = _with_latest(machines)
            here = next((place for place, each in enumerate(latest) if each.id == self.membership.id), None)
            steps = latest[0].step + any(each.record["trained"] for each in latest)
            behind = [each for each in machines if each not in latest]
            if here is None:
                own = [each.id for each in behind].index(self.membership.id)
                if self._take(latest[own % len(latest)], steps):
                    begins = self.joined or steps > latest[0].step
                    self._begin_round(machines)
                    return begins
                continue
            serves = [each.name for place, each in enumerate(behind) if place % len(latest) == here]
            if steps == latest[0].step:  # nobody has trained
                self._serve(steps, serves)
                self._begin_round(machines)
                return changed
            attempt = _name_of(latest)
            held, failure = self._exchange(latest, here)
            if not failure:
                assert held is not None
                self._outer.commit_held(held)
                self._serve(steps, serves)
                self._begin_round(machines)
                return True
            failures += 1
            self._failures += 1
            if self.membership.logs:
                logger.warning("members: an outer step among %s failed, and is repeated: %s", _names(latest), failure)
            if failures >= _MOST_FAILURES:
                raise HookRunError(f"members: the outer step failed {failures} times in turn: {failure}")

    def leave(self) -> None:
        """End this machine's part in the training; `run` then raises HookRunError."""
        self._left = True
        self.membership.close()

    def _begin_round(self, machines: Sequence[Machine]) -> None:
        self.joined, self.membership.machines = True, list(machines)

    def _meet(self, trained: bool, attempt: str | None, complete: bool, limit_s: float | None) -> list[Machine]:
        """Return the machines that match this one, once there are enough of them."""
        said, attempts = 0.0, 0
        while True:
            state = self._outer.state
            anchors = [*state[ANCHOR.key].values(), *state[MOMENTUM.key].values()]
            machines = self.membership.ask(
                state.step,
                limit_s,
                digest=self.membership.key_of_shards(self._common.digest(anchors)),
                trained=trained,
                attempt=attempt,
                complete=complete,
                failures=self._failures,
                joined=self.joined,
                signature=self._signature,
            )
            fitting, attempts = self._fitting(machines, attempts), attempts + 1
            least = self.membership.options.min_machines
            if fitting is not None and len(fitting) >= least:
                return fitting
            if fitting is not None and self.membership.logs and time.monotonic() - said > _LINE_EVERY_S:
                said = time.monotonic()
                logger.warning(
                    "members: there are %s machines, and an outer step needs min_machines=%s: waiting for more",
                    len(fitting),
                    least,
                )
            time.sleep(1.0)

    def _fitting(self, machines: Sequence[Machine], attempts: int) -> list[Machine] | None:
        """Return the machines with this machine's signature; None: ask again. Raises AttachError if this machine is new
        and does not match."""
        own = next(each for each in machines if each.id == self.membership.id)
        if not self.joined:
            # Machines that have begun stay. Of machines that begin together, the first stays.
            elders = [m for m in machines if m.record["joined"] or m.id < own.id]
            for each in elders:
                for what, mine in self._signature.items():
                    if (theirs := each.record["signature"].get(what)) != mine:
                        raise AttachError(
                            f"members: machine {own.name} has another {what} than machine {each.name} "
                            f"({mine} and {theirs}): start it as the others"
                        )
                if each.name == own.name:
                    # It may be this machine before a restart: then the lighthouse will soon take it for dead.
                    if attempts > _MOST_SAME_NAMES:  # not the time, so that all ranks of the machine decide alike
                        raise AttachError(
                            f"members: two machines have the name {own.name}: give each a name of its own "
                            "(commhooks.Torchft(name=...))"
                        )
                    return None
        known = {each.name for each in machines if each.record["joined"]}  # a newcomer of the same name is refused
        return [
            each
            for each in machines
            if each.record["signature"] == self._signature and (each.record["joined"] or each.name not in known)
        ]

    def _exchange(self, machines: Sequence[Machine], here: int) -> tuple[OuterExchange | None, str]:
        """Exchange the differences with `machines`. Returns what has arrived, if everything has, and a text about what
        failed. It is a text, because an exception would keep the connections open, and the other machines wait until
        they are closed."""
        held: OuterExchange | None = None
        failure = ""
        count = sum(each.record["trained"] for each in machines)
        weight = len(machines) / count if machines[here].record["trained"] else 0.0
        try:  # an error may occur on one rank of the machine only: no collective inside the machine before they agree
            self.membership.connect(machines)
            held = self._outer.held_exchange(weight, exchanges=self.membership.exchanges)
            held.begin()
            held.finite()
            if self.membership.exchanges:
                self._common.share(optimizers=False, group=self.membership.group)
        except _ERRORS as error:
            failure = _not_ours(error)
        if not self.membership.on_all_ranks(not failure):
            held, failure = None, failure or "another rank of this machine has failed"
        else:
            try:
                if self.membership.exchanges:
                    self.membership.confirm()
            except _ERRORS as error:
                failure = _not_ours(error)
            if not self.membership.on_all_ranks(not failure):
                failure = failure or "another rank of this machine has failed"
        if failure:
            self.membership.disconnect()
        return held, failure

    # ---- machines that are behind ------------------------------------------------------------------------------------

    def _serve(self, step: int, names: Sequence[str]) -> None:
        """Serve the state of this machine for the machines `names`, while the training goes on."""
        if not names or not self.membership.exchanges:
            return
        state = self._outer.state
        more = {
            "anchor": dict(state[ANCHOR.key]),
            "momentum": dict(state[MOMENTUM.key]),
            "counts": [state.step, state.nonfinite_steps],
            **{f"registered {name}": get() for name, (get, _) in self.registered.items()},
        }
        assert self.membership.server is not None
        self.membership.server.serve(step, *self._common.described(more))
        if self.membership.logs:
            log_summary(f"members: {', '.join(names)} takes the state of outer step {step} from this machine")

    def _take(self, source: Machine, step: int) -> bool:
        """Take the state of `source` after outer step `step`. Returns False if it cannot be had."""
        form, failure = b"", None
        arrived: Mapping[int, torch.Tensor] = {}
        if self.membership.exchanges:
            try:
                form, read = self.membership.fetch(source, step)
                arrived = self._common.read(form, read)
            except (OSError, HTTPException) as error:
                failure = error
        if not self.membership.on_all_ranks(failure is None):
            if self.membership.logs:
                logger.warning("members: the state of machine %s cannot be had: %s", source.name, failure)
            return False
        form, arrived = self._common.spread(form, arrived)
        state, counts = self._outer.state, [0, 0]
        own: dict[str, tuple[Any, Callable[[Any], None]]] = {
            "anchor": ({}, lambda value: _replace(state[ANCHOR.key], value)),
            "momentum": ({}, lambda value: _replace(state[MOMENTUM.key], value)),
            "counts": (counts, lambda value: None),
            **{f"registered {name}": (get(), set_value) for name, (get, set_value) in self.registered.items()},
        }
        self._source.before_weights_change()
        with self._outer.held.settled():
            differing = self._common.take(form, arrived, own)
            state.step, state.nonfinite_steps = counts
            state.drop_local()
        self._outer.place_state()
        set_weights(self._source.names.named_parameters(), state[ANCHOR.key])
        if self.membership.logs:
            log_summary(f"members: {self.membership.name} goes on from outer step {step} of {source.name}")
            if differing:
                logger.warning("members: %s keeps its own: %s", self.membership.name, ", ".join(differing))
        return True


_ERRORS = (RuntimeError, ValueError, OSError)
"""Raised when a connection is lost. torch 2.13 raises ValueError if it cannot name the group of a failed collective,
because torch.distributed does not know it."""


def _not_ours(error: Exception) -> str:
    """Return the text of `error`, or raise it if another attempt would not help."""
    if isinstance(error, (torch.OutOfMemoryError, HookConfigError)):
        raise error
    return str(error) or type(error).__name__


def _with_latest(machines: Sequence[Machine]) -> list[Machine]:
    """Return the machines with the largest number of steps and the same anchor as the first of them."""
    most = max(each.step for each in machines)
    first = next(each for each in machines if each.step == most)
    return [each for each in machines if (each.step, each.record["digest"]) == (most, first.record["digest"])]


def _replace(kept: dict[str, torch.Tensor], value: dict[str, torch.Tensor]) -> None:
    kept.clear()
    kept.update(value)


def _names(machines: Sequence[Machine]) -> str:
    return ", ".join(each.name for each in machines)


def _name_of(machines: Sequence[Machine]) -> str:
    """Return a name for this attempt, equal on all machines."""
    return str(collectives.agreement_key([(each.id, each.step, each.record["failures"]) for each in machines]))
