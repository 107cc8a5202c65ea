"""`commhooks.Torchft`: the options of machines that come and go."""

from dataclasses import dataclass, field

from commhooks.errors import HookConfigError, invalid
from commhooks.options import as_python, check_choice

__all__ = ["Torchft"]
LEAST_CHARACTERS = 16
"""Of a secret."""


@dataclass(frozen=True, kw_only=True)
class Torchft:
    """Machines join and leave the training while it runs; see docs/members.md.

    Args:
        lighthouse: address of the lighthouse, such as "http://host:29510". None: the environment
            variable TORCHFT_LIGHTHOUSE.
        wait_for: "first": a round ends with the first machine that has done its `sync_every` steps,
            and each counts with the steps that it has done. "all": every machine does all of its
            steps, and the others wait for it. Equal on all machines.
        samples_per_step: the samples that this machine takes in one step, all of its ranks
            together, if machines differ in it. It then counts with its samples. None: with its
            steps; on all machines or on none.
        min_machines: with fewer machines an outer step waits for more.
        timeout_s: seconds after which a machine that does not answer or move is left out. None: as
            long as three of the longest rounds so far, and at least 60 s.
        leave_s: seconds that a machine which leaves waits until the others come to their outer
            step.
        name: name of this machine, different on every machine. None: the host name.
        secret: a text that all machines of the run share, 16 characters or more. A machine without
            it does not take part, and is shown nothing. None: the environment variable
            COMMHOOKS_SECRET; without it, there is no secret.
    """

    lighthouse: str | None = None
    wait_for: str = "first"
    samples_per_step: int | None = None
    min_machines: int = 1
    timeout_s: float | None = None
    leave_s: float = 20.0
    name: str | None = None
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for option in ("min_machines", "samples_per_step", "timeout_s", "leave_s"):
            object.__setattr__(self, option, as_python(getattr(self, option)))
        check_choice("Torchft: wait_for", self.wait_for, ("first", "all"))
        if self.samples_per_step is not None and (
            type(self.samples_per_step) is not int or self.samples_per_step < 1
        ):
            raise invalid(
                "Torchft: samples_per_step", self.samples_per_step, "a number of samples, or None"
            )
        if type(self.min_machines) is not int or self.min_machines < 1:
            raise invalid(
                "Torchft: min_machines", self.min_machines, "a number of machines, 1 or more"
            )
        timeout_s = self.timeout_s
        if timeout_s is not None and (
            type(timeout_s) not in (int, float) or not 0 < timeout_s < float("inf")
        ):
            raise invalid("Torchft: timeout_s", timeout_s, "seconds, more than 0, or None")
        if type(self.leave_s) not in (int, float) or not 0 <= self.leave_s < float("inf"):
            raise invalid("Torchft: leave_s", self.leave_s, "seconds, 0 or more")
        for option in ("lighthouse", "name"):
            value = getattr(self, option)
            if not isinstance(value, str | None) or value == "":
                raise invalid(f"Torchft: {option}", value, "a text, or None")
        if self.secret is not None:
            if not isinstance(self.secret, str):
                raise HookConfigError(
                    f"Torchft: secret is a {type(self.secret).__name__}; expected a text, or None"
                )
            check_secret(self.secret, "Torchft: secret")


def check_secret(secret: str, where: str) -> None:
    """Raise HookConfigError, without the secret, if it is too short to be one."""
    if len(secret) < LEAST_CHARACTERS:
        raise HookConfigError(
            f"{where} has {len(secret)} characters; expected {LEAST_CHARACTERS} or more:"
            " `openssl rand -hex 16` makes one"
        )


def torchft_of(given: object) -> Torchft | None:
    """Check the argument `members` of the front ends."""
    if given is None or isinstance(given, Torchft):
        return given
    if given == "torchft":
        return Torchft()
    raise invalid("members", given, "'torchft', commhooks.Torchft(...), or None", ["torchft"])
