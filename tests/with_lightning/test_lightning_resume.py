"""Checkpoints of a Trainer with CommHookDDP: a resume is exact, on another number of ranks from the mean."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning

from lightning_commhooks.checkpoint import CHECKPOINT_KEY
from tests.support import lightning_support as support
from tests.support.lightning_fits import SAVED_AT, fit, path_at, residuals
from tests.support.lightning_support import Model, assert_equal, difference


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


@pytest.mark.parametrize(("save_residual", "bucket_cap_mb"), [("mean", 25), ("per_rank", support.SEVERAL_BUCKETS_MB)])
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


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3)])
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
