"""A Trainer loads checkpoints of other hooks, and nothing leaks from one call into the next."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder

from commhooks import PayloadError, PowerSGD
from tests.support.lightning_support import (
    HOOK,
    SAVED_AT,
    Model,
    Watch,
    assert_equal,
    data,
    fit,
    path_at,
    residuals,
    strategy,
    trainer,
    weights,
)


def _from_another(root: str, kind: str, text: str) -> dict[str, Any]:
    saver = {"hook": "allreduce"} if kind == "hook" else {}
    fit(root, save=True, epochs=2, **saver)
    hook = PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2)

    def resume(**strict: bool) -> dict[str, Any]:
        model = Model(seed=1, extra=kind == "model")
        model.strict_loading = False
        return fit(
            root, ckpt_path=path_at(root, SAVED_AT), model=model, hook=hook, epochs=3, **strict
        )

    with pytest.raises(PayloadError, match=text):
        resume()
    return resume(strict=False)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hook", "the saved state is of hook 'allreduce', but this hook is 'powerSGD'"),
        (
            "model",
            (
                "(?s)the saved hook state is of another model:.*extra.weight: in the model, not in"
                " the saved state"
            ),
        ),
    ],
)
def test_a_checkpoint_of_another_hook_or_model_begins_with_fresh_memory(
    run_ranks: Any, tmp_path: Path, kind: str, text: str
) -> None:
    ranks = run_ranks(_from_another, str(tmp_path), kind, text)
    for rank in ranks:
        assert rank["start"] == [0 if kind == "hook" else SAVED_AT]
        assert_equal(rank["final"], ranks[0]["final"])
    assert any("fresh state" in warning for warning in ranks[0]["warnings"])


def _from_damaged(root: str) -> dict[str, str]:
    fit(root, save=True, epochs=2)
    path = next(Path(root).glob("*.ckpt"))
    saved = torch.load(path, weights_only=True)
    torch.save(saved | {"commhooks": saved["commhooks"] | {"step": -1}}, f"{root}/damaged.ckpt")
    Path(f"{root}/cut.ckpt").write_bytes(path.read_bytes()[:-100])
    Path(f"{root}/empty.ckpt").touch()
    texts = {}
    for name in ("damaged", "cut", "empty"):
        with pytest.raises(PayloadError) as error:
            fit(root, ckpt_path=f"{root}/{name}.ckpt")
        texts[name] = str(error.value)
    return texts


def test_a_damaged_file_is_named_and_a_truncated_one_called_cut_off(
    run_ranks: Any, tmp_path: Path
) -> None:
    (texts,) = run_ranks(_from_damaged, str(tmp_path), world_size=1)
    assert texts["damaged"].startswith(
        f"{tmp_path}/damaged.ckpt, key 'commhooks': damaged hook state: 'step' is -1"
    )
    assert "Resume Lightning from another checkpoint" in texts["damaged"]
    assert texts["cut"].startswith(f"{tmp_path}/cut.ckpt cannot be read: it is cut off after ")
    assert texts["empty"].startswith(f"{tmp_path}/empty.ckpt cannot be read: it is empty, because ")
    assert "trust" not in texts["cut"] + texts["empty"]


def _validate_then_fit(root: str) -> dict[str, Any]:
    fit(root, save=True, epochs=2)
    watch = Watch()
    model = Model()
    t = trainer(root, strategy=strategy(hook=HOOK), max_epochs=2, callbacks=[watch])
    t.validate(Model(), data(), ckpt_path=path_at(root, SAVED_AT), verbose=False)
    t.predict(_Predicts(), data(), ckpt_path=path_at(root, SAVED_AT), return_predictions=False)
    t.test(_Predicts(), data(), ckpt_path=path_at(root, SAVED_AT), verbose=False)
    t.fit(model, data())
    return {
        "start": watch.start_steps,
        "after": weights(model),
        "alone": fit(root, epochs=2)["final"],
    }


class _Predicts(Model):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


def test_nothing_leaks_from_validate_predict_and_test_into_fit(
    run_ranks: Any, tmp_path: Path
) -> None:
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
            # The finder's own checkpoint makes the mean of all residuals; so does this, and a mean
            # has itself as mean.
            before = hook.state_dict("mean")
            self.lr_find(trainer, pl_module)
            self.states = before, hook.state_dict("per_rank")
            self.steps = hook.stats()["backward_passes"]


def _rewound(root: str) -> dict[str, Any]:
    options: dict[str, Any] = {"num_training_steps": 6, "max_lr": 0.1, "update_attr": False}
    later = _FinderLater(**options)
    fit(root, callbacks=[later])
    return {
        "without": fit(root, epochs=3)["final"],
        "at start": fit(root, epochs=3, callbacks=[LearningRateFinder(**options)])["final"],
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


class NotPlain:
    def __setstate__(self, state: Any) -> None:
        raise ImportError("no module named a")


def test_what_a_trusted_file_raises_is_not_taken_for_distrust(tmp_path: Path) -> None:
    value = NotPlain()
    value.anything = 1
    torch.save({"a": value}, tmp_path / "a.ckpt")
    text = (
        r"a.ckpt cannot be read \(it holds a .*NotPlain\)\. Nothing in it was run;"
        r" .*add_safe_globals\(\[.*NotPlain\]\)"
    )
    with pytest.raises(PayloadError, match=text):
        strategy().load_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ImportError, match="no module named a"):
        strategy().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
