"""`CommHookFSDP2` refuses a hook's folder that is incomplete, outdated, foreign or hostile."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_lightning_fsdp2 import Sharded, fit, strategy, whole

from commhooks import HookRunError, PayloadError
from tests.support.lightning_support import data, trainer
from tests.support.models import bits_equal


def _saved(root: str, hook: str) -> Any:
    made = trainer(root, strategy=strategy(hook=hook), max_epochs=1)
    made.fit(Sharded(), data())
    made.save_checkpoint(f"{root}/whole.ckpt")
    return made


def _incomplete(root: str) -> dict[str, Any]:
    made = _saved(root, "int8")
    folder = Path(root, "whole.ckpt", "commhooks")
    made.save_checkpoint(f"{root}/weights.ckpt")
    made.save_checkpoint(f"{root}/weights.ckpt", weights_only=True)
    dist.barrier()
    results = {
        "whole": folder.is_dir(),
        "outdated": Path(root, "weights.ckpt", "commhooks").exists(),
    }
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / ".metadata").unlink()  # as after a kill while the hook was saved
    dist.barrier()
    resumed = fit(f"{root}/resumed", 2, f"{root}/whole.ckpt", hook="int8")
    return results | {"warnings": resumed["warnings"], "step": resumed["stats"]["step"]}


def test_a_folder_that_is_incomplete_or_of_other_weights_is_not_loaded(
    run_ranks: Any, tmp_path: Path
) -> None:
    results = run_ranks(_incomplete, str(tmp_path), world_size=2)
    for result in results:
        assert result["whole"] and not result["outdated"]
        assert result["step"] == 4  # of the second epoch alone
    assert any(
        "its save was interrupted): hook 'int8_compress' continues" in text
        for text in results[0]["warnings"]
    )


def _of_another_hook(root: str) -> dict[str, Any]:
    _saved(root, "allreduce")
    module = Sharded(seed=5)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with pytest.raises(PayloadError) as error:
        made = trainer(f"{root}/strict", strategy=strategy(hook="int8"), max_epochs=2)
        made.fit(module, data(), ckpt_path=f"{root}/whole.ckpt")
    begun = fit(f"{root}/anew", 2, f"{root}/whole.ckpt", hook="int8", strict=False)
    without = fit(f"{root}/without", 2, f"{root}/whole.ckpt", hook=None)
    files = Path(root, "without", "epoch=1.ckpt", "commhooks").exists()
    return {
        "error": str(error.value),
        "unchanged": bits_equal(before, whole(module)),
        "compressed": begun["stats"]["compressed_steps"],
        "without": without,
        "of it": files,
    }


def test_the_state_of_another_hook_is_refused(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_of_another_hook, str(tmp_path), world_size=2):
        assert "was saved by another hook" in result["error"] and "strict=False" in result["error"]
        assert result["unchanged"]  # the weights
        assert result["compressed"] == 4
        assert not result["of it"] and not any(
            "hook" in text for text in result["without"]["warnings"]
        )


class _Hostile:
    def __init__(self, planted: str) -> None:
        self.planted = planted

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.planted),)


def _hostile(root: str) -> bool:
    _saved(root, "int8")
    planted = f"{root}/planted"
    dcp.save(
        {"hook": {"commhooks": _Hostile(planted)}}, checkpoint_id=f"{root}/whole.ckpt/commhooks"
    )
    with pytest.raises(
        PayloadError, match=r"commhooks cannot be read \(.*Weights only.*\)\. .* remove this folder"
    ):
        fit(f"{root}/resumed", 2, f"{root}/whole.ckpt", hook="int8", strict=False)
    return Path(planted).exists()


def test_what_is_no_plain_data_is_not_read(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(_hostile, str(tmp_path), world_size=2) == [False] * 2


_is_file = Path.is_file


def _slow(path: Path) -> bool:
    """Time enough for both ranks to see a file that one of them will then not find."""
    is_file = _is_file(path)
    if is_file:
        time.sleep(0.3 + 0.3 * dist.get_rank())
    return is_file


def _in_the_way(root: str) -> tuple[str, bool]:
    made = _saved(root, "int8")
    path = Path(root, "file.ckpt")
    if dist.get_rank() == 0:
        path.write_text("a checkpoint in one file")
    dist.barrier()
    with mock.patch.object(Path, "is_file", _slow):
        made.save_checkpoint(path)
    last = path / "commhooks" / ".metadata"
    dist.barrier()
    replaced = last.is_file()
    dist.barrier()
    if dist.get_rank() == 0:
        last.unlink()
        last.mkdir()  # cannot be removed as a file
    dist.barrier()
    with pytest.raises(HookRunError) as error:
        made.save_checkpoint(path)
    return str(error.value), replaced


def test_whatever_is_in_the_way_of_a_save_is_replaced_or_an_error(
    run_ranks: Any, tmp_path: Path
) -> None:
    """A file is replaced, as by Lightning. What cannot be removed is an error on all ranks."""
    for text, replaced in run_ranks(_in_the_way, str(tmp_path), world_size=2):
        assert replaced and "file.ckpt cannot be replaced: " in text and ".metadata" in text
