"""Inside a rank that is to die: it watches where the training is, brings the death about, and
leaves notes.

In the folder of the training: start-ATTEMPT-RANK.json when an attempt begins to train, death.json
at the moment of the death, error-ATTEMPT-RANK.json with the error that ended a rank,
end-ATTEMPT-RANK.json.
"""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.stress.chaos_cases import GROUP_TIMEOUT_S, Death

TIMEOUT = timedelta(seconds=GROUP_TIMEOUT_S)
# the parameter whose gradient comes when some buckets are under way and others are not
MIDDLE = "5.weight"


class Watch:
    """`death` is that of this attempt; None if it is left alone. `forgets_at`: a step at which the
    hook loses its residuals.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        attempt: int = 0,
        death: Death | None = None,
        forgets_at: int | None = None,
    ) -> None:
        self._forgets_at = forgets_at
        self.folder = folder
        self.rank = rank
        self.attempt = attempt
        self.death = (
            death if death is not None and (death.rank == rank or death.kind == "full") else None
        )
        self.outlives = death is not None and death.kind == "one" and death.rank != rank
        self.phase = "start"
        self.step = 0
        self.hook: Callable[[], Any] = lambda: None
        self._timer: threading.Timer | None = None
        self._reached = False
        self._limits: tuple[int, int] | None = None

    @classmethod
    def of_this_process(cls, folder: Path) -> "Watch":
        """CHAOS_DEATH: the death as JSON. CHAOS_COMMAND: how often the command was given before."""
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        planned = os.environ.get("CHAOS_DEATH")
        death = Death(**json.loads(planned)) if planned and restarts == 0 else None
        return cls(
            folder, int(os.environ["RANK"]), restarts + int(os.environ["CHAOS_COMMAND"]), death
        )

    # ---- what the training calls -----------------------------------------------------------------

    def begins(self, step: int, model: torch.nn.Module, hook: Callable[[], Any]) -> None:
        """The training begins or goes on at this step. `model`: that of
        tests/support/training.py.
        """
        self.note("start", step=step)
        self.hook = hook
        hook().joint_save_limit_s = 5.0
        parameter = dict(model.named_parameters())[MIDDLE]
        if isinstance(parameter, DTensor):  # later units were reduced then
            layer = model.get_submodule(MIDDLE.rpartition(".")[0])
            layer.register_full_backward_hook(lambda *_: self.at("backward"))
        else:
            parameter.register_hook(lambda gradient: self.at("backward"))

    def at(self, phase: str, step: int | None = None) -> None:
        """Note the phase: `between` steps, or `saving` before a checkpoint's first file."""
        if phase == "between":
            self.no_file_was_as_large()
            if step is not None and step == self._forgets_at:
                self.hook().load_state_dict(self.hook().state_dict("drop"))
        self.phase = phase
        self.step = self.step if step is None else step
        death = self.death
        # by the timer: it is not to get far until it has died
        if self._reached and death is not None:
            time.sleep(60 if death.kind in ("all", "truncated") else 0.3)
        elif death is not None and self.step >= death.step:
            if phase == death.moment:
                self._wait_for_message(death)
                self._die(death)
            elif phase == "between" and death.moment == "anytime" and self._timer is None:
                self._timer = threading.Timer(death.delay_s, self._die, [death, True])
                self._timer.daemon = True
                self._timer.start()
        if phase == "between":
            self.phase = "training"

    def outlive_torchrun(self) -> None:
        """torchrun ends the other ranks by SIGTERM when one has died. Here they shall show that
        they end by themselves.
        """
        if self.outlives:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def no_file_was_as_large(self) -> None:
        """A save is over, and nobody has died of it: a later one may have larger files."""
        if self._limits is not None:
            self.files_may_grow()
            if self.death is not None and self.rank == self.death.rank:
                (self.folder / "death.json").unlink(missing_ok=True)

    def files_may_grow(self) -> None:
        """Again, after a save: there is place on the disk."""
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
            self._limits = None

    def note(self, kind: str, **what: Any) -> None:
        name = kind if kind == "death" else f"{kind}-{self.attempt}-{self.rank}"
        temporary = self.folder / f".{name}.tmp"
        temporary.write_text(json.dumps({"time": time.time(), **what}))
        temporary.replace(self.folder / f"{name}.json")

    # ---- the death -------------------------------------------------------------------------------

    def _die(self, death: Death, by_timer: bool = False) -> None:
        self._reached = death.moment != "saving"
        last = None if by_timer or self.hook() is None else self.hook().stats()["last_issued"]
        if self.rank == death.rank:
            self.note("death", phase=self.phase, step=self.step, last_issued=last)
        if death.kind == "one":
            os.kill(os.getpid(), signal.SIGKILL)
        elif death.kind in ("save", "full"):
            self._limit_files(death)
        elif death.kind != "sigterm" and not by_timer:
            time.sleep(60)  # chaos_runs.py reads the note, and kills
        # For SIGTERM the main thread goes on: it may have a handler.

    def _limit_files(self, death: Death) -> None:
        """From here on the operating system refuses to let a file grow beyond so many bytes: what
        fits is written, and then comes a signal, which ends the process, or an error, where it is
        ignored, as Python does by itself.
        """
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if death.kind == "save" else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (death.file_bytes, self._limits[1]))

    def _wait_for_message(self, death: Death) -> None:
        while death.issued and not str(self.hook().stats()["last_issued"]).endswith(death.issued):
            time.sleep(0.001)
