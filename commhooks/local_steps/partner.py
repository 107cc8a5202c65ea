"""With whom a model exchanges its weights, and when an exchange counts.

Local steps know how to train a round and how to exchange weights. They ask a `Partner` for
everything that depends on who the others are. `FixedPartner` is for ranks that are all there from
the start to the end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from commhooks.comm.nodes import Nodes
from commhooks.local_steps.schedule import Applied, Exchanged, Sent

if TYPE_CHECKING:
    from commhooks.local_steps.common_state import CommonState
    from commhooks.local_steps.outer_steps import OuterSteps


@dataclass(frozen=True, kw_only=True)
class Due:
    """What is due between two steps of the optimizers.

    Attributes:
        fragment: its number; None: all weights.
        trained: `State.trained`, the passes in which this replica has trained.
        limit_s: seconds to wait for the other replicas; None: as long as it takes."""

    fragment: int | None
    trained: int
    limit_s: float | None = None


class Partner(Protocol):
    """Says with whom the outer steps of one model run, and when they count. All ranks of the model
    must call each method at the same point of the training, and get the same answers, unless it
    says otherwise.

    Attributes:
        description: for the summary at the first pass, such as "2 nodes of 4 ranks"; "" without
            one.
        nodes: the nodes whose ranks each exchange a part of the weights, and must agree; None:
            there are none.
        first_rank_exchanges: whether rank 0 of the model's group exchanges for all ranks of this
            group, which have equal weights: the others get the result from it, and the residuals
            are those of rank 0.
        only_whole_rounds: why rounds cannot end before their last pass, as a clause for a message
            ("machines meet only at the ends of rounds"); "" if a save or `synchronize` may end a
            round early."""

    description: str
    nodes: Nodes | None
    first_rank_exchanges: bool
    only_whole_rounds: str

    @property
    def joined(self) -> bool:
        """Whether the first round may begin. While this is False, an outer step is due after the
        first step of all optimizers (their state then exists, so that it can be taken from another
        replica)."""

    @property
    def apart(self) -> float:
        """The number of replicas that train apart in the running round, 1 or more; if their parts
        in the mean differ, the number of equal replicas whose mean has as little noise."""

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        """The ranks that average their gradients with this rank in each pass; None if this rank
        trains alone."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the exchange under way, or of the next one. Only ranks that exchange may
        ask."""

    def bind(self, steps: "OuterSteps", common: "CommonState") -> None:
        """Take what outer steps work on. The driver calls this once, before it calls anything
        else. Does not communicate."""

    def looks_every(self, passes: int) -> int:
        """Return after how many of `passes`, the fewest from one exchange or commit to the next, to
        call `another_is_done`; 0: never."""

    def another_is_done(self) -> bool:
        """Return whether another replica has come to the point for which this one trains, at which
        a fragment is sent or applied; it then is the point here, too. Does not wait for other
        replicas."""

    def exchange(self, outer: "OuterSteps", due: Due) -> Sent | Exchanged:
        """Take the outer step that is due, while the training waits. The result may be that it has
        not counted, because the replicas have had nothing to exchange, and the round goes on.
        Raises HookRunError if the exchange has failed for good, or `limit_s` is over; so do the
        next two methods."""

    def send(self, outer: "OuterSteps", due: Due) -> Sent | Exchanged:
        """Begin an outer step behind the training. Some partners take it at once in some cases, as
        by `exchange`."""

    def apply(self, outer: "OuterSteps", due: Due) -> Sent | Applied:
        """End the outer step in flight. The result is that the next one is in flight already, if
        this replica is so late that the others have begun it."""

    def forget(self) -> None:
        """Drop what is in flight, because a state is loaded. Does not communicate."""

    def stats(self) -> dict[str, Any]:
        """Return what the partner adds to `CommHook.stats`. Any rank may call this."""

    def close(self) -> None:
        """End this model's part in the exchanges. Does not communicate, and may be called more
        than once."""


class FixedPartner:
    """Implements `Partner` for ranks that are all there from the start: every exchange is with all
    of them, and counts at once.

    Args:
        ranks: returns the ranks of the model, which average their weights.
        nodes: the ranks of a node average gradients, which keeps their weights equal, and each of
            them averages a part of the weights with one rank of every other node. None: all ranks
            train apart."""

    first_rank_exchanges = False
    only_whole_rounds = ""
    joined = True

    def __init__(self, ranks: Callable[[], dist.ProcessGroup], nodes: Nodes | None) -> None:
        self.nodes = nodes
        self.description = "" if nodes is None else nodes.description
        self._ranks = ranks

    @property
    def apart(self) -> float:
        return self.group.size()

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        return None if self.nodes is None else self.nodes.intra_node

    @property
    def group(self) -> dist.ProcessGroup:
        return self._ranks() if self.nodes is None else self.nodes.inter_node

    def bind(self, steps: "OuterSteps", common: "CommonState") -> None:
        pass

    def looks_every(self, passes: int) -> int:
        return 0

    def another_is_done(self) -> bool:
        return False

    def exchange(self, outer: "OuterSteps", due: Due) -> Exchanged:
        outer.exchange(due.fragment)
        return Exchanged()

    def send(self, outer: "OuterSteps", due: Due) -> Sent:
        assert due.fragment is not None
        outer.send(due.fragment)
        return Sent()

    def apply(self, outer: "OuterSteps", due: Due) -> Applied:
        outer.apply()
        return Applied()

    def forget(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass
