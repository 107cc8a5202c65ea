"""`CommHookTrainer`: the `Trainer` of transformers with a communication hook that its checkpoints carry along.

CommHookTrainer(model, args, train_dataset=dataset, hook="powerSGD")

The Trainer builds its accelerator itself and has no place for a hook. `CommHookTrainerMixin` puts a `CommHookKwargs`
into every accelerator that it builds, and the files of `save_state` into every `checkpoint-N`.
"""

import contextlib
import dataclasses
import logging
import os
from typing import TYPE_CHECKING, Any

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        'accelerate_commhooks.transformers needs transformers: pip install "commhooks[transformers]"'
    ) from error

from accelerate import DistributedDataParallelKwargs
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from accelerate_commhooks.handler import STOCK_HOOK_FIELDS, CommHookKwargs
from accelerate_commhooks.saving import saved_hooks
from commhooks import AttachError, CommHook, HookConfigError

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

logger = logging.getLogger(__name__)


class CommHookTrainerMixin(_Base):
    """Gives a `Trainer` subclass a communication hook: `class MyTrainer(CommHookTrainerMixin, TheirTrainer)`.

    It must stand before the Trainer, and takes these keyword arguments out of `__init__`; all others go on to the
    Trainer, whose own DDP arguments (`ddp_bucket_cap_mb`, `ddp_find_unused_parameters`, ...) stay in force.

    Every `train()` wraps the model anew and starts with fresh memory, unless it resumes: then the memory comes from the
    checkpoint, where every rank has written its part.

    Args:
        hook: as for `CommHookKwargs`: a config object, a name, a path "package.module:function" or a callable. Or a
            `CommHookKwargs`, which can also hold arguments of DDP that the Trainer does not know. None: the settings
            that `CommHookKwargs()` gets from outside.
        hook_options: options of a hook that is given by name.
        hook_state: the state of a callable. What it has learned stays in it: the Trainer does not make it fresh.
        wrapper: "fp16" or "bf16": let the hook communicate in that dtype.
        save_residual: what a checkpoint keeps of PowerSGD's error memory: "per_rank" (the default), "mean" or "drop".
        strict: whether resuming from the state of another hook or model is an error (the default).
        total_steps: the length that `start_powerSGD_iter` refers to where it is None or a fraction; by default the
            number of steps that the Trainer works out for each `train()`.
        check_every: compare the weights of all ranks before every so many backward passes and raise where they differ.

    Raises:
        commhooks.HookConfigError: at construction, for what `CommHookKwargs` refuses, and where Accelerate does not
            wrap models in DDP (FSDP, DeepSpeed).
    """

    def __init__(
        self,
        *args: Any,
        hook: Any = None,
        hook_options: dict[str, Any] | None = None,
        hook_state: Any = None,
        wrapper: str | None = None,
        save_residual: str | None = None,
        strict: bool | None = None,
        total_steps: int | None = None,
        check_every: int | None = None,
        **kwargs: Any,
    ) -> None:
        settings = {
            "hook_options": hook_options,
            "hook_state": hook_state,
            "wrapper": wrapper,
            "save_residual": save_residual,
            "strict": strict,
            "total_steps": total_steps,
            "check_every": check_every,
        }
        self._hook_handler = _handler(hook, {name: value for name, value in settings.items() if value is not None})
        # As the user has set them: the handler itself gets those of the Trainer too.
        self._given_total_steps = self._hook_handler.total_steps
        self._given_ddp_arguments = _ddp_arguments(self._hook_handler)
        self._resume_folder: str | None = None
        self._saved_at_step: int | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(_CommHookCallback(self))

    @property
    def comm_hook(self) -> CommHook | None:
        """The hook of the model in training, or trained last: `stats()`, `plan()`. None before the first `train()`."""
        return self._hook_handler.attached

    # ---- what the Trainer calls --------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Also gives the accelerator the hook. Called at construction and by each trial of a hyper-parameter search."""
        super().create_accelerator_and_postprocess()
        trainers_own = self.accelerator.ddp_handler
        if trainers_own is not None:
            for name, value in _merged(self._given_ddp_arguments, _ddp_arguments(trainers_own)).items():
                setattr(self._hook_handler, name, value)
            self.accelerator.ddp_handler = None  # its place is for ours, which now holds its arguments
        self._hook_handler.attach(self.accelerator)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Also tells the hook the length of the run. Called before the model is wrapped."""
        values = super().set_initial_training_values(args, dataloader)
        max_steps = values[-1]  # optimizer steps; the Trainer synchronises the backward pass of no other
        self._hook_handler.total_steps = self._given_total_steps or max_steps
        return values

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`, with a hook whose memory is fresh, or that of the checkpoint."""
        if resume_from_checkpoint is True:
            # The Trainer tells nobody which one it finds. Where there is none, it says so.
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self._resume_folder = str(resume_from_checkpoint) if resume_from_checkpoint else None
        self._saved_at_step = None
        if self._hook_handler.is_attached(self.model_wrapped):
            # transformers 5.23 would go on with the DDP model of the last train(), whose hook has learned from that.
            model: Any = self.model
            self.model_wrapped = model
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`; as a part of a checkpoint, it also saves the hook.

        `_internal_call` is how transformers 5.23 tells a checkpoint from a user's call. The Trainer writes
        `trainer_state.json` last, so a checkpoint that looks complete has the hook's shared file. First ours and then
        the model: with `save_residual="mean"` the ranks wait for each other, and only one of them writes the model.
        """
        if _internal_call and output_dir is not None and not self.args.save_only_model and self.comm_hook is not None:
            os.makedirs(output_dir, exist_ok=True)  # the main process makes it, perhaps later
            saved_hooks(self.accelerator).save(output_dir, writes_shared=self.args.should_save)
            self._saved_at_step = self.state.global_step
        super().save_model(output_dir, _internal_call)


class CommHookTrainer(CommHookTrainerMixin, Trainer):
    """`transformers.Trainer` with a communication hook: `CommHookTrainer(model, args, ..., hook="powerSGD")`.

    See `CommHookTrainerMixin` for the arguments beside those of `Trainer`.
    """


class _CommHookCallback(TrainerCallback):
    """What has to happen between the wrap and the first step, and a look at whether each checkpoint has the hook."""

    def __init__(self, trainer: CommHookTrainerMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        if trainer._hook_handler.is_attached(trainer.model_wrapped):
            if trainer._resume_folder is not None:
                saved_hooks(trainer.accelerator).load(trainer._resume_folder)
        elif trainer.accelerator.num_processes > 1:
            raise AttachError(
                f"hook {trainer._hook_handler.hook!r} is not attached: the model in training is a "
                f"{type(trainer.model_wrapped).__name__} that the Trainer's accelerator has not wrapped in "
                "DistributedDataParallel. Use the Trainer without a hook for models that are sharded or wrapped already"
            )
        else:
            logger.warning(
                "one process trains, so nothing is communicated and hook %r has nothing to do: start the script with "
                "torchrun or accelerate launch.",
                trainer._hook_handler.hook,
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        due = trainer.comm_hook is not None and not args.save_only_model
        if due and trainer._saved_at_step != state.global_step and state.is_world_process_zero:
            logger.warning(
                "the checkpoint of step %s does not hold the state of hook %r: %s.save_model does not call "
                "super().save_model(output_dir, _internal_call).",
                state.global_step,
                trainer.comm_hook.name,  # type: ignore[union-attr]
                type(trainer).__name__,
            )


def _handler(hook: Any, settings: dict[str, Any]) -> CommHookKwargs:
    if isinstance(hook, CommHookKwargs):
        if settings:
            raise HookConfigError(
                f"{' and '.join(settings)} beside hook=CommHookKwargs(...), which has arguments of that name itself: "
                "write them into CommHookKwargs(...)"
            )
        return hook
    with contextlib.suppress(HookConfigError):
        return CommHookKwargs(hook=hook, **settings)
    # Perhaps only the length of the run is missing, for a start that is a fraction of it. The Trainer knows it when
    # train() begins; until then any number does, and what else is wrong is wrong again.
    handler = CommHookKwargs(hook=hook, **({"total_steps": 1} | settings))
    handler.total_steps = settings.get("total_steps")
    return handler


def _ddp_arguments(handler: DistributedDataParallelKwargs) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(DistributedDataParallelKwargs) if f.name not in STOCK_HOOK_FIELDS]
    return {name: getattr(handler, name) for name in names}


def _merged(given: dict[str, Any], trainers_own: dict[str, Any]) -> dict[str, Any]:
    """DDP's arguments from a user's handler and from `TrainingArguments`. What differs from the default is meant."""
    default = _ddp_arguments(DistributedDataParallelKwargs())
    for name in given:
        if default[name] not in (given[name], trainers_own[name]) and given[name] != trainers_own[name]:
            raise HookConfigError(
                f"{name}={given[name]!r} in CommHookKwargs(...), but ddp_{name}={trainers_own[name]!r} in "
                "TrainingArguments(...): give it in one of them"
            )
    return {name: value if value != default[name] else trainers_own[name] for name, value in given.items()}
