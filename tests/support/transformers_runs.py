"""A `CommHookTrainer` that is one of two ranks, and the outcome of its training."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from accelerate import DistributedType  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers_trainer import batch, make_model, manual  # noqa: E402  # of examples/

from accelerate_commhooks.transformers import CommHookTrainer  # noqa: E402
from tests.support import accelerators  # noqa: E402
from tests.support.accelerators import FILES, OPTIONS  # noqa: E402, F401
from tests.support.training import flat, residuals  # noqa: E402

EPOCH = 8  # steps, with two ranks and the default batch size
POWER_SGD = {"hook": "powerSGD", "hook_options": OPTIONS}


class Moments(TrainerCallback):
    """Records the learned state at the first step of each attempt, and the number of hooks."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.trainer: Any = None
        self._begins = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begins = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        hook = getattr(self.trainer, "comm_hook", None)
        if self._begins and hook is not None and hook.name == "powerSGD":
            seen = {
                "step": hook.stats()["step"],
                "residuals": residuals(hook),
                "start": hook.options["start_powerSGD_iter"],
                "hooks": len(self.trainer._hook_handler.attached_hooks),
            }
            self.seen.append(seen)
        self._begins = False


def make_trainer(
    folder: Any,
    cls: Any = CommHookTrainer,
    *,
    seed: int = 3,
    hook: Any = None,
    sharding: dict[str, Any] | None = None,
    samples: int = EPOCH * 2 * 4,
    **settings: Any,
) -> Any:
    """Make a trainer that is one of several ranks.

    Args:
        hook: its arguments for the hook; PowerSGD by default.
        sharding: arguments of FSDP2; None is DDP on two ranks.
        samples: the length of the data.
    """
    torch.manual_seed(seed)
    model = make_model(width=16)
    usual = {
        "max_steps": EPOCH,
        "save_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    usual |= (
        {"ddp_bucket_cap_mb": 0.005, "per_device_train_batch_size": 4}
        if sharding is None
        else sharding
    )
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        learning_rate=0.01,
        dataloader_pin_memory=False,
        **usual | settings,
    )
    if sharding is not None:
        accelerators.pretend_to_have_accelerators()
    few = torch.utils.data.Subset(manual(32)[0], range(samples))
    moments = Moments()
    more = {} if cls is Trainer else POWER_SGD if hook is None else hook
    evaluated = None if args.eval_strategy == "no" else few
    trainer = cls(model, args, batch, few, evaluated, callbacks=[moments], **more)
    moments.trainer = trainer
    if sharding is not None:
        assert trainer.accelerator.is_fsdp2
    else:
        assert trainer.accelerator.distributed_type is DistributedType.MULTI_CPU
        assert trainer.args.world_size == dist.get_world_size() == 2
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    hook = getattr(trainer, "comm_hook", None)
    return {
        "weights": flat(trainer.model.parameters()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "residuals": {} if hook is None or hook.name != "powerSGD" else residuals(hook),
        "stats": {} if hook is None else hook.stats(),
        "seen": next(
            callback.seen
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, Moments)
        ),
    }


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    accelerators.assert_equal(one, other)
    assert one["losses"] == other["losses"]
