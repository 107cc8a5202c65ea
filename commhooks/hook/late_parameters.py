"""Warn about trained parameters that nothing averages."""

import weakref
from collections.abc import Sequence

from commhooks.errors import logger_of
from commhooks.gradients.source import GradientSource

logger = logger_of(__name__)

WHOLE_LOOK_EVERY = 100
"""Passes between two looks at all parameters of the model, some of which may be new."""


class LateParameters:
    """Warns once about parameters that become trainable after `attach`. Looks at the parameters
    that were frozen then before every pass, and at the whole model before the first pass and every
    `WHOLE_LOOK_EVERY` passes.
    """

    def __init__(self, source: GradientSource) -> None:
        self._source = source
        # Weak references, because users may keep the hook longer than the model.
        weights = source.weights().values()
        self._frozen = [weakref.ref(weight) for weight in weights if not weight.requires_grad]
        self._passes = 0
        self._warned = False

    def before_pass(self) -> None:
        if self._warned:
            return
        whole_look = self._passes % WHOLE_LOOK_EVERY == 0
        self._passes += 1
        if whole_look or self._any_unfrozen():
            self._look()

    def after_pass(self) -> None:
        return None

    def _any_unfrozen(self) -> bool:
        for reference in self._frozen:
            parameter = reference()
            if parameter is not None and parameter.requires_grad:
                return True
        return False

    def _look(self) -> None:
        late = self._source.not_averaged()
        if late:
            self._warned = True
            logger.warning(
                "%d parameters (the first is %s) were frozen or missing when the hook was attached"
                " and are trained now: their gradients are not averaged, with a hook or without,"
                " and the ranks drift apart. Unfreeze them before the model is wrapped, with a"
                " learning rate of 0 until they are to train; or wrap the model again and attach a"
                " hook to it (call fit, train or prepare again).",
                len(late),
                late[0],
            )


def warn_of_unsharded(names: Sequence[str]) -> None:
    """Warn if `names`, the parameters that are trained and not sharded, are not empty."""
    if names:
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        logger.warning(
            "%s%s: trained, but not sharded, so their gradients are not averaged and the ranks"
            " drift apart. Call fully_shard on a module that contains them, or freeze them.",
            ", ".join(names[:2]),
            more,
        )
