"""What a hook that averages weights warns the user of."""

from commhooks.comm.counters import Counters
from commhooks.errors import logger_of

logger = logger_of(__name__)


class RoundWarnings:
    """
    Args:
        hook: its name.
        counters: count the backward passes.
        rank: this one.
        says: this rank says what concerns all.
    """

    def __init__(self, hook: str, counters: Counters, rank: int, *, says: bool) -> None:
        self._hook, self._counters, self._rank, self._says = hook, counters, rank, says
        self._told_of_late = self._told_of_thread = False
        self._next_discarded = 1

    def late(self) -> None:
        """An outer step comes late. Said once."""
        if self._told_of_late or not self._says:
            return
        self._told_of_late = True
        logger.warning(
            "hook %s: since the %s. backward pass no optimizer of torch.optim has stepped all parameters, so this "
            "outer step comes late, before the next forward pass: so do all with an optimizer that torch does not "
            "know, and if parameters that require gradients are in no optimizer. Weights that are looked at in "
            "between are those of one rank.",
            self._hook,
            self._counters.backward_passes,
        )

    def discarded(self, number: int) -> None:
        """That many outer steps of this run were discarded. Said for the first, the tenth and so on."""
        if number < self._next_discarded or not self._says:
            return
        self._next_discarded = 10 * number
        logger.warning(
            "hook %s: the weights of at least one rank are not finite, so the round that ended after %s backward "
            "passes is discarded: all ranks go back to the weights from before it. stats()['nonfinite_steps'] "
            "counts such rounds; this is number %s in this run, and the next warning comes with number %s.",
            self._hook,
            self._counters.backward_passes,
            number,
            self._next_discarded,
        )

    def begun_anew(self, parameters: int) -> None:
        """The optimizers of this rank begin anew with so many parameters."""
        logger.warning(
            "hook %s: on rank %s the optimizers kept numbers that are not finite for %s parameters, and begin anew "
            "with these.",
            self._hook,
            self._rank,
            parameters,
        )

    def in_another_thread(self) -> None:
        """A save or `synchronize` was called beside the training. Said once."""
        if self._told_of_thread:
            return
        self._told_of_thread = True
        logger.warning(
            "hook %s: a save or synchronize() in another thread than the training's cannot end a round on rank %s, "
            "because it would change weights in the middle of a step. Call hook.synchronize(optimizers=True) between "
            "two steps, on all ranks, before the thread saves.",
            self._hook,
            self._rank,
        )

    def saved_alone(self) -> None:
        logger.warning(
            "hook %s was saved by rank %s alone, in the middle of a round: a run that resumes begins from the "
            "weights on which all ranks agreed last.",
            self._hook,
            self._rank,
        )

    def not_averaged(self, reason: str) -> None:
        """Not all ranks came to average the weights."""
        logger.warning(
            "hook %s: the weights of the ranks were not averaged after %s backward passes, because %s. What is "
            "saved or validated now are those of each rank.",
            self._hook,
            self._counters.backward_passes,
            reason,
        )
