"""The callbacks of a `CommHookTrainer`: they prepare and close the hook, and adapt those that the Trainer brings."""

import weakref
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import IntervalStrategy

from accelerate_commhooks.saving import saved_hooks
from commhooks import AttachError
from commhooks.errors import logger_of
from commhooks.hook.for_plugins import PREFIX

if TYPE_CHECKING:
    from accelerate_commhooks.transformers import CommHookTrainerMixin

logger = logger_of(__name__)


class HookCallback(TrainerCallback):
    """Prepares the hook between wrapping and the first step, reads its metrics, closes it after the last step, and
    checks that each checkpoint contains it."""

    def __init__(self, trainer: "CommHookTrainerMixin") -> None:
        self.trainer: CommHookTrainerMixin = weakref.proxy(trainer)  # which holds this callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, handler = self.trainer, self.trainer._hook_handler
        if handler.is_attached(trainer.model_wrapped):
            if trainer._resume_folder is not None:
                saved_hooks(trainer.accelerator).load(trainer._resume_folder)
        elif trainer.accelerator.num_processes == 1:
            handler.warn_alone()
        elif not handler.off:
            raise AttachError(
                f"hook {handler.hook!r} is not attached: the model in training is a "
                f"{type(trainer.model_wrapped).__name__} that the Trainer's accelerator has not wrapped in "
                "DistributedDataParallel. Use the Trainer without a hook for models that are sharded or wrapped already"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the metrics for the step that is about to be made, while its gradients are there."""
        step = state.global_step + 1
        due = args.logging_strategy == IntervalStrategy.STEPS and step % (state.logging_steps or step + 1) == 0
        if due or step == 1 and args.logging_first_step:
            self.trainer._metrics_at = {step: self.trainer._metrics()}

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let other callbacks see the model of all ranks."""
        if (hook := self.trainer.comm_hook) is not None:
            hook.synchronize()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (hook := self.trainer.comm_hook) is not None:
            if not (args.load_best_model_at_end and state.best_model_checkpoint):  # loaded by now, on all ranks
                hook.synchronize()
            hook.close()
            self.trainer._closed_hook = hook

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, hook = self.trainer, self.trainer.comm_hook
        missing = trainer._saved_at_step != state.global_step and not args.save_only_model
        if hook is not None and missing and state.is_world_process_zero:
            logger.warning(
                "the checkpoint of step %s does not hold the state of hook %r: %s.save_model does not call "
                "super().save_model(output_dir, _internal_call).",
                state.global_step,
                hook.name,
                trainer.__class__.__name__,  # behind the proxy
            )


class _WithoutMetrics(TrainerCallback):
    """For callbacks that print logs: the metrics of the hook are for trackers."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = {name: value for name, value in (logs or {}).items() if not name.startswith(f"{PREFIX}/")}
        super().on_log(args, state, control, logs=shown, **kwargs)


class _Printer(_WithoutMetrics, PrinterCallback):
    pass


class _Progress(_WithoutMetrics, ProgressCallback):
    pass


def print_no_metrics(trainer: Trainer) -> None:
    """Replace the callbacks that transformers has added to print logs. A user's own, also a subclass, stays."""
    for theirs, ours in ((PrinterCallback, _Printer), (ProgressCallback, _Progress)):
        for callback in [each for each in trainer.callback_handler.callbacks if type(each) is theirs]:
            trainer.remove_callback(callback)
            trainer.add_callback(ours)


class _BetweenSteps(JITCheckpointCallback):
    """Saves on SIGTERM (`enable_jit_checkpoint`) before or after a step.

    transformers 5.23 also saves between the backward pass and the optimizer's step. By then the hook has taken part in
    a step that the weights have not made: whoever resumes would repeat it on the residual that it left.
    """

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for `on_step_end`, which follows."""


def save_between_steps(trainer: Trainer) -> None:
    """Replace the callback by which `trainer` saves on SIGTERM, if it does."""
    if not trainer.args.enable_jit_checkpoint:
        return  # a callback of this class would be the user's
    own = trainer.pop_callback(JITCheckpointCallback)  # the first one: the Trainer's
    if isinstance(own, JITCheckpointCallback):
        ours = _BetweenSteps()
        ours.trainer, ours.jit_manager = own.trainer, own.jit_manager
        trainer.add_callback(ours)
