"""With `dp_replicate_size` `CommHookTrainer` shards, and the hook averages between replicas."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.features import fully_shard_on_gloo, trainer_resumes_on_cpu

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from accelerate.parallelism_config import ParallelismConfig  # noqa: E402

from tests.support.accelerators import OPTIONS, Warnings, launched  # noqa: E402
from tests.support.sharded import learned  # noqa: E402
from tests.support.transformers_runs import make_trainer, outcome  # noqa: E402

pytestmark = fully_shard_on_gloo

POWER_SGD = {"hook": "powerSGD", "hook_options": OPTIONS | {"start_powerSGD_iter": 1}}
# the resumed run is set up wrongly
WRONG = {
    "hook": "powerSGD",
    "hook_options": OPTIONS | {"start_powerSGD_iter": 3},
}
STEPS, SAVE_AT = 4, 2


def _trainer(folder: Any, *, hook: Any, **more: Any) -> Any:
    layers = ["LlamaDecoderLayer"]
    sharding = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "state_dict_type": "FULL_STATE_DICT",
            "transformer_layer_cls_to_wrap": layers,
        },
        "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        "per_device_train_batch_size": 2,
        "max_grad_norm": 0.5,
    }
    steps = {"max_steps": STEPS, "save_steps": SAVE_AT, "samples": STEPS * 4 * 2}
    return make_trainer(folder, hook=hook, sharding=sharding, **steps | more)


def _outcome(trainer: Any) -> dict[str, Any]:
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return outcome(trainer) | {"norms": norms, "learned": learned(trainer.comm_hook)}


@launched
def _trained(folder: str) -> dict[str, Any]:
    with Warnings() as texts:
        through = _trainer(f"{folder}/through", hook=POWER_SGD)
        through.train()
        again = _trainer(f"{folder}/resumed", hook=WRONG, seed=99)
        again.train(resume_from_checkpoint=f"{folder}/through/checkpoint-{SAVE_AT}")
        results: dict[str, Any] = {"through": _outcome(through), "again": _outcome(again)}
    again.args.max_steps = 1
    again.train()  # once more, with a hook that has learned nothing
    return results | {"anew": again.comm_hook.stats()["step"], "warnings": texts}


@trainer_resumes_on_cpu
def test_replicas_train_and_resume(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_trained, str(tmp_path), world_size=4)
    for rank in ranks:
        through, again = rank["through"], rank["again"]
        assert torch.equal(through["weights"], again["weights"])
        assert torch.equal(again["weights"], ranks[0]["again"]["weights"])
        assert through["losses"] == again["losses"] and through["norms"] == again["norms"]
        assert through["learned"].keys() == again["learned"].keys()
        assert all(
            torch.equal(through["learned"][key], again["learned"][key]) for key in again["learned"]
        )
        assert through["stats"]["backward_passes"] == again["stats"]["step"] == STEPS
        assert (
            again["stats"]["compressed_steps"] == STEPS - SAVE_AT
            and again["stats"]["compression_rate"] > 1.2
        )
        assert rank["anew"] == 1 and rank["warnings"] == []
    assert (tmp_path / "through" / f"checkpoint-{SAVE_AT}" / "comm_hook" / ".metadata").is_file()


@launched
def _with_shards(folder: str) -> dict[str, Any]:
    sharding = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        "per_device_train_batch_size": 2,
    }
    trainer = make_trainer(
        folder, hook={"shards": "int8"}, sharding=sharding, max_steps=2, samples=16
    )
    trainer.train()
    return trainer.comm_hook.stats()["shards"]


@trainer_resumes_on_cpu
def test_a_trainer_compresses_the_collectives_of_fsdp2(run_ranks: Any, tmp_path: Path) -> None:
    for stats in run_ranks(_with_shards, str(tmp_path), world_size=2):
        assert 0 < stats["bytes_sent"] < 0.5 * stats["bytes_uncompressed"]
