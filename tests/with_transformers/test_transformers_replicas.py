"""`CommHookTrainer` with FSDP2 and `dp_replicate_size`: replicas are sharded, and the hook averages between them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.features import fully_shard_on_gloo, trainer_resumes_on_cpu

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from accelerate.parallelism_config import ParallelismConfig  # noqa: E402
from transformers import Trainer  # noqa: E402

from accelerate_commhooks.transformers import CommHookTrainer  # noqa: E402
from commhooks import HookConfigError  # noqa: E402
from tests.support.accelerators import OPTIONS, Warnings, launched  # noqa: E402
from tests.support.sharded import learned  # noqa: E402
from tests.support.transformers_runs import make_trainer, outcome  # noqa: E402

pytestmark = fully_shard_on_gloo

POWER_SGD = {"hook": "powerSGD", "hook_options": OPTIONS | {"start_powerSGD_iter": 1}}
WRONG = {"hook": "powerSGD", "hook_options": OPTIONS | {"start_powerSGD_iter": 3}}  # the resumed run is set up wrongly
DILOCO = {"hook": "diloco", "hook_options": {"sync_every": 2, "start_iter": 0}}
STEPS, SAVE_AT = 4, 2


def _trainer(
    folder: Any, *, replicas: int | None = 2, form: str = "SHARDED_STATE_DICT", hook: Any = None, **more: Any
) -> Any:
    sizes = replicas and ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=dist.get_world_size() // replicas)
    layers = ["LlamaDecoderLayer"]
    sharding = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "state_dict_type": form, "transformer_layer_cls_to_wrap": layers},
        "parallelism_config": sizes,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_grad_norm": 0.5,
    }
    steps = {"max_steps": STEPS, "save_steps": SAVE_AT, "samples": STEPS * 4 * 2 * 2}
    cls = Trainer if hook is None else CommHookTrainer
    return make_trainer(folder, cls, hook=hook, sharding=sharding, **steps | more)


def _outcome(trainer: Any) -> dict[str, Any]:
    hook = getattr(trainer, "comm_hook", None)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return outcome(trainer) | {"norms": norms, "learned": {} if hook is None else learned(hook)}


@launched
def _trained(folder: str) -> dict[str, Any]:
    native = _trainer(f"{folder}/native", save_steps=100)
    native.train()
    exact = _trainer(f"{folder}/exact", save_steps=100, hook={"hook": "allreduce"})
    exact.train()
    found: dict[str, Any] = {"native": _outcome(native), "exact": _outcome(exact)}
    with Warnings() as texts:
        for form in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            through = _trainer(f"{folder}/{form}", form=form, hook=POWER_SGD)
            through.train()
            again = _trainer(f"{folder}/{form}-resumed", form=form, hook=WRONG, seed=99)
            again.train(resume_from_checkpoint=f"{folder}/{form}/checkpoint-{SAVE_AT}")
            found[form] = (_outcome(through), _outcome(again))
            if form == "FULL_STATE_DICT":
                again.train()  # once more, with a hook that has learned nothing
                found["anew"] = again.comm_hook.stats()["step"]
    alone = _trainer(f"{folder}/alone", replicas=1, hook=POWER_SGD)  # the other replicas are lost
    alone.train(resume_from_checkpoint=f"{folder}/SHARDED_STATE_DICT/checkpoint-{SAVE_AT}")
    found["alone"] = _outcome(alone)
    rounds = _trainer(f"{folder}/diloco", max_steps=3, save_steps=100, hook=DILOCO)
    rounds.train()
    found["diloco"] = _outcome(rounds)
    with pytest.raises(HookConfigError) as error:
        _trainer(f"{folder}/all", replicas=None, hook=POWER_SGD)
    return found | {"warnings": texts, "over all": str(error.value)}


@trainer_resumes_on_cpu
def test_replicas_train_and_resume(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_trained, str(tmp_path), world_size=4)
    for rank in ranks:
        native, exact = rank["native"], rank["exact"]
        assert (native["weights"] - exact["weights"]).abs().max() <= 1e-6
        assert native["losses"] == pytest.approx(exact["losses"], abs=1e-6) and len(exact["losses"]) == STEPS
        assert exact["stats"]["backward_passes"] == STEPS
        for form in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            through, again = rank[form]
            assert torch.equal(through["weights"], again["weights"])
            assert torch.equal(again["weights"], ranks[0][form][1]["weights"])
            assert through["losses"] == again["losses"] and through["norms"] == again["norms"]
            assert through["learned"].keys() == again["learned"].keys()
            assert all(torch.equal(through["learned"][key], again["learned"][key]) for key in again["learned"])
            assert again["stats"]["step"] == STEPS and again["stats"]["compressed_steps"] == STEPS - SAVE_AT
            assert again["stats"]["compression_rate"] > 1.2
        assert rank["anew"] == STEPS and rank["warnings"] == []
        assert rank["alone"]["stats"]["step"] == STEPS and rank["alone"]["stats"]["compressed_steps"] == STEPS - SAVE_AT
        assert rank["diloco"]["stats"]["backward_passes"] == 3
        assert torch.equal(rank["diloco"]["weights"], ranks[0]["diloco"]["weights"])  # the training ends with a round
        assert "a communication hook has nothing to average" in rank["over all"]
    for form in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        assert (tmp_path / form / f"checkpoint-{SAVE_AT}" / "comm_hook" / ".metadata").is_file()
