"""What `CommHookMonitor` logs, read back from real TensorBoard and CSV files."""

import csv
import math
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commhooks import HookConfigError
from commhooks.report import NAMES
from lightning_commhooks import CommHookMonitor
from tests.support import lightning_support as support
from tests.support.inside import session_of
from tests.support.lightning_support import Model, assert_equal, data, strategy, trainer, weights

OF_OTHERS = ("chosen_at", "outer_gradient_norm", "outer_gradient_cosine")  # metrics that PowerSGD has not
ALL = {f"commhooks/{name}" for name in NAMES if name not in OF_OTHERS}


class LoggingModel(Model):
    """Logs one value of its own, whose steps the monitor's must be like."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Truth(pl.Callback):
    """PowerSGD's counters and norms at every optimizer step, and the progress bar after it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.shown: list[float | None] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        hook = trainer.strategy.comm_hook
        matrices = {name: p for name, p in pl_module.named_parameters() if p.dim() == 2}
        residuals = session_of(hook).state["residual"]
        scale = session_of(hook).state.loss_scale
        self.rows.append(
            {
                **hook.stats(),
                "gradient": math.hypot(*(float(p.grad.norm()) for p in matrices.values())),
                "residual": math.hypot(*(float(residuals[n].norm()) / scale for n in matrices)) if residuals else None,
            }
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.shown.append(trainer.progress_bar_metrics.get("hook_x"))
        assert not any("/" in name or len(name) > 8 for name in trainer.progress_bar_metrics)


def tensorboard_values(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def csv_values(file: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    with file.open() as opened:
        for row in csv.DictReader(opened):
            for name, text in row.items():
                if text and name != "step":
                    found.setdefault(name, []).append((int(row["step"]), float(text)))
    return found


def loggers(root: str) -> list[Any]:
    return [TensorBoardLogger(root, name="tb", version=0), CSVLogger(root, name="csv", version=0)]


def fit(
    root: str,
    monitor: CommHookMonitor | None,
    *,
    model: Model | None = None,
    log: bool = True,
    fits: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Two epochs of four steps with both loggers, and what rank 0 wrote into them."""
    truth = Truth()
    watched = [truth] if "strategy" not in options else []
    options = {"max_epochs": 2, "log_every_n_steps": 2, "strategy": strategy()} | options
    t, model = trainer(root, callbacks=[*filter(None, [monitor]), *watched], **options), model or LoggingModel()
    if log:
        t.loggers = loggers(root)
    with support.caught_warnings() as texts:
        for each in range(fits):
            t.fit_loop.max_epochs = 2 * (each + 1)
            t.fit(model, data())
    hook = getattr(t.strategy, "comm_hook", None)
    tb, rows = Path(root, "tb", "version_0"), Path(root, "csv", "version_0", "metrics.csv")
    return {
        "weights": weights(model),
        "tb": tensorboard_values(tb) if tb.exists() and dist.get_rank() == 0 else {},
        "csv": csv_values(rows) if rows.exists() and dist.get_rank() == 0 else {},
        "truth": truth.rows,
        "shown": [None if value is None else float(value) for value in truth.shown],
        "handshakes": hook.stats()["handshakes"] if hook is not None else None,
        "warnings": [text for text in texts if "CommHookMonitor" in text],
    }


def several(root: str, *cases: str) -> dict[str, Any]:
    """Several cases in one task, each with a folder of its own."""
    return {name: CASES[name](f"{root}/{name}") for name in cases}


def steps_of(values: dict[str, list[tuple[int, float]]], name: str) -> list[int]:
    return [step for step, _ in values[name]]


CASES: dict[str, Any] = {
    "without": lambda root: fit(root, None),
    "all": lambda root: fit(root, CommHookMonitor()),
    "clipping": lambda root: fit(root, CommHookMonitor(1), gradient_clip_val=1e-3),
    "accumulation": lambda root: fit(root, CommHookMonitor(1), accumulate_grad_batches=2),
    "two optimizers": lambda root: fit(root, CommHookMonitor(1), model=support.TwoOptimizersModel()),
    "manual": lambda root: fit(root, CommHookMonitor(3), model=support.ManualModel()),
    "no logger": lambda root: fit(root, CommHookMonitor(1), log=False),
    "no progress bar": lambda root: fit(root, CommHookMonitor(1, progress_bar=None), log=False),
    "fit twice": lambda root: fit(root, CommHookMonitor(4), fits=2),
    "other strategy": lambda root: fit(root, CommHookMonitor(1), strategy=DDPStrategy(), fits=2),
    "fp16": lambda root: fit(root, CommHookMonitor(), strategy=strategy(hook="fp16_compress")),
    "user's": lambda root: fit(root, CommHookMonitor(), strategy=strategy(hook=users_hook)),
    "scaler": lambda root: fit(
        root,
        CommHookMonitor(),
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))],
    ),
}


def users_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda future: future.value()[0] / dist.get_world_size())


@pytest.fixture(scope="module")
def ranks(worker_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All cases, run once for all tests of this module."""
    return worker_pool.run(several, str(tmp_path_factory.mktemp("monitor")), *CASES, timeout_s=100)


def test_the_training_is_the_same(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_equal(rank["without"]["weights"], rank["all"]["weights"])
        assert rank["all"]["handshakes"] == rank["without"]["handshakes"]


def test_both_loggers_hold_all_values(ranks: list[dict[str, Any]]) -> None:
    """On every second step, with the steps of what the module logs; the same in both files."""
    got, rows = ranks[0]["all"], ranks[0]["all"]["truth"]
    assert ranks[1]["all"]["tb"] == ranks[1]["all"]["csv"] == {}
    values = got["tb"]
    assert {name for name in values if name.startswith("commhooks/")} == ALL
    assert values.keys() - {"epoch"} == got["csv"].keys() - {"epoch"}
    for name, points in got["csv"].items():
        if name != "epoch":
            assert steps_of(values, name) == [step for step, _ in points]
            assert [v for _, v in values[name]] == pytest.approx([v for _, v in points], rel=1e-6)
    assert steps_of(values, "loss") == [1, 3, 5, 7]
    late = ("residual_norm", "residual_over_gradient")
    for name in ALL:
        begun = [3, 5, 7] if name.removeprefix("commhooks/") in late else [1, 3, 5, 7]
        assert steps_of(values, name) == begun, name
    assert dict(values["commhooks/compressed_steps"]) == {1: 0, 3: 2, 5: 4, 7: 6}
    before = {"bytes_sent": 0, "bytes_uncompressed": 0, "codec_s": 0.0, "waiting_s": 0.0}
    for step in (1, 3, 5, 7):
        at = {name: dict(points).get(step) for name, points in values.items()}
        row = rows[step]
        assert at["commhooks/bytes_sent"] == row["bytes_sent"]
        since = {name: row[name] - before[name] for name in before}
        assert at["commhooks/bytes_per_pass"] == pytest.approx(since["bytes_sent"] / 2)
        rate = since["bytes_uncompressed"] / since["bytes_sent"]
        assert at["commhooks/compression_rate"] == pytest.approx(rate)
        assert rate == 1 if step == 1 else rate > 1.2
        assert at["commhooks/codec_ms"] == pytest.approx(500 * since["codec_s"], rel=1e-5)
        assert at["commhooks/waiting_ms"] == pytest.approx(500 * since["waiting_s"], rel=1e-5)
        assert at["commhooks/gradient_norm"] == pytest.approx(row["gradient"], rel=1e-5)
        if step > 1:
            assert at["commhooks/residual_norm"] == pytest.approx(row["residual"], rel=1e-5)
            assert at["commhooks/residual_over_gradient"] == pytest.approx(row["residual"] / row["gradient"], rel=1e-5)
        before = {name: row[name] for name in before}


def test_the_progress_bar_shows_one_value(ranks: list[dict[str, Any]]) -> None:
    for name in ("all", "no logger"):
        shown = ranks[0][name]["shown"]
        assert (shown[0] is None) == (name == "all") and None not in shown[1:]  # it stays until the next one
        assert shown[1] == 1 and shown[-1] > 1.2
        assert all(float(f"{value:.3g}") == pytest.approx(value, rel=1e-6) for value in shown[1:])
        assert ranks[1][name]["shown"] == [None] * 8
    assert ranks[0]["no logger"]["tb"] == {} and ranks[0]["no progress bar"]["shown"] == [None] * 8


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("accumulation", [0, 1, 2, 3]),
        ("two optimizers", list(range(8))),
        ("manual", [2, 5]),
        ("fp16", [1, 3, 5, 7]),
        ("user's", [1, 3, 5, 7]),
        ("fit twice", [3, 7, 11, 15]),
    ],
)
def test_once_every_n_steps(ranks: list[dict[str, Any]], case: str, steps: list[int]) -> None:
    values = ranks[0][case]["tb"]
    ours = {name for name in values if name.startswith("commhooks/")}
    for name in ours - {"commhooks/residual_norm", "commhooks/residual_over_gradient"}:
        assert steps_of(values, name) == steps, name
    if case == "user's":
        assert ours == {"commhooks/gradient_norm"}
    elif case == "fp16":
        no_residual = {"compressed_steps", "nonfinite_steps", "residual_norm", "residual_over_gradient"}
        assert ours == ALL - {f"commhooks/{name}" for name in no_residual}
        assert {rate for _, rate in values["commhooks/compression_rate"]} == {2}
    else:
        assert ours == ALL
    if case == "fit twice":  # every fit has a hook of its own
        assert [n for _, n in values["commhooks/compressed_steps"]] == [2, 6, 2, 6]
        per_pass = [n for _, n in values["commhooks/bytes_per_pass"]]
        assert per_pass[:2] == per_pass[2:] and per_pass[0] > per_pass[1]


def test_gradients_are_measured_before_clipping_and_after_unscaling(ranks: list[dict[str, Any]]) -> None:
    clipped = [norm for _, norm in ranks[0]["clipping"]["tb"]["commhooks/gradient_norm"]]
    assert len(clipped) == 8 and min(clipped) > 0.01
    plain = dict(ranks[0]["all"]["tb"]["commhooks/gradient_norm"])
    scaled = ranks[0]["scaler"]["tb"]
    assert dict(scaled["commhooks/gradient_norm"])[1] == pytest.approx(plain[1], rel=0.1)  # float16 against float32
    ratio = dict(ranks[0]["all"]["tb"]["commhooks/residual_over_gradient"])
    assert dict(scaled["commhooks/residual_over_gradient"])[3] == pytest.approx(ratio[3], rel=0.1)


def test_another_strategy_is_told_of_once(ranks: list[dict[str, Any]]) -> None:
    got = ranks[0]["other strategy"]
    assert len(got["warnings"]) == 1 and "DDPStrategy" in got["warnings"][0]
    assert not any(name.startswith("commhooks/") for name in got["tb"])
    for name in CASES:
        assert name == "other strategy" or ranks[0][name]["warnings"] == []
        assert ranks[1][name]["warnings"] == []


def without_fit(root: str) -> tuple[list[str], dict[str, Any]]:
    """`validate` and `test` before and without a fit."""
    monitor = CommHookMonitor(1)
    model = LoggingModel()
    model.test_step = model.validation_step  # type: ignore[method-assign]
    with support.caught_warnings() as texts:
        for each in (strategy(), DDPStrategy()):
            t = trainer(root, callbacks=[monitor], strategy=each)
            t.loggers = loggers(root)
            t.validate(model, data(), verbose=False)
            t.test(model, data(), verbose=False)
    written = tensorboard_values(Path(root, "tb", "version_0")) if dist.get_rank() == 0 else {"val_loss": []}
    return [text for text in texts if "CommHookMonitor" in text], written


def test_validate_and_test_only(run_ranks: Any, tmp_path: Path) -> None:
    for warned, written in run_ranks(without_fit, str(tmp_path)):
        assert warned == [] and "val_loss" in written
        assert not any(name.startswith("commhooks/") for name in written)


def test_it_is_pickled_with_the_trainer() -> None:
    """By Lightning's spawn launcher."""
    assert pickle.loads(pickle.dumps(CommHookMonitor(every_n_steps=2))).every_n_steps == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0; expected a number of steps, 1 or more, or None"),
        ({"every_n_steps": True}, "every_n_steps=True"),
        ({"progress_bar": "codec_m"}, r"progress_bar='codec_m'; expected one of None, .*did you mean 'codec_ms'\?"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(HookConfigError, match=text):
        CommHookMonitor(**arguments)
