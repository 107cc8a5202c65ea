"""`CommHookTrainer`, the `Trainer` of transformers with a communication hook, which its checkpoints
include.

CommHookTrainer(model, args, train_dataset=dataset, hook="powerSGD")

The Trainer creates its accelerator itself and has no argument for a hook. `CommHookTrainerMixin`
adds a `CommHookKwargs` to every accelerator that the Trainer creates, and the hook's files to every
`checkpoint-N`.
"""

import contextlib
import inspect
import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from commhooks.errors import needed, no_such

with needed(
    "accelerate",
    "transformers",
    sentence=(
        "accelerate_commhooks.transformers needs transformers and Accelerate: pip install"
        " transformers accelerate"
    ),
):
    from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback
    from transformers.trainer_utils import IntervalStrategy, get_last_checkpoint

from accelerate_commhooks.handler import CommHookKwargs
from accelerate_commhooks.saving import ensure_hook_saver
from commhooks import AttachError, CommHook, HookConfigError
from commhooks.errors import logger_of
from commhooks.hook.plugin_api import PREFIX, Meter, arguments_in

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

logger = logger_of(__name__)


class CommHookTrainerMixin(_Base):
    """Adds a communication hook to a `Trainer` subclass: `class MyTrainer(CommHookTrainerMixin,
    TheirTrainer)`.

    The mixin must precede the Trainer among the base classes. All arguments that are not listed
    below go to the Trainer. The DDP arguments in `TrainingArguments` (`ddp_bucket_cap_mb`,
    `ddp_find_unused_parameters`, ...) remain in effect.

    Every `train()` wraps the model again and starts with empty learned state, or loads it from the
    checkpoint that it resumes from.

    The metrics of the hook appear next to the loss in the trackers of `report_to`; gradient norms
    are measured after clipping. Printed lines leave the metrics out.

    Args:
        hook: as for `CommHookKwargs`; or a `CommHookKwargs`, which can also hold DDP arguments that
            the Trainer lacks. By default the settings that `CommHookKwargs()` reads from the
            launcher or the environment.
        hook_state: the state of a callable. It is not reset between calls of `train()`.
        save_residual: which residuals checkpoints hold: "per_rank" (the default), "mean" or "drop".
        total_steps: the length of the run for a `start_powerSGD_iter` that is None or a fraction;
            default: the number of steps that the Trainer computes for each `train()`.
        hook_options, wrapper, strict, check_every, ranks_per_node, members, shards: as in
            `commhooks.attach`. A machine that joins (`members`) also takes the Trainer's global
            step and learning rate scheduler from another machine. A machine whose training ends,
            also by SIGTERM with `enable_jit_checkpoint`, leaves (`Members.leave`).

    Raises:
        commhooks.HookConfigError: at construction, for an unknown argument, for arguments that
            `CommHookKwargs` rejects, and if Accelerate neither wraps the model in DDP nor shards
            replicas of it (DeepSpeed, FSDP without `ParallelismConfig`).
    """

    def __init__(
        self,
        *args: Any,
        hook: Any = ...,
        hook_options: dict[str, Any] | None = None,
        hook_state: Any = None,
        wrapper: str | None = None,
        save_residual: str | None = None,
        strict: bool | None = None,
        total_steps: int | None = None,
        check_every: int | None = None,
        ranks_per_node: int | str | None = None,
        members: Any = None,
        shards: Any = None,
        **kwargs: Any,
    ) -> None:
        settings = {name: value for name, value in arguments_in(locals()).items() if name != "hook"}
        self._hook_handler = _handler(
            hook, {name: value for name, value in settings.items() if value is not None}
        )
        self._resume_folder: str | None = None
        self._saved_at_step: int | None = None
        self._closed_hook: CommHook | None = None
        self._meter = Meter()
        self._metrics_at: dict[int, dict[str, float]] = {}
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:
            _raise_if_unknown(kwargs, type(self), error)
            raise
        # First, so that a hook that averages weights ends its round before other callbacks read the
        # model.
        self.callback_handler.callbacks.insert(0, HookCallback(self))
        print_no_metrics(self)
        save_between_steps(self)

    @property
    def comm_hook(self) -> CommHook | None:
        """The hook of the model in training or trained last; None before the first `train()`.

        After `train()`, also after one that has failed, it is closed (see `CommHook.close`).
        """
        # another Trainer may have used the handler since
        return self._closed_hook or self._hook_handler.attached

    # ---- what the Trainer calls
    # --------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Also attach the handler. Called at construction and in each trial of a search."""
        super().create_accelerator_and_postprocess()
        handler = self._hook_handler
        of_trainer = self.accelerator.ddp_handler
        if of_trainer is not None:
            handler.ddp_defaults = of_trainer.to_dict()
            for name, value in handler.ddp_defaults.items():
                ours = getattr(handler, name)
                in_arguments = getattr(self.args, f"ddp_{name}", None) is not None
                if in_arguments and handler.has_set(name) and ours != value:
                    raise HookConfigError(
                        f"{name}={ours!r} in CommHookKwargs(...), but ddp_{name}={value!r} in "
                        "TrainingArguments(...): set it in one place"
                    )
            self.accelerator.ddp_handler = None  # the hook's handler now holds its arguments
        handler.attach(self.accelerator)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Also set the length of the run in the handler. Called before the model is wrapped."""
        values = super().set_initial_training_values(args, dataloader)
        passes = values[-1]  # backward passes with communication: usually one per optimizer step
        if self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
            passes *= args.gradient_accumulation_steps
        self._hook_handler.run_length = passes
        return values

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            # The Trainer does not expose the checkpoint that it finds, and raises an error if there
            # is none.
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self._resume_folder = str(resume_from_checkpoint) if resume_from_checkpoint else None
        self._saved_at_step = self._closed_hook = None
        if self._hook_handler.is_attached(self.model_wrapped):
            # transformers 5.23 would reuse the last train()'s DDP model, and with it the hook's
            # learned state.
            model: Any = self.model
            self.model_wrapped = model
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            hook = self.comm_hook
            if hook is not None:
                hook.failed(error)
                hook.close()  # in a notebook the process goes on, and other machines would wait
                self._closed_hook = hook
            raise

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self._metrics_at.pop(self.state.global_step, {}) or self._metrics())
        super().log(logs, *args, **kwargs)

    def _metrics(self) -> dict[str, float]:
        if self.comm_hook is None or not self.args.report_to or not self.is_world_process_zero():
            return {}
        return self._meter.read(self.comm_hook)

    def _progress(self) -> dict[str, Any]:
        scheduler: Any = self.lr_scheduler
        return {"global_step": self.state.global_step, "scheduler": scheduler.state_dict()}

    def _set_progress(self, progress: dict[str, Any]) -> None:
        # divides the logged loss
        self._globalstep_last_logged += progress["global_step"] - self.state.global_step
        self.state.global_step = progress["global_step"]
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(progress["scheduler"])

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """End the hook's round, so that all ranks have the same weights, then evaluate."""
        if self.comm_hook is not None and self._closed_hook is None:
            self.comm_hook.synchronize()
        result: dict[str, float] = super().evaluate(*args, **kwargs)
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; for a checkpoint (`_internal_call`, transformers 5.23), the hook first.

        With `save_residual="mean"` the ranks wait for each other, and only one rank writes the
        model. The Trainer writes `trainer_state.json` last, so a complete checkpoint includes the
        hook's shared file.
        """
        if self.comm_hook is not None and self._closed_hook is None:
            self.comm_hook.synchronize()  # all ranks have the same weights then
        if _internal_call and output_dir is not None and not self.args.save_only_model:
            os.makedirs(output_dir, exist_ok=True)  # the main process may not have created it yet
            ensure_hook_saver(self.accelerator).save(
                output_dir, writes_shared=self.args.should_save
            )
            self._saved_at_step = self.state.global_step
        super().save_model(output_dir, **({"_internal_call": True} if _internal_call else {}))


class CommHookTrainer(CommHookTrainerMixin, Trainer):
    """`transformers.Trainer` with a hook; `CommHookTrainerMixin` describes its arguments."""


def _raise_if_unknown(names: Iterable[str], cls: type, error: TypeError) -> None:
    allowed: list[str] = []
    for base in cls.__mro__:
        if "__init__" in vars(base):
            for parameter in inspect.signature(vars(base)["__init__"]).parameters.values():
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    allowed.append(parameter.name)
    allowed = [name for name in dict.fromkeys(allowed) if name != "self"]
    for name in names:
        if name not in allowed:
            raise no_such(cls.__name__, "argument", name, allowed) from error


def _handler(hook: Any, settings: dict[str, Any]) -> CommHookKwargs:
    if isinstance(hook, CommHookKwargs):
        if settings:
            raise HookConfigError(
                f"{' and '.join(settings)} together with hook=CommHookKwargs(...), which takes the"
                " same arguments: pass them to CommHookKwargs(...)"
            )
        return hook
    if hook is not ...:
        settings = {"hook": hook} | settings
    with contextlib.suppress(HookConfigError):
        return CommHookKwargs(**settings)
    # The error may only mean that a fractional start needs the length of the run, which the Trainer
    # knows when train() begins. Try again with some length; all other errors are raised here.
    handler = CommHookKwargs(**({"total_steps": 1} | settings))
    handler.total_steps = settings.get("total_steps")
    return handler


# ---- callbacks
# --------------------------------------------------------------------------------------------------


class HookCallback(TrainerCallback):
    """Loads the hook's state, reads its metrics, closes it, and checks that checkpoints hold it."""

    def __init__(self, trainer: "CommHookTrainerMixin") -> None:
        self.trainer: CommHookTrainerMixin = weakref.proxy(trainer)  # which holds this callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        handler = trainer._hook_handler
        if handler.is_attached(trainer.model_wrapped):
            assert handler.attached is not None
            if (members := handler.attached.members) is not None:
                members.register("transformers", trainer._progress, trainer._set_progress)
            if trainer._resume_folder is not None:
                ensure_hook_saver(trainer.accelerator).load(trainer._resume_folder)
        elif trainer.accelerator.num_processes == 1:
            handler.warn_alone()
        elif not handler.off:
            raise AttachError(
                f"hook {handler.hook!r} is not attached: the model in training is a"
                f" {type(trainer.model_wrapped).__name__} that the Trainer's accelerator has not"
                " wrapped in DistributedDataParallel. Pass hook=None for models that are sharded"
                " or wrapped already"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the metrics of the coming step while its gradients exist."""
        step = state.global_step + 1
        logs_steps = args.logging_strategy == IntervalStrategy.STEPS
        due = logs_steps and step % (state.logging_steps or step + 1) == 0
        if due or step == 1 and args.logging_first_step:
            self.trainer._metrics_at = {step: self.trainer._metrics()}

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (hook := self.trainer.comm_hook) is not None:
            hook.synchronize()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (hook := self.trainer.comm_hook) is not None:
            # loaded by now, on all ranks
            if not (args.load_best_model_at_end and state.best_model_checkpoint):
                hook.synchronize()
                if hook.members is not None:
                    hook.members.leave()  # with the steps of a round that it does not end
            hook.close()
            self.trainer._closed_hook = hook

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        hook = trainer.comm_hook
        missing = trainer._saved_at_step != state.global_step and not args.save_only_model
        if hook is not None and missing and state.is_world_process_zero:
            logger.warning(
                "the checkpoint of step %s does not hold the state of hook %r: %s.save_model does"
                " not call super().save_model(output_dir, _internal_call).",
                state.global_step,
                hook.name,
                trainer.__class__.__name__,  # behind the proxy
            )


class _WithoutMetrics(TrainerCallback):
    """Base of callbacks that print logs. It omits the hook's metrics, which are for trackers."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = {
            name: value for name, value in (logs or {}).items() if not name.startswith(f"{PREFIX}/")
        }
        super().on_log(args, state, control, logs=shown, **kwargs)


class _Printer(_WithoutMetrics, PrinterCallback):
    pass


class _Progress(_WithoutMetrics, ProgressCallback):
    pass


def print_no_metrics(trainer: Trainer) -> None:
    """Replace the callbacks that transformers uses to print logs, but no subclasses of users."""
    for theirs, ours in ((PrinterCallback, _Printer), (ProgressCallback, _Progress)):
        for callback in list(trainer.callback_handler.callbacks):
            if type(callback) is theirs:
                trainer.remove_callback(callback)
                trainer.add_callback(ours)


class _BetweenSteps(JITCheckpointCallback):
    """Saves on SIGTERM (`enable_jit_checkpoint`) before or after a step.

    transformers 5.23 also saves between the backward pass and the optimizer's step: the hook's
    residual is then one step ahead of the weights, and a resumed run would repeat the step on it.
    """

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do nothing; `on_step_end` follows and saves."""


def save_between_steps(trainer: Trainer) -> None:
    if not trainer.args.enable_jit_checkpoint:
        return  # a callback of this class would be the user's
    theirs = trainer.pop_callback(JITCheckpointCallback)  # the first one: the Trainer's
    if isinstance(theirs, JITCheckpointCallback):
        ours = _BetweenSteps()
        ours.trainer = theirs.trainer
        ours.jit_manager = theirs.jit_manager
        trainer.add_callback(ours)
