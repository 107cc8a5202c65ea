"""Give all ranks equal weights and state, for a save or a validation, and say whether a save is
exact."""

import threading

from commhooks.comm.joint_save import JointSave
from commhooks.errors import logger_of
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.driver import LocalStepsDriver
from commhooks.local_steps.schedule import EndRound, Share, Shared

logger = logger_of(__name__)


class RoundSaves:
    """Ends rounds before saves and validations."""

    def __init__(self, hook: str, source: GradientSource, driver: LocalStepsDriver) -> None:
        self._hook, self._source, self._driver = hook, source, driver
        # what differed between the ranks at the latest joint save
        self._differences: list[str] = []
        self._failed = ""  # why the latest joint save has failed
        self._agreed_at = -1  # `State.passes` at the latest one that has not

    def synchronize(self, saver: JointSave | None, limit_s: float, *, optimizers: bool) -> bool:
        """Give all ranks equal weights and buffers; see `CommHook.synchronize`. `saver` is None
        before the first backward pass."""
        driver = self._driver
        self._differences = []
        self._failed = ""
        in_training = driver.thread in (None, threading.get_ident()) and not driver.state.exchanging
        if in_training:
            driver.run_due()
        trained = driver.state.has_trained(Share.OPTIMIZERS if optimizers else Share.UNTRAINED)
        # if one rank has made fewer passes, it may have ended a round with them
        agree = not optimizers and driver.state.passes == self._agreed_at
        if not trained and (agree or not driver.outer.has_run):
            return True
        if not in_training:
            if trained:
                driver.notices.warn_once(
                    "a save or synchronize() outside of the training thread cannot end a round,"
                    " because it would change weights in the middle of a step. Call"
                    " hook.synchronize(optimizers=True) between two steps, on all ranks, before the"
                    " thread saves.",
                    on_every_rank=True,
                )
            return not trained
        with plain_mode():  # frameworks validate in inference mode
            if saver is None or self._source.group.size() == 1:
                self._share(optimizers=optimizers)
                return True
            learned, passes = driver.outer.state, driver.state.passes
            rounds = learned.step + learned.nonfinite_steps
            failure = saver.run(
                -1 - rounds,
                lambda _: self._share(optimizers=optimizers),
                limit_s,
                passes=passes,
                own_group=True,
            )
        if failure is not None and failure.logged_here:
            logger.warning(
                "hook %s: the weights of the ranks were not averaged after %s backward passes,"
                " because %s. A save or validation now has the weights of a single rank.",
                self._hook,
                driver.counters.backward_passes,
                failure.reason,
            )
        if failure is None:
            self._agreed_at = passes
        else:
            self._failed = f"the ranks could not average their weights: {failure.reason}"
        return failure is None

    def _share(self, *, optimizers: bool) -> None:
        driver = self._driver
        if driver.state.apart and not driver.partner.only_whole_rounds:
            driver.sample.compare()  # before they become those of the outer step
            driver.on(EndRound())
        self._differences = driver.common.share(optimizers=optimizers).differing
        driver.on(Shared(optimizers))
        if not optimizers:
            return
        differing, driver.sample.changed = driver.weights.compare(driver.sample.changed)
        if differing:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            self._differences.insert(0, f"the weights ({differing[0]}{more})")

    def why_inexact(self, *, together: bool) -> str:
        """Return why a run that resumes from the state saved now does not continue exactly as this
        run, and warn; "" if it does. `together`: whether `synchronize` succeeded before the save.
        """
        driver = self._driver
        if driver.partner.only_whole_rounds and driver.state.apart:
            driver.notices.warn_once(
                "this save in the middle of a round is marked inexact, because %s. A run that"
                " resumes from it begins a round with the saved weights.",
                driver.partner.only_whole_rounds,
            )
            return f"it was saved in the middle of a round, and {driver.partner.only_whole_rounds}"
        if not together and driver.state.has_trained(Share.OPTIMIZERS):
            if driver.state.apart:
                logger.warning(
                    "hook %s was saved by rank %s alone, in the middle of a round, and is marked"
                    " inexact. A run that resumes begins from the saved weights if every rank loads"
                    " the same ones, else from the weights at the start of the round.",
                    self._hook,
                    self._source.group.rank(),
                )
            place = "in the middle of a round" if driver.state.apart else "after a step"
            failed = self._failed
            self._failed = ""
            return failed or f"rank {self._source.group.rank()} saved on its own, {place}"
        if reason := self._changed():
            if driver.notices.logs:
                logger.warning(
                    "hook %s: the saved state is marked inexact, because %s", self._hook, reason
                )
        return reason

    def _changed(self) -> str:
        if self._differences:
            return (
                f"the ranks differ in {', '.join(self._differences)}. Code beside the training has"
                " changed them: for example, a callback has put an average of the weights into the"
                " model, or an optimizer is in evaluation mode. Save when the model has the"
                " weights that are trained."
            )
        if self._driver.sample.changed:
            return (
                "this round has ended with weights that something other than a step of an optimizer"
                " has changed: for example, a callback has put an average of the weights into the"
                " model, or an optimizer is in evaluation mode. Save, or call"
                " hook.synchronize(optimizers=True), while the model has the weights that are"
                " trained."
            )
        return ""
