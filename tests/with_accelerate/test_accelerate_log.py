"""`CommHookKwargs.log` writes what the hooks do to trackers; TensorBoard's is read back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accelerate_commhooks import CommHookKwargs
from commhooks import HookRunError
from commhooks.hook.meter import LATEST, NAMES
from tests.support.accelerators import (
    Training,
    Warnings,
    accelerate_launched,
    launched,
    new_accelerator,
    power_sgd,
)
from tests.support.training import make_model

ALL = {f"commhooks/{name}" for name in NAMES if name not in LATEST}


class Notes(GeneralTracker):
    """Keeps what it is given, on the main process."""

    name = "notes"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def tracker(self) -> "Notes":
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: Any) -> None:
        self.rows.append((step, values))


@launched
def _logged(folder: str) -> dict[str, Any]:
    handler = power_sgd()
    notes = Notes()
    training = Training(
        handler,
        accelerator=new_accelerator(handler, log_with=["tensorboard", notes], project_dir=folder),
    )
    training.accelerator.init_trackers("run")
    stats = []
    for step in (2, 4, 6):
        training.train(2)
        if training.accelerator.is_main_process or step != 4:
            handler.log(training.accelerator, step=step)
        stats.append(training.hook.stats())
    training.optimizer.zero_grad()
    handler.log(training.accelerator)
    # Not `end_training`: it destroys the process group, and DDP is its last owner then. torch 2.13
    # ends the group's threads with the GIL held, and hangs if one of them is just giving back a
    # tensor.
    for tracker in training.accelerator.trackers:
        tracker.finish()
    return {"rows": notes.rows, "stats": stats, "weights": training.weights()}


def test_values_reach_the_trackers(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_logged, str(tmp_path))
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    rows, stats = ranks[0]["rows"], ranks[0]["stats"]
    assert [step for step, _ in rows] == [2, 4, 6, None]
    first, second, third, last = (values for _, values in rows)
    never = {"commhooks/residual_norm", "commhooks/residual_over_gradient"}
    assert first.keys() == ALL - never  # nothing compressed yet
    assert second.keys() == third.keys() == ALL
    assert "commhooks/gradient_norm" not in last and "commhooks/residual_norm" in last
    assert third["commhooks/compressed_steps"] == 3 == stats[2]["compressed_steps"]
    since = stats[2]["bytes_sent"] - stats[1]["bytes_sent"]
    assert third["commhooks/bytes_per_pass"] == since / 2 < 0.5 * first["commhooks/bytes_per_pass"]
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"scalars": 0}).Reload()
    for name in ALL & second.keys():
        in_file = {event.step: event.value for event in events.Scalars(name)}
        assert in_file[4] == pytest.approx(second[name], rel=1e-6), name
        assert (2 in in_file) == (name in first)
    assert ranks[1]["rows"] == []


@launched
def _two_models() -> list[dict[str, float]]:
    handler = power_sgd()
    notes = Notes()
    accelerator = new_accelerator(handler, log_with=notes)
    accelerator.init_trackers("run")
    models = [accelerator.prepare_model(make_model()) for _ in range(2)]
    for count, model in enumerate(models, start=1):
        for _ in range(count):
            accelerator.backward(model(torch.ones(2, 1, 8, 8)).sum())
    handler.log(accelerator)
    gradient = float(
        torch.stack([p.grad.norm() for p in models[1].parameters() if p.dim() > 1]).norm()
    )
    for _, values in notes.rows:
        assert abs(values["commhooks/1/gradient_norm"] - gradient) < 1e-4 * gradient
    del models, model
    accelerator.free_memory()
    handler.log(accelerator)
    return [values for _, values in notes.rows]


def test_each_model_has_values_of_its_own(run_ranks: Any) -> None:
    (row,), others = run_ranks(_two_models)  # nothing is sent once the models are gone
    assert others == []
    of_first = {name for name in row if not name.startswith("commhooks/1/")}
    assert {
        name.replace("commhooks/", "commhooks/1/") for name in of_first
    } == row.keys() - of_first
    assert row["commhooks/1/bytes_sent"] == 2 * row["commhooks/bytes_sent"] > 0


@launched
def _no_trackers() -> list[str]:
    texts = []
    for log_with in (None, Notes()):
        training = Training(
            None, accelerator=new_accelerator(handler := power_sgd(), log_with=log_with)
        )
        training.handler = handler
        training.train(1)
        try:
            handler.log(training.accelerator)
        except HookRunError as error:
            texts.append(str(error))
    return texts


def test_without_trackers_nothing_is_logged(run_ranks: Any) -> None:
    (without, not_begun), others = run_ranks(_no_trackers)
    assert (
        "has no trackers; give Accelerator(log_with=...) an installed tracker, and call" in without
    )
    assert "has no trackers; call accelerator.init_trackers(...) first" in not_begun
    assert others == []  # Accelerate makes trackers on the main process only


def _one_process() -> tuple[int, list[str]]:
    with accelerate_launched(none=True, ACCELERATE_USE_CPU="true"), Warnings() as texts:
        handler = CommHookKwargs(hook="powerSGD")
        notes = Notes()
        accelerator = Accelerator(kwargs_handlers=[handler], log_with=notes, cpu=True)
        accelerator.init_trackers("run")
        model = accelerator.prepare_model(make_model())
        accelerator.backward(model(torch.ones(2, 1, 8, 8)).sum())
        handler.log(accelerator, step=1)
        handler.log(accelerator, step=2)
        CommHookKwargs(hook=None).attach(Accelerator(cpu=True))
        CommHookKwargs(hook="int8").attach(Accelerator(cpu=True))
        return len(notes.rows), texts


def test_one_process_has_no_hook_and_nothing_to_log(run_ranks: Any) -> None:
    [(rows, texts)] = run_ranks(_one_process, world_size=1, init=False)
    sentence = (
        "commhooks: {}: there is one rank, so nothing is sent. Accelerate does not wrap its model"
        " in DDP: there is no hook, and the gradients are exact. Start the script with torchrun or"
        " accelerate launch for several ranks."
    )
    assert rows == 0 and texts == [sentence.format("powerSGD"), sentence.format("int8_compress")]
