"""What a hook that averages weights warns the user of."""

from collections.abc import Sequence

from commhooks.comm.counters import Counters
from commhooks.errors import logger_of

logger = logger_of(__name__)


class RoundWarnings:
    """
    Args:
        hook: its name.
        counters: count the backward passes.
        rank: this one.
        logs: this rank logs what concerns all.
    """

    def __init__(self, hook: str, counters: Counters, rank: int, *, logs: bool) -> None:
        self._hook, self._counters, self._rank, self._logs = hook, counters, rank, logs
        self._late_logged = self._thread_logged = False
        self._next_discarded = 1

    def late(self) -> None:
        """An outer step comes late. Logged once."""
        if self._late_logged or not self._logs:
            return
        self._late_logged = True
        logger.warning(
            "hook %s: since the %s. backward pass no optimizer of torch.optim has stepped all parameters, so this "
            "outer step comes late, with the next forward or backward pass. That happens with optimizers that torch "
            "does not know, with several that take turns, and with parameters that are in no optimizer. In between "
            "each rank has weights of its own.",
            self._hook,
            self._counters.backward_passes,
        )

    def discarded(self, number: int) -> None:
        """That many outer steps of this run were discarded. Logged for the first, the tenth and so on."""
        if number < self._next_discarded or not self._logs:
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
        """A save or `synchronize` was called beside the training. Logged once."""
        if self._thread_logged:
            return
        self._thread_logged = True
        logger.warning(
            "hook %s: a save or synchronize() in another thread than the training's cannot end a round on rank %s, "
            "because it would change weights in the middle of a step. Call hook.synchronize(optimizers=True) between "
            "two steps, on all ranks, before the thread saves.",
            self._hook,
            self._rank,
        )

    def saved_alone(self) -> None:
        logger.warning(
            "hook %s was saved by rank %s alone, in the middle of a round, and is marked inexact. A run that resumes "
            "begins from the saved weights if every rank loads the same ones, else from those at the start of the "
            "round.",
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

    def inexact(self, differences: Sequence[str]) -> None:
        """The ranks differ at a joint save."""
        if self._logs:
            logger.warning(
                "hook %s: the saved state is marked inexact, because the ranks differ in %s. Something beside the "
                "training has written there, such as an average of the weights that a callback puts into the model, or "
                "an optimizer in evaluation mode: save when the model has the weights that are trained.",
                self._hook,
                ", ".join(differences),
            )

    def loaded_others(self, *, common: bool) -> None:
        """The model has other weights than those of the loaded state."""
        if self._logs:
            logger.warning(
                "hook %s: the model has other weights than those that all ranks had in common when the hook was saved. "
                "The training goes on from %s.",
                self._hook,
                "those of the model" if common else "the common ones, because the ranks have different models",
            )
