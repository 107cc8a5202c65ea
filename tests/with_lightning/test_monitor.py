"""What `CommHookMonitor` logs, and when."""

import math
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from commhooks import HookConfigError
from commhooks.hook.meter import LATEST, NAMES
from lightning_commhooks import CommHookMonitor
from tests.support import lightning_support as support
from tests.support.inside import session_of
from tests.support.lightning_support import Model, assert_equal, data, strategy, trainer, weights

ALL = {f"commhooks/{name}" for name in NAMES if name not in LATEST}
RESIDUALS = {"commhooks/residual_norm", "commhooks/residual_over_gradient"}
Values = dict[str, dict[int, float]]  # name -> step -> value


class Recorder(DummyLogger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.values: Values = defaultdict(dict)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            assert step is not None and not (
                name.startswith("commhooks/") and step in self.values[name]
            ), name
            self.values[name][step] = value


class LoggingModel(Model):
    """Logs a value itself: the monitor must log at the same steps."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Truth(pl.Callback):
    """PowerSGD's counters and norms at every optimizer step, and the progress bar after it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.shown: list[float | None] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        hook = trainer.strategy.comm_hook
        matrices = {name: p for name, p in pl_module.named_parameters() if p.dim() == 2}
        residuals = session_of(hook).state["residual"]
        gradient = math.hypot(*(float(p.grad.norm()) for p in matrices.values()))
        residual = (
            math.hypot(*(float(residuals[n].norm()) for n in matrices)) if residuals else None
        )
        self.rows.append({**hook.stats(), "gradient": gradient, "residual": residual})

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        shown = trainer.progress_bar_metrics
        self.shown.append(None if "hook_x" not in shown else float(shown["hook_x"]))
        assert not any("/" in name or len(name) > 8 for name in shown)


def fit(
    root: str,
    monitor: CommHookMonitor | None,
    *,
    model: Model | None = None,
    log: bool = True,
    fits: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Two epochs of four steps with two loggers, and what this rank wrote into them."""
    truth = Truth()
    recorders = [Recorder(), Recorder()]
    watched = [truth] if "strategy" not in options else []
    options = {"max_epochs": 2, "log_every_n_steps": 2, "strategy": strategy()} | options
    t = trainer(root, callbacks=[*filter(None, [monitor]), *watched], **options)
    model = model or LoggingModel()
    if log:
        t.loggers = recorders  # type: ignore[assignment]
    with support.caught_warnings() as texts:
        for fit in range(fits):
            t.fit_loop.max_epochs = 2 * (fit + 1)
            t.fit(model, data())
    assert recorders[0].values == recorders[1].values
    hook = getattr(t.strategy, "comm_hook", None)
    return {
        "weights": weights(model),
        "logged": dict(recorders[0].values),
        "truth": truth.rows,
        "shown": truth.shown,
        "handshakes": hook.stats()["handshakes"] if hook is not None else None,
        "warnings": [text for text in texts if "CommHookMonitor" in text],
    }


def users_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda future: future.value()[0] / dist.get_world_size())


CASES: dict[str, Any] = {
    "without": lambda root: fit(root, None),
    "all": lambda root: fit(root, CommHookMonitor()),
    "clipping": lambda root: fit(
        root, CommHookMonitor(1), gradient_clip_val=1e-3, accumulate_grad_batches=2
    ),
    "two optimizers": lambda root: fit(
        root, CommHookMonitor(1), model=support.TwoOptimizersModel()
    ),
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


def several(root: str, *cases: str) -> dict[str, Any]:
    return {name: CASES[name](f"{root}/{name}") for name in cases}


@pytest.fixture(scope="module")
def ranks(worker_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All cases, run once for all tests of this module."""
    return worker_pool.run(several, str(tmp_path_factory.mktemp("monitor")), *CASES, timeout_s=100)


def test_the_training_is_the_same(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_equal(rank["without"]["weights"], rank["all"]["weights"])
        assert rank["all"]["handshakes"] == rank["without"]["handshakes"]


def test_loggers_get_all_values(ranks: list[dict[str, Any]]) -> None:
    """On every second step, with the steps of what the module logs."""
    values, rows = ranks[0]["all"]["logged"], ranks[0]["all"]["truth"]
    assert not ALL & ranks[1]["all"]["logged"].keys()
    assert {name for name in values if name.startswith("commhooks/")} == ALL
    for name in {"loss", *ALL}:
        assert list(values[name]) == ([3, 5, 7] if name in RESIDUALS else [1, 3, 5, 7]), name
    assert values["commhooks/compressed_steps"] == {1: 0, 3: 2, 5: 4, 7: 6}
    before = {"bytes_sent": 0, "bytes_uncompressed": 0, "codec_s": 0.0, "waiting_s": 0.0}
    for step in (1, 3, 5, 7):
        row = rows[step]
        since = {name: row[name] - before[name] for name in before}
        rate = since["bytes_uncompressed"] / since["bytes_sent"]
        assert rate == 1 if step == 1 else rate > 1.2
        expected = {
            "bytes_sent": row["bytes_sent"],
            "bytes_per_pass": since["bytes_sent"] / 2,
            "compression_rate": rate,
            "codec_ms": 500 * since["codec_s"],
            "waiting_ms": 500 * since["waiting_s"],
            "gradient_norm": row["gradient"],
        }
        if step > 1:
            expected["residual_norm"] = row["residual"]
            expected["residual_over_gradient"] = row["residual"] / row["gradient"]
        assert {name: values[f"commhooks/{name}"][step] for name in expected} == pytest.approx(
            expected, rel=1e-5
        )
        before = {name: row[name] for name in before}


def test_the_progress_bar_shows_one_value(ranks: list[dict[str, Any]]) -> None:
    for name in ("all", "no logger"):
        shown = ranks[0][name]["shown"]
        # it stays until the next one
        assert (shown[0] is None) == (name == "all") and None not in shown[1:]
        assert shown[1] == 1 and shown[-1] > 1.2
        assert all(float(f"{value:.3g}") == pytest.approx(value, rel=1e-6) for value in shown[1:])
        assert ranks[1][name]["shown"] == [None] * 8
    assert ranks[0]["no progress bar"]["shown"] == [None] * 8


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("two optimizers", list(range(8))),
        ("fp16", [1, 3, 5, 7]),
        ("user's", [1, 3, 5, 7]),
        ("fit twice", [3, 7, 11, 15]),
    ],
)
def test_values_are_logged_once_every_n_steps(
    ranks: list[dict[str, Any]], case: str, steps: list[int]
) -> None:
    values = ranks[0][case]["logged"]
    ours = {name for name in values if name.startswith("commhooks/")}
    assert {name: list(values[name]) for name in ours - RESIDUALS} == dict.fromkeys(
        ours - RESIDUALS, steps
    )
    if case == "user's":
        assert ours == {"commhooks/gradient_norm"}
    elif case == "fp16":
        assert ours == ALL - RESIDUALS - {"commhooks/compressed_steps", "commhooks/nonfinite_steps"}
        assert set(values["commhooks/compression_rate"].values()) == {2}
    else:
        assert ours == ALL
    if case == "fit twice":  # every fit has a hook of its own
        assert list(values["commhooks/compressed_steps"].values()) == [2, 6, 2, 6]
        per_pass = list(values["commhooks/bytes_per_pass"].values())
        assert per_pass[:2] == per_pass[2:] and per_pass[0] > per_pass[1]


def test_gradients_are_measured_before_clipping_and_after_unscaling(
    ranks: list[dict[str, Any]],
) -> None:
    clipped, plain, scaled = (ranks[0][case]["logged"] for case in ("clipping", "all", "scaler"))
    norms = clipped["commhooks/gradient_norm"]  # with two batches per step
    assert list(norms) == [0, 1, 2, 3] and min(norms.values()) > 0.01
    # float16 against float32
    for name, step in (
        ("gradient_norm", 1),
        ("residual_over_gradient", 3),
    ):
        name = f"commhooks/{name}"
        assert scaled[name][step] == pytest.approx(plain[name][step], rel=0.1)


def test_a_monitor_with_another_strategy_warns_once(ranks: list[dict[str, Any]]) -> None:
    got = ranks[0]["other strategy"]
    assert len(got["warnings"]) == 1 and "DDPStrategy" in got["warnings"][0]
    assert not any(name.startswith("commhooks/") for name in got["logged"])
    for name in CASES:
        assert name == "other strategy" or ranks[0][name]["warnings"] == []
        assert ranks[1][name]["warnings"] == []


def without_fit(root: str) -> tuple[list[str], set[str]]:
    """`validate` and `test` before and without a fit."""
    monitor = CommHookMonitor(1)
    recorder = Recorder()
    model = LoggingModel()
    model.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    with support.caught_warnings() as texts:
        for with_strategy in (strategy(), DDPStrategy()):
            t = trainer(root, callbacks=[monitor], strategy=with_strategy)
            t.loggers = [recorder]
            t.validate(model, data(), verbose=False)
            recorder.values.pop("val_loss")
            t.test(model, data(), verbose=False)
    return [text for text in texts if "CommHookMonitor" in text], set(recorder.values) - {"epoch"}


def test_nothing_is_logged_in_validate_and_test(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(without_fit, str(tmp_path)) == [([], set())] * 2


def test_it_is_pickled_with_the_trainer() -> None:
    """By Lightning's spawn launcher."""
    assert pickle.loads(pickle.dumps(CommHookMonitor(every_n_steps=2))).every_n_steps == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0; expected a number of steps, 1 or more, or None"),
        ({"every_n_steps": True}, "every_n_steps=True"),
        (
            {"progress_bar": "codec_m"},
            r"progress_bar='codec_m'; expected one of None, .*did you mean 'codec_ms'\?",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(HookConfigError, match=text):
        CommHookMonitor(**arguments)
