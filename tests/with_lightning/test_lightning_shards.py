"""`CommHookFSDP2(shards=...)` compresses FSDP2's collectives, with and without replicas."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from commhooks import Shards
from lightning_commhooks import CommHookFSDP2
from tests.support.features import fully_shard_on_gloo
from tests.support.lightning_support import assert_equal, data, trainer
from tests.with_lightning.test_lightning_fsdp2 import Sharded, whole

pytestmark = fully_shard_on_gloo


def _fit(root: str, epochs: int, ckpt_path: str | None = None, **options: Any) -> dict[str, Any]:
    keeper = ModelCheckpoint(root, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    made = trainer(root, strategy=CommHookFSDP2(**options), max_epochs=epochs, callbacks=[keeper])
    module = Sharded(seed=5 if ckpt_path else 0)
    made.fit(module, data(), ckpt_path=ckpt_path)
    hook = made.strategy.comm_hook
    assert hook is not None
    return {
        "weights": whole(module),
        "stats": hook.stats(),
        "mesh": made.strategy.device_mesh.shape,
    }


def _resumed(root: str, **options: Any) -> dict[str, Any]:
    through = _fit(root + "/through", 2, **options)
    return {
        "through": through,
        "resumed": _fit(root + "/resumed", 2, f"{root}/through/epoch=0.ckpt", **options),
    }


@pytest.mark.parametrize(
    ("options", "world_size", "mesh"),
    [
        ({"shards": Shards(block_size=16)}, 2, (1, 2)),
        ({"shards": "int8", "hook": "bf16_compress", "replicate_size": 2}, 4, (2, 2)),
    ],
)
def test_a_fit_with_shards_resumes_bit_equal(
    run_ranks: Any, tmp_path: Path, options: Any, world_size: int, mesh: tuple[int, int]
) -> None:
    for found in run_ranks(
        _resumed, str(tmp_path), world_size=world_size, timeout_s=100, **options
    ):
        stats = found["through"]["stats"]["shards"]
        assert found["through"]["mesh"] == mesh
        assert 0 < stats["bytes_sent"] < 0.6 * stats["bytes_uncompressed"]
        assert_equal(found["resumed"]["weights"], found["through"]["weights"])
        assert found["resumed"]["stats"]["step"] == found["through"]["stats"]["step"]
