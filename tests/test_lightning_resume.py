"""Checkpoints of a Trainer with CommHookDDP: saved once, exact on resume, never in the way."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_support as support
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import BackboneFinetuning, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning_support import STEPS_PER_EPOCH, Model, Watch, assert_equal, data, difference, strategy, trainer, weights
from workers import RanksFailed

from commhooks import CommHook, HookConfigError, PowerSGD
from lightning_commhooks import CommHookCheckpoint
from lightning_commhooks.checkpoint import CHECKPOINT_KEY, in_signal_handler

# Compressing from the second epoch on; checkpoints at the end of the second, so that residuals are in them.
HOOK = PowerSGD(start_powerSGD_iter=STEPS_PER_EPOCH, matrix_approximation_rank=2)
SAVED_AT = 2 * STEPS_PER_EPOCH


def keeper(root: str, **options: Any) -> ModelCheckpoint:
    """A checkpoint after every second epoch: `root/step=N.ckpt`."""
    return ModelCheckpoint(root, filename="{step}", save_top_k=-1, every_n_epochs=2, **options)


def path_at(root: str | Path, step: int) -> str:
    return os.path.join(str(root), f"step={step}.ckpt")


def fit(
    root: str,
    *,
    ckpt_path: str | None = None,
    seed: int = 0,
    save: bool = False,
    save_to: str | None = None,
    epochs: int = 4,
    callbacks: Any = (),
    model: Model | None = None,
    make: Any = None,
    **strategy_options: Any,
) -> dict[str, Any]:
    """One Trainer, strategy and model from new; what came of it on this rank."""
    watch = Watch()
    model = model or Model(seed=seed)
    strategy_options.setdefault("hook", HOOK)
    made = make() if make is not None else strategy(**strategy_options)
    t = trainer(
        root,
        strategy=made,
        max_epochs=epochs,
        callbacks=[watch, *callbacks, *([keeper(save_to or root)] if save or save_to else [])],
    )
    with support.caught_warnings() as texts:
        t.fit(model, data(), ckpt_path=ckpt_path)
    hook = getattr(t.strategy, "comm_hook", None)
    return {
        "weights": watch.weights,
        "start": watch.start_steps,
        "final": weights(model),
        "stats": hook.stats() if hook is not None else None,
        "hook state": hook.state_dict("per_rank") if hook is not None else None,
        "warnings": [text for text in texts if "hook" in text.lower() or "residual" in text],
    }


def residuals(payload: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Name -> residual, of a payload of this rank."""
    return {
        name: entry["residual"][0] if isinstance(entry["residual"], list) else entry["residual"]
        for name, entry in payload["parameters"].items()
        if entry["residual"] is not None
    }


# ------------------------------------------------------------------------------------------------------------- exact


def _exact(root: str, save_residual: str, bucket_cap_mb: float) -> dict[str, Any]:
    options: dict[str, Any] = {"save_residual": save_residual, "bucket_cap_mb": bucket_cap_mb}
    saved = fit(root, save=True, **options)
    return {
        "saved": saved,
        "resumed": fit(root, ckpt_path=path_at(root, SAVED_AT), seed=1, save_to=f"{root}/resumed", **options),
        "never saved": fit(root, **options),
        "dropped": _without_residual(root, options),
    }


def _without_residual(root: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same resume with the residuals taken out: shows that the comparison sees them."""
    path = os.path.join(root, f"without-{dist.get_rank()}.ckpt")
    checkpoint = torch.load(path_at(root, SAVED_AT), weights_only=True)
    for entry in checkpoint[CHECKPOINT_KEY]["parameters"].values():
        entry["residual"] = None
    checkpoint[CHECKPOINT_KEY] |= {"residual": "none", "residual_ranks": []}
    torch.save(checkpoint, path)
    return fit(root, ckpt_path=path, seed=1, **options)


@pytest.mark.parametrize("save_residual", ["mean", "per_rank"])
@pytest.mark.parametrize("bucket_cap_mb", [25, support.SEVERAL_BUCKETS_MB], ids=["one bucket", "several buckets"])
def test_the_run_that_saved_and_the_run_that_resumes_are_bit_equal(
    run_ranks: Any, tmp_path: Path, save_residual: str, bucket_cap_mb: float
) -> None:
    ranks = run_ranks(_exact, str(tmp_path), save_residual, bucket_cap_mb)
    for rank in ranks:
        saved, resumed, never, dropped = (rank[n] for n in ("saved", "resumed", "never saved", "dropped"))
        assert resumed["start"] == [SAVED_AT]
        assert sorted(resumed["weights"]) == list(range(SAVED_AT + 1, 2 * SAVED_AT + 1))
        for step, each in resumed["weights"].items():
            assert_equal(each, saved["weights"][step])
        assert resumed["stats"]["compressed_steps"] == SAVED_AT
        assert resumed["stats"]["collectives_last_pass"] == (2 if bucket_cap_mb == 25 else 6)
        # The memory at the end is the same too.
        assert_equal(residuals(resumed["hook state"]), residuals(saved["hook state"]))
        # Saving the mean changes the run that saves by rounding only; saving per rank does not touch it.
        late = SAVED_AT + 5
        if save_residual == "mean":
            assert difference(saved["weights"][late], never["weights"][late]) < 1e-6
        else:
            assert_equal(saved["weights"][late], never["weights"][late])
        assert difference(dropped["weights"][late], never["weights"][late]) > 1e-4
        assert_equal(rank["saved"]["final"], ranks[0]["saved"]["final"])
    # What is compared is worth comparing: the ranks' own residuals differ.
    own = [residuals(rank["never saved"]["hook state"]) for rank in ranks]
    assert difference(*own) > 1e-5


def _save(root: str) -> dict[str, Any]:
    return fit(root, save=True, epochs=2)


def _resume(root: str) -> dict[str, Any]:
    return fit(root, ckpt_path=path_at(root, _only_step(root)), seed=1, epochs=4)


def _only_step(root: str) -> int:
    (name,) = (name for name in os.listdir(root) if name.startswith("step="))
    return int(name.removeprefix("step=").removesuffix(".ckpt"))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
def test_another_number_of_ranks_resumes_from_the_mean(run_ranks: Any, tmp_path: Path, before: int, after: int) -> None:
    root = str(tmp_path)
    saved = run_ranks(_save, root, world_size=before)
    resumed = run_ranks(_resume, root, world_size=after)
    payload = torch.load(path_at(root, _only_step(root)), weights_only=True)[CHECKPOINT_KEY]
    assert payload["residual"] == "mean" and payload["world_size"] == before
    mean = residuals(payload)
    assert max(float(each.abs().max()) for each in mean.values()) > 1e-5
    assert_equal(mean, residuals(saved[0]["hook state"]))  # what every rank went on with
    for rank in resumed:
        assert rank["start"] == [_only_step(root)]
        assert rank["stats"]["compressed_steps"] == rank["stats"]["backward_passes"] > 0
        assert_equal(rank["final"], resumed[0]["final"])
        assert not rank["warnings"]


# ------------------------------------------------------------------------------------------------------- what is saved


def _named_paths(root: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    best = ModelCheckpoint(root, filename="best", monitor="epoch_as_float", mode="max", save_last=True)

    class Logs(Model):
        def on_train_epoch_end(self) -> None:
            self.log("epoch_as_float", float(self.current_epoch))

    watch = Watch()
    t = trainer(root, strategy=strategy(hook=HOOK), max_epochs=2, callbacks=[best, watch])
    t.fit(Logs(), data())
    t.save_checkpoint(os.path.join(root, "hpc_ckpt_1.ckpt"))
    t.fit_loop.max_epochs = 3
    t.fit(Logs(seed=1), data(), ckpt_path="best")
    out["best"] = watch.start_steps[-1]
    for name in ("last", "hpc"):
        watch = Watch()
        again = ModelCheckpoint(root, filename="best", monitor="epoch_as_float", mode="max", save_last=True)
        t = trainer(root, strategy=strategy(hook=HOOK), max_epochs=4, callbacks=[again, watch])
        t.fit(Logs(seed=1), data(), ckpt_path=name)
        out[name] = watch.start_steps
    return out


def test_best_last_and_hpc(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_named_paths, str(tmp_path)):
        assert rank["best"] == SAVED_AT
        assert rank["last"] == [SAVED_AT + STEPS_PER_EPOCH]  # saved by the fit that resumed from "best"
        assert rank["hpc"] == [SAVED_AT]


def _count_states(root: str) -> dict[str, Any]:
    calls: list[Any] = []
    original = CommHook.state_dict

    def counted(self: CommHook, *args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return original(self, *args, **kwargs)

    CommHook.state_dict = counted  # type: ignore[method-assign]
    try:
        explicit = CommHookCheckpoint(save_residual="per_rank")
        t = trainer(root, strategy=strategy(hook=HOOK), max_epochs=2, callbacks=[keeper(root), explicit])
        t.fit(Model(), data())
        full = len(calls)
        t.save_checkpoint(os.path.join(root, "weights.ckpt"), weights_only=True)
        t.validate(Model(), data(), verbose=False)
        t.save_checkpoint(os.path.join(root, "other-module.ckpt"))
    finally:
        CommHook.state_dict = original  # type: ignore[method-assign]
    ours = [callback for callback in t.callbacks if isinstance(callback, CommHookCheckpoint)]
    return {"full": full, "all": len(calls), "callbacks": len(ours), "first": ours[0] is explicit}


def test_state_is_saved_once_and_in_full_checkpoints_only(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_count_states, str(tmp_path)):
        assert rank == {"full": 1, "all": 1, "callbacks": 1, "first": True}
    full = torch.load(path_at(tmp_path, SAVED_AT), weights_only=True)
    payload = full.pop(CHECKPOINT_KEY)
    assert payload["exact"] is True and payload["residual"] == "per_rank" and payload["residual_ranks"] == [0, 1]
    entry = payload["parameters"]["net.2.weight"]
    assert [each.shape for each in entry["residual"]] == [(32, 32), (32, 32)]
    assert not torch.equal(*entry["residual"])
    assert "residual" not in str(full.keys()) + str(full["callbacks"].keys()) and "CommHook" not in str(full)
    assert CHECKPOINT_KEY not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    # The hook's memory belongs to the module that was trained, not to one that was looked at afterwards.
    assert CHECKPOINT_KEY not in torch.load(tmp_path / "other-module.ckpt", weights_only=True)


def _saves(root: str, **options: Any) -> Any:
    fit(root, save=True, epochs=2, **options)
    return torch.load(path_at(root, SAVED_AT), weights_only=True)[CHECKPOINT_KEY]["residual"]


@pytest.mark.parametrize(
    ("on_strategy", "on_callback", "saved"),
    [
        ({}, None, "mean"),
        ({"save_residual": "drop"}, None, "none"),
        ({}, {"save_residual": "drop"}, "none"),
        ({"save_residual": "per_rank"}, {}, "per_rank"),
        ({"save_residual": "per_rank", "strict": True}, {"save_residual": "per_rank", "strict": True}, "per_rank"),
    ],
)
def test_settings_on_strategy_or_callback(
    run_ranks: Any, tmp_path: Path, on_strategy: dict[str, Any], on_callback: dict[str, Any] | None, saved: str
) -> None:
    callbacks = [] if on_callback is None else [CommHookCheckpoint(**on_callback)]
    assert run_ranks(_saves, str(tmp_path), callbacks=callbacks, **on_strategy) == [saved, saved]


@pytest.mark.parametrize(
    ("on_strategy", "callbacks", "text"),
    [
        (
            {"save_residual": "mean"},
            [CommHookCheckpoint(save_residual="drop")],
            r"CommHookDDP\(save_residual='mean'\) and CommHookCheckpoint\(save_residual='drop'\) contradict",
        ),
        (
            {"strict": False},
            [CommHookCheckpoint(strict=True)],
            r"CommHookDDP\(strict=False\) and CommHookCheckpoint\(strict=True\) contradict each other; set strict in",
        ),
        ({}, [CommHookCheckpoint(), CommHookCheckpoint()], "2 CommHookCheckpoint callbacks in one Trainer"),
    ],
)
def test_contradicting_settings(
    run_ranks: Any, tmp_path: Path, on_strategy: dict[str, Any], callbacks: Any, text: str
) -> None:
    with pytest.raises(RanksFailed, match=text):
        run_ranks(_saves, str(tmp_path), callbacks=callbacks, **on_strategy)


def test_wrong_settings_of_the_callback() -> None:
    with pytest.raises(HookConfigError, match="save_residual='men' .did you mean 'mean'.*; expected one of 'mean'"):
        CommHookCheckpoint(save_residual="men")  # type: ignore[arg-type]
    with pytest.raises(HookConfigError, match="strict='no'; expected True or False"):
        CommHookCheckpoint(strict="no")  # type: ignore[arg-type]


def _callback_without_our_strategy(root: str) -> Any:
    return fit(root, epochs=1, make=DDPStrategy, callbacks=[CommHookCheckpoint()])["warnings"]


def test_callback_with_another_strategy_says_so(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_callback_without_our_strategy, str(tmp_path))
    assert len(ranks[0]) == 1 and "nothing to save" in ranks[0][0] and "DDPStrategy" in ranks[0][0]


# ----------------------------------------------------------------------------------------------------- what is loaded


def _from_plain_ddp(root: str) -> dict[str, Any]:
    plain = functools.partial(DDPStrategy, bucket_cap_mb=support.SEVERAL_BUCKETS_MB)
    fit(root, save=True, epochs=2, make=plain)
    ours = fit(root, ckpt_path=path_at(root, SAVED_AT), seed=1, save=True)
    back = fit(root, ckpt_path=path_at(root, 2 * SAVED_AT), seed=1, make=plain, epochs=5)
    return {"ours": ours, "back": back}


def test_a_checkpoint_of_plain_ddp_and_back(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_from_plain_ddp, str(tmp_path))
    for rank in ranks:
        assert rank["ours"]["start"] == [0]
        assert rank["ours"]["stats"]["compressed_steps"] == STEPS_PER_EPOCH
        assert_equal(rank["ours"]["final"], ranks[0]["ours"]["final"])
        assert rank["back"]["warnings"] == []
    (warning,) = ranks[0]["ours"]["warnings"]
    assert "holds no state of a communication hook" in warning
    assert ranks[1]["ours"]["warnings"] == []


def _from_another(root: str, kind: str, strict: bool | None) -> dict[str, Any]:
    saver = {"hook": "allreduce"} if kind == "hook" else {}
    fit(root, save=True, epochs=2, **saver)
    model = Model(seed=1, extra=kind == "model")
    model.strict_loading = False
    rank = 1 if kind == "rank" else 2
    hook = PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=rank)
    return fit(root, ckpt_path=path_at(root, SAVED_AT), model=model, hook=hook, strict=strict)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hook", "the saved state is of hook 'allreduce', this one is 'powerSGD'"),
        ("model", "(?s)the saved hook state is of another model:.*extra.weight: in the model, not in the saved state"),
    ],
)
def test_another_hook_or_model(run_ranks: Any, tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / "strict").mkdir()
    with pytest.raises(RanksFailed, match=text) as failed:
        run_ranks(_from_another, str(tmp_path / "strict"), kind, None)
    assert failed.value.errors[0].type_name == "PayloadError"
    ranks = run_ranks(_from_another, str(tmp_path), kind, False)
    for rank in ranks:
        assert rank["start"] == [0 if kind == "hook" else SAVED_AT]
        assert_equal(rank["final"], ranks[0]["final"])
    assert any("fresh memory" in warning for warning in ranks[0]["warnings"])


def test_another_rank_keeps_step_start_and_residuals(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_from_another, str(tmp_path), "rank", None)
    for rank in ranks:
        assert rank["start"] == [SAVED_AT]
        assert rank["hook state"]["options"]["start_powerSGD_iter"] == STEPS_PER_EPOCH  # the saved one wins
        assert rank["hook state"]["parameters"]["net.2.weight"]["q"].shape[0] == 1
        assert_equal(rank["final"], ranks[0]["final"])
        assert not rank["warnings"]


def _validate_then_fit(root: str) -> dict[str, Any]:
    fit(root, save=True, epochs=2)
    watch, model = Watch(), Model()
    t = trainer(root, strategy=strategy(hook=HOOK), max_epochs=2, callbacks=[watch])
    t.validate(Model(), data(), ckpt_path=path_at(root, SAVED_AT), verbose=False)
    t.predict(_Predicts(), data(), ckpt_path=path_at(root, SAVED_AT), return_predictions=False)
    t.test(_Predicts(), data(), ckpt_path=path_at(root, SAVED_AT), verbose=False)
    t.fit(model, data())
    return {"start": watch.start_steps, "after": weights(model), "alone": fit(root, epochs=2)["final"]}


class _Predicts(Model):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


def test_nothing_leaks_from_validate_predict_and_test_into_fit(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_validate_then_fit, str(tmp_path)):
        assert rank["start"] == [0]
        assert_equal(rank["after"], rank["alone"])


class _FinderLater(LearningRateFinder):
    """Not before the third epoch; notes the hook's state before and after."""

    def on_fit_start(self, *_: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 2 and self.optimal_lr is None:
            hook = trainer.strategy.comm_hook
            # The finder's own checkpoint makes the mean of all residuals; so does this, and a mean has itself as mean.
            before = hook.state_dict("mean")
            self.lr_find(trainer, pl_module)
            self.states = before, hook.state_dict("per_rank")
            self.steps = hook.stats()["backward_passes"]


def _rewound(root: str) -> dict[str, Any]:
    options: dict[str, Any] = {"num_training_steps": 6, "max_lr": 0.1, "update_attr": False}
    later = _FinderLater(**options)
    fit(root, callbacks=[later])
    return {
        "without": fit(root)["final"],
        "at start": fit(root, callbacks=[LearningRateFinder(**options)])["final"],
        "states": later.states,
        "steps": later.steps,
    }


def test_the_learning_rate_finder_rewinds_the_hook(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_rewound, str(tmp_path)):
        assert_equal(rank["at start"], rank["without"])
        before, after = rank["states"]
        assert rank["steps"] > SAVED_AT  # the finder has trained,
        assert before["step"] == after["step"] == SAVED_AT  # and nothing is left of it
        assert_equal(residuals(before), residuals(after))
        for name in residuals(before):
            assert torch.equal(before["parameters"][name]["q"], after["parameters"][name]["q"])


def _saved_in_the_background(root: str) -> dict[str, Any]:
    for name, plugins in {"thread": [AsyncCheckpointIO()], "at once": []}.items():
        folder = os.path.join(root, name)
        t = trainer(folder, strategy=strategy(hook=HOOK), max_epochs=4, callbacks=[keeper(folder)], plugins=plugins)
        t.fit(Model(), data())
    return {}


def test_a_save_in_the_background_holds_the_state_of_its_moment(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_saved_in_the_background, str(tmp_path))
    for step in (SAVED_AT, 2 * SAVED_AT):
        thread, at_once = (torch.load(path_at(tmp_path / n, step), weights_only=True) for n in ("thread", "at once"))
        assert_equal(residuals(thread[CHECKPOINT_KEY]), residuals(at_once[CHECKPOINT_KEY]))
        assert thread[CHECKPOINT_KEY]["step"] == step


# ------------------------------------------------------------------------------------- saves without the other ranks


class _Breaks(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == SAVED_AT:
            raise RuntimeError("broken on purpose")
        return self.loss(batch)


def _exception(root: str) -> dict[str, Any]:
    callbacks = [OnExceptionCheckpoint(root, filename="broken")]
    # OnExceptionCheckpoint removes its file in teardown, which an exception never reaches.
    with pytest.raises(RuntimeError, match="broken on purpose"):
        fit(root, epochs=4, model=_Breaks(), callbacks=callbacks)
    path = os.path.join(root, "broken.ckpt")
    return fit(root, ckpt_path=path, seed=1, epochs=4)


def test_a_save_in_an_exception_communicates_nothing(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_exception, str(tmp_path))
    payload = torch.load(tmp_path / "broken.ckpt", weights_only=True)[CHECKPOINT_KEY]
    assert (payload["exact"], payload["residual"], payload["step"]) == (False, "none", SAVED_AT)
    assert payload["parameters"]["net.2.weight"]["q"] is not None
    for rank in ranks:
        assert rank["start"] == [SAVED_AT]
        assert_equal(rank["final"], ranks[0]["final"])
    assert any("marked inexact" in warning for warning in ranks[0]["warnings"])


class _Slurm(SLURMEnvironment):
    """Lightning's own requeueing signal handler on the ranks of the pool."""

    main_address = "unused"  # type: ignore[assignment]
    main_port = 0  # type: ignore[assignment]

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class _Signals(pl.Callback):
    """Both ranks get the signal between two steps."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            os.kill(os.getpid(), signal.SIGUSR2)


def _slurm(root: str) -> dict[str, Any]:
    os.environ["SLURM_JOB_ID"] = "1"  # the handler calls `scontrol requeue 1`; no matter if there is none
    before = signal.getsignal(signal.SIGUSR2)
    calls: list[bool] = []
    original = CommHook.state_dict

    def noted(self: CommHook, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["joint"])
        return original(self, *args, **kwargs)

    CommHook.state_dict = noted  # type: ignore[method-assign]
    try:
        t = trainer(
            root,
            strategy=strategy(hook=HOOK, cluster_environment=_Slurm(requeue_signal=signal.SIGUSR2)),
            max_epochs=4,
            callbacks=[_Signals(), keeper(root)],
            pool=False,
        )
        t.fit(Model(), data())
    finally:
        CommHook.state_dict = original  # type: ignore[method-assign]
        signal.signal(signal.SIGUSR2, before)
        del os.environ["SLURM_JOB_ID"]
    return {"joint": calls}


def test_a_save_in_a_signal_handler_communicates_nothing(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_slurm, str(tmp_path))
    for rank in ranks:
        assert rank["joint"] == [False, True, True]  # in the handler; at the ends of epochs 2 and 4
    payload = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)[CHECKPOINT_KEY]
    assert (payload["exact"], payload["residual"], payload["step"]) == (False, "none", SAVED_AT)
    assert torch.load(path_at(tmp_path, SAVED_AT), weights_only=True)[CHECKPOINT_KEY]["exact"] is True


def test_signal_handlers_of_every_kind_are_known() -> None:
    seen: list[bool] = []

    def plain(*_: Any) -> None:
        seen.append(in_signal_handler())

    class Object:
        def __call__(self, *_: Any) -> None:
            seen.append(in_signal_handler())

        def method(self, *_: Any) -> None:
            seen.append(in_signal_handler())

    before = signal.getsignal(signal.SIGUSR2)
    try:
        for handler in (plain, Object(), Object().method, functools.partial(plain, 1)):
            assert not in_signal_handler()
            signal.signal(signal.SIGUSR2, handler)
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert seen == [True] * 4


# ------------------------------------------------------------------------------------------------------------ warnings


class _Finetuned(Model):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(16, 16)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((self.backbone(batch[0]), batch[1]))


def _finetune(root: str) -> dict[str, Any]:
    """Four epochs, of which the backbone is trained from the second on; and the last two again from a checkpoint."""

    def run(**options: Any) -> dict[str, Any]:
        # A new learning rate of its own at each start, so that the backbone really moves.
        unfreezer = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, verbose=False)
        return fit(root, epochs=4, model=_Finetuned(), callbacks=[unfreezer], **options)

    return {"whole": run(save=True), "resumed": run(ckpt_path=path_at(root, SAVED_AT))}


def test_parameters_unfrozen_after_the_wrap_are_named_once(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_finetune, str(tmp_path))
    (warning,) = (text for text in first["whole"]["warnings"] if "backbone" in text)
    assert "2 parameters (the first is backbone.weight) were frozen or missing when the model was wrapped" in warning
    assert not [text for text in second["whole"]["warnings"] if "backbone" in text]
    # What the warning says is so: DDP averages the rest and not the backbone.
    one, other = first["whole"]["final"], second["whole"]["final"]
    for name in one:
        assert torch.equal(one[name], other[name]) == (not name.startswith("backbone.")), name
    # The checkpoint is of the parameters that DDP reduces, then as now: it loads without a word, and strictly.
    assert not any(name.startswith("backbone.") for name in first["whole"]["hook state"]["parameters"])
    for rank in (first, second):
        assert rank["resumed"]["start"] == [SAVED_AT]
        assert not [text for text in rank["resumed"]["warnings"] if "saved" in text]


def _large(root: str) -> list[str]:
    import lightning_commhooks.checkpoint as module

    limit, module.PER_RANK_WARNING_BYTES = module.PER_RANK_WARNING_BYTES, 1000
    try:
        return fit(root, save=True, save_residual="per_rank")["warnings"]
    finally:
        module.PER_RANK_WARNING_BYTES = limit


def test_large_per_rank_checkpoints_are_warned_about_once(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_large, str(tmp_path))
    assert len(ranks[0]) == 1 and "save_residual='mean' needs one copy" in ranks[0][0]
    assert ranks[1] == []
