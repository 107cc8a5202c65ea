"""The Trainer's callbacks that print its logs, without the metrics of the hook: those are for trackers."""

from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from commhooks.hook.for_plugins import PREFIX

if TYPE_CHECKING:
    _Base = TrainerCallback
else:
    _Base = object


class _WithoutMetrics(_Base):
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
