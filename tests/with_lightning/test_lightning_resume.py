"""Checkpoints of a Trainer with CommHookDDP and parameters that are unfrozen on the way.

That a resume is exact: tests/checkpoint/test_resume_matrix.py.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import BackboneFinetuning

from tests.support.lightning_fits import SAVED_AT, fit, path_at
from tests.support.lightning_support import Model


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
