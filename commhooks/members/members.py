"""`CommHook.members`: the machines of a training, for its user."""

from collections.abc import Callable
from typing import Any

from commhooks.errors import HookRunError, log_summary, logger_of
from commhooks.local_steps.driver import LocalStepsDriver
from commhooks.members.machine_partner import MachinePartner

logger = logger_of(__name__)


class Members:
    """Lists the machines of a training, and lets this one leave: `CommHook.members`.

    All ranks of a machine must call `leave` together. The other methods do not communicate.
    """

    def __init__(self, driver: LocalStepsDriver, steps: MachinePartner) -> None:
        self._driver, self._steps = driver, steps

    @property
    def names(self) -> list[str]:
        """The names of the machines that train the running round, in the order of their ranks; at
        least this one.
        """
        return [machine.name for machine in self._steps.participants] or [self._steps.name]

    @property
    def size(self) -> int:
        """The number of machines that train the running round."""
        return len(self.names)

    @property
    def rank(self) -> int:
        """The number of this machine among them, 0 to size - 1. It changes when machines come and
        go.
        """
        return self.names.index(self._steps.name)

    def register(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        """Hand over further state, such as that of a learning rate scheduler or a count of steps:
        to a machine that comes, and after an outer step to machines that have done fewer steps.
        Call this before the first backward pass, on every machine.

        Args:
            name: the same on every machine.
            get: returns the state: numbers, texts, tensors, and lists and dicts of them. Called on
                a machine after an outer step.
            set: sets the state, on the machine that takes it, after a step of its optimizers.

        Raises:
            HookConfigError: the name is registered.
        """
        self._steps.healing.registered.add(name, get, set)

    def leave(self, wait_s: float | None = None) -> bool:
        """Leave the training, between two steps: end the round early and send this machine's part,
        if the others come to their outer step within `wait_s` seconds (None: `Torchft.leave_s`),
        and answer in it. They no longer wait for this machine. Returns whether its part was sent. A
        later outer step raises HookRunError.
        """
        sent, wait_s = False, self._steps.options.leave_s if wait_s is None else wait_s
        if wait_s > 0 and self._steps.joined and self._driver.state.apart:
            try:
                self._driver.end_round(wait_s)
                sent = True
            except HookRunError as error:
                if self._steps.logs:
                    logger.warning(
                        "members: this machine leaves without its part of the round: %s", error
                    )
        if sent and self._steps.logs:
            log_summary("members: this machine leaves, and has sent its part of the round")
        self._steps.leave()
        return sent
