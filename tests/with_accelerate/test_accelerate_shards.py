"""`CommHookKwargs(shards=...)`: Accelerate's FSDP2 with compressed collectives."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.yaml_settings import VARIABLE
from commhooks import HookConfigError, Shards
from tests.support.accelerators import launched
from tests.support.features import fully_shard_on_gloo
from tests.with_accelerate.test_accelerate_replicas import Run

pytestmark = fully_shard_on_gloo


@launched
def _resumed(root: str, replicas: int | None, **arguments: Any) -> dict[str, Any]:
    through = Run(CommHookKwargs(**arguments), replicas=replicas).train(2)
    through.accelerator.save_state(root)
    resumed = Run(CommHookKwargs(**arguments), replicas=replicas)
    resumed.accelerator.load_state(root)
    resumed.step = through.step
    through.train(2)
    resumed.train(2)
    stats, loaded = through.hook.stats(), resumed.hook.stats()
    return {
        "stats": stats["shards"],
        "steps": (stats["step"], loaded["step"]),
        "equal": torch.equal(through.weights(), resumed.weights()),
    }


@pytest.mark.parametrize(
    ("replicas", "arguments", "world_size"),
    [
        (None, {"shards": Shards(block_size=32)}, 2),
        (2, {"shards": "int8", "hook": "bf16_compress"}, 4),
    ],
)
def test_a_run_with_shards_resumes_bit_equal(
    run_ranks: Any, tmp_path: Path, replicas: Any, arguments: Any, world_size: int
) -> None:
    for found in run_ranks(_resumed, str(tmp_path), replicas, world_size=world_size, **arguments):
        assert found["equal"] and found["steps"] == (4, 4)
        assert 0 < found["stats"]["bytes_sent"] < 0.5 * found["stats"]["bytes_uncompressed"]


def test_shards_from_yaml_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "hook.yaml"
    file.write_text("shards: int8\n")
    assert CommHookKwargs.from_config(file).request.shards == Shards()
    with mock.patch.dict(os.environ, {VARIABLE: str(file)}):
        handler = CommHookKwargs()
    assert handler.request.shards_alone and not handler.off
    file.write_text("shards: int4\n")
    with pytest.raises(HookConfigError, match=r"shards='int4'; expected"):
        CommHookKwargs.from_config(file)
