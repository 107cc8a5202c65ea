"""`CommHookTrainer`: the `Trainer` of transformers with a communication hook that is saved in its checkpoints.

CommHookTrainer(model, args, train_dataset=dataset, hook="powerSGD")

The Trainer creates its accelerator itself and has no argument for a hook. `CommHookTrainerMixin` adds a
`CommHookKwargs` to every accelerator that it creates, and the files of `save_state` to every `checkpoint-N`.
"""

import contextlib
import inspect
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from commhooks.errors import needed

with needed(
    "accelerate",
    "transformers",
    sentence="accelerate_commhooks.transformers needs transformers and Accelerate: pip install transformers accelerate",
):
    from accelerate import DistributedDataParallelKwargs
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

from accelerate_commhooks.handler import CommHookKwargs
from accelerate_commhooks.saving import saved_hooks
from accelerate_commhooks.trainer_callbacks import HookCallback, print_no_metrics, save_between_steps
from commhooks import CommHook, HookConfigError
from commhooks.errors import no_such
from commhooks.hook.for_plugins import Meter, arguments_in

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class CommHookTrainerMixin(_Base):
    """Adds a communication hook to a `Trainer` subclass: `class MyTrainer(CommHookTrainerMixin, TheirTrainer)`.

    It must precede the Trainer among the base classes. Its `__init__` uses the keyword arguments below and passes all
    others to the Trainer, whose own DDP arguments (`ddp_bucket_cap_mb`, `ddp_find_unused_parameters`, ...) remain in
    effect.

    Every `train()` wraps the model again and starts with empty learned state, unless it resumes: then the learned state
    is loaded from the checkpoint, in which every rank has saved its part.

    Where the Trainer reports (`report_to`), it reports the metrics of the hook beside the loss, with the names of
    `commhooks.hook.metrics`; gradient norms are those after clipping. The lines that it prints leave them out.

    Args:
        hook: as for `CommHookKwargs`; or a `CommHookKwargs`, which can also hold DDP arguments that the Trainer lacks.
            Left out: the settings that `CommHookKwargs()` gets from the launcher or the environment.
        hook_state: the state of a callable. It is not reset between calls of `train()`.
        save_residual: which residuals checkpoints hold: "per_rank" (the default), "mean" or "drop".
        total_steps: the length of the run for a `start_powerSGD_iter` that is None or a fraction; default: the number
            of steps that the Trainer computes for each `train()`.
        hook_options, wrapper, strict, check_every, ranks_per_node: as in `commhooks.attach`.

    Raises:
        commhooks.HookConfigError: at construction, for arguments that `CommHookKwargs` rejects, and if Accelerate
            leaves nothing to a hook (FSDP without `ParallelismConfig`, DeepSpeed).
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
        **kwargs: Any,
    ) -> None:
        _check_arguments(type(self), kwargs)
        settings = {name: value for name, value in arguments_in(locals()).items() if name != "hook"}
        self._hook_handler = _handler(hook, {name: value for name, value in settings.items() if value is not None})
        self._resume_folder: str | None = None
        self._saved_at_step: int | None = None
        self._closed_hook: CommHook | None = None
        self._meter = Meter()
        self._metrics_at: dict[int, dict[str, float]] = {}
        super().__init__(*args, **kwargs)
        # First, so that a hook that averages weights ends its round before others look at the model.
        self.callback_handler.callbacks.insert(0, HookCallback(self))
        print_no_metrics(self)
        save_between_steps(self)

    @property
    def comm_hook(self) -> CommHook | None:
        """The hook of the model that is or was trained last: `stats()`, `plan()`. None before the first `train()`,
        closed after each (see `CommHook.close`)."""
        return self._closed_hook or self._hook_handler.attached  # the handler may have served another Trainer since

    # ---- what the Trainer calls --------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Also add the hook to the accelerator. Called at construction and in each trial of a hyperparameter search."""
        super().create_accelerator_and_postprocess()
        trainers_own = self.accelerator.ddp_handler
        if trainers_own is not None:
            for name, value in _merged(self._hook_handler, trainers_own.to_dict(), self.args).items():
                self._hook_handler.run_values.set(self._hook_handler, name, value)
            self.accelerator.ddp_handler = None  # replaced by our handler, which now holds its arguments
        self._hook_handler.attach(self.accelerator)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Also set the length of the run in the handler. Called before the model is wrapped."""
        values = super().set_initial_training_values(args, dataloader)
        passes = values[-1]  # synchronised ones: one for each step of the optimizer, as a rule
        if self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
            passes *= args.gradient_accumulation_steps
        handler = self._hook_handler
        handler.run_values.set(handler, "total_steps", handler.run_values.users(handler, "total_steps") or passes)
        return values

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`, with a hook whose learned state is empty or loaded from the checkpoint."""
        if resume_from_checkpoint is True:
            # The Trainer does not expose which checkpoint it finds. It raises an error if there is none.
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self._resume_folder = str(resume_from_checkpoint) if resume_from_checkpoint else None
        self._saved_at_step = self._closed_hook = None
        if self._hook_handler.is_attached(self.model_wrapped):
            # transformers 5.23 would reuse the DDP model of the last train() and its hook's learned state.
            model: Any = self.model
            self.model_wrapped = model
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As `Trainer.log`; if `report_to` names somebody, with the metrics of the hook beside the loss."""
        if "loss" in logs:
            logs.update(self._metrics_at.pop(self.state.global_step, {}) or self._metrics())
        super().log(logs, *args, **kwargs)

    def _metrics(self) -> dict[str, float]:
        """The metrics of the hook since the last call, if this rank reports to somebody."""
        if self.comm_hook is None or not self.args.report_to or not self.is_world_process_zero():
            return {}
        return self._meter.read(self.comm_hook)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`, of the model that all ranks have in common."""
        if self.comm_hook is not None and self._closed_hook is None:
            self.comm_hook.synchronize()
        result: dict[str, float] = super().evaluate(*args, **kwargs)
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`; also saves the hook if called for a checkpoint.

        transformers 5.23 sets `_internal_call` for checkpoints. The Trainer writes `trainer_state.json` last, so that a
        complete checkpoint includes the hook's shared file. The hook is saved before the model: with
        `save_residual="mean"` the ranks wait for each other, and only one of them writes the model.
        """
        if self.comm_hook is not None and self._closed_hook is None:
            self.comm_hook.synchronize()  # so that the model is that of all ranks
        if _internal_call and output_dir is not None and not self.args.save_only_model:
            os.makedirs(output_dir, exist_ok=True)  # the main process may create it later than this rank needs it
            saved_hooks(self.accelerator).save(output_dir, writes_shared=self.args.should_save)
            self._saved_at_step = self.state.global_step
        super().save_model(output_dir, **({"_internal_call": True} if _internal_call else {}))


class CommHookTrainer(CommHookTrainerMixin, Trainer):
    """`transformers.Trainer` with a communication hook: `CommHookTrainer(model, args, ..., hook="powerSGD")`.

    See `CommHookTrainerMixin` for its additional arguments.
    """


def _check_arguments(trainer: type[CommHookTrainerMixin], given: Iterable[str]) -> None:
    """Raise HookConfigError for an argument that no constructor of `trainer` has."""
    constructors = [vars(each)["__init__"] for each in trainer.__mro__[:-1] if "__init__" in vars(each)]
    known = [each for constructor in constructors for each in inspect.signature(constructor).parameters.values()]
    if sum(each.kind is each.VAR_KEYWORD for each in known) > 1:  # not the mixin's alone
        return
    names = {each.name for each in known if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)} - {"self"}
    for name in given:
        if name not in names:
            raise no_such(trainer.__name__, "argument", name, sorted(names))


def _handler(hook: Any, settings: dict[str, Any]) -> CommHookKwargs:
    if isinstance(hook, CommHookKwargs):
        if settings:
            raise HookConfigError(
                f"{' and '.join(settings)} beside hook=CommHookKwargs(...), which has arguments of that name itself: "
                "write them into CommHookKwargs(...)"
            )
        return hook
    if hook is not ...:
        settings = {"hook": hook} | settings
    with contextlib.suppress(HookConfigError):
        return CommHookKwargs(**settings)
    # The error may only mean that the length of the run is missing for a fractional start. The Trainer knows it when
    # train() begins, so use any number until then; all other errors are raised again here.
    handler = CommHookKwargs(**({"total_steps": 1} | settings))
    handler.total_steps = settings.get("total_steps")
    return handler


def _merged(handler: CommHookKwargs, trainers_own: dict[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """DDP's arguments: those that the user has given in a handler, and the Trainer's, which it decides itself where
    `TrainingArguments` says nothing."""
    default, merged = DistributedDataParallelKwargs().to_dict(), {}
    for name, trainers in trainers_own.items():
        users = handler.run_values.users(handler, name)
        if name not in handler.given and users == default[name]:
            merged[name] = trainers
            continue
        if getattr(args, f"ddp_{name}", None) is not None and users != trainers:
            raise HookConfigError(
                f"{name}={users!r} in CommHookKwargs(...), but ddp_{name}={trainers!r} in TrainingArguments(...): give "
                "it in one of them"
            )
        merged[name] = users
    return merged
