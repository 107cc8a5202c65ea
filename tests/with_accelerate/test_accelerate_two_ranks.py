"""`CommHookKwargs` in the stock `Accelerator` on two ranks: what it attaches acts, with every setting."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import DistributedDataParallelKwargs, DistributedType
from accelerate.state import PartialState
from accelerate.utils import DDPCommunicationHookType

from accelerate_commhooks import CommHookKwargs
from commhooks import BatchedPowerSGD, PowerSGD
from tests.support.accelerators import OPTIONS, Training, hook_files, launched, new_accelerator, power_sgd
from tests.support.training import make_model


@launched
def _compresses() -> dict[str, Any]:
    run = Training(power_sgd(gradient_as_bucket_view=True)).train(6)
    return {
        "weights": run.weights(),
        "stats": run.hook.stats(),
        "attached": [run.handler.is_attached(model) for model in (run.model, run.model.module, make_model())],
        "kept": [run.model.bucket_bytes_cap, run.model.gradient_as_bucket_view],
    }


def test_the_hook_acts_in_the_stock_accelerator(run_ranks: Any) -> None:
    results = run_ranks(_compresses)
    plain = run_ranks(_plain)
    for result in results:
        assert torch.equal(result["weights"], results[0]["weights"])
        assert not torch.equal(result["weights"], plain[0])
        assert result["attached"] == [True, True, False]
        assert result["kept"] == [int(0.001 * 1024 * 1024), True]
        stats = result["stats"]
        assert stats["step"] == 6 and stats["compressed_steps"] == 3
        assert stats["collectives_last_pass"] >= 6  # several buckets
        assert stats["bytes_sent_last_pass"] < stats["bytes_uncompressed"] / 6 / 4


@launched
def _plain() -> torch.Tensor:
    return Training(DistributedDataParallelKwargs()).train(6).weights()


@launched
def _several_gpus(folder: str) -> dict[str, Any]:
    """The path that Accelerate takes with several GPUs, on CPU tensors: it wraps and calls the handler elsewhere."""
    with mock.patch.dict(os.environ, {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}):  # or DDP is given the number of a GPU
        handler = power_sgd()
        accelerator = new_accelerator(handler)
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.MULTI_GPU
        run = Training(handler, accelerator=accelerator).train(5).save(folder)
        frozen = accelerator.prepare(make_model().requires_grad_(False))
        weights = run.train(2).weights()
        accelerator._models.pop()
        assert accelerator.distributed_type == DistributedType.MULTI_GPU
        # Accelerate loads weights to the device "cpu:0", which safetensors does not know.
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.MULTI_CPU
        again = run.load(folder, 5).train(2).weights()
    return {
        "stats": run.hook.stats(),
        "attached": [handler.is_attached(model) for model in (run.model, frozen)],
        "equal": torch.equal(weights, again),
        "files": hook_files(folder),
    }


def test_the_path_of_several_gpus(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_several_gpus, str(tmp_path)):
        assert result["stats"]["step"] == 7 and result["stats"]["compressed_steps"] == 6
        assert result["attached"] == [True, False]
        assert result["equal"]
        assert result["files"] == ["comm_hook.pt", "comm_hook_rank0.pt", "comm_hook_rank1.pt"]


@pytest.mark.parametrize("kind", [DDPCommunicationHookType, str], ids=["enum", "string"])
def test_only_the_name_of_the_class_changes(kind: Any) -> None:
    def request(name: str, **more: Any) -> Any:
        return CommHookKwargs(comm_hook=kind(name), **more).request

    assert [request(name).name for name in ("fp16", "bf16")] == ["fp16_compress", "bf16_compress"]
    for name, ours, wrapper in (("power_sgd", PowerSGD, "fp16"), ("batched_power_sgd", BatchedPowerSGD, "bf16")):
        found = request(name, comm_wrapper=kind(wrapper), comm_state_option=OPTIONS)
        assert (found.config, found.wrapper) == (ours(**OPTIONS), wrapper)
