"""`CommHookKwargs` attaches to DDP models of any number, also compiled ones, and acts there."""

import copy
import gc
import os
import pickle
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import DistributedDataParallelKwargs, DistributedType
from accelerate.state import PartialState
from accelerate.utils import TorchDynamoPlugin

import commhooks
from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.yaml_settings import VARIABLE, Settings
from commhooks import AttachError, HookConfigError
from tests.support.accelerators import (
    FILES,
    Training,
    Warnings,
    hook_files,
    launched,
    new_accelerator,
    power_sgd,
)
from tests.support.ddp_steps import log_lines
from tests.support.inside import session_of
from tests.support.training import SEVERAL_BUCKETS_MB, make_model, residuals


@launched
def _compresses() -> dict[str, Any]:
    run = Training(power_sgd(gradient_as_bucket_view=True)).train(6)
    return {
        "weights": run.weights(),
        "stats": run.hook.stats(),
        "attached": [
            run.handler.is_attached(model) for model in (run.model, run.model.module, make_model())
        ],
        "kept": [run.model.bucket_bytes_cap, run.model.gradient_as_bucket_view],
    }


def test_the_hook_acts_in_the_stock_accelerator(run_ranks: Any) -> None:
    results = run_ranks(_compresses)
    for result in results:
        assert torch.equal(result["weights"], results[0]["weights"])
        assert result["attached"] == [True, True, False]
        assert result["kept"] == [int(0.001 * 1024 * 1024), True]
        stats = result["stats"]
        assert stats["step"] == 6 and stats["compressed_steps"] == 3
        assert stats["collectives_last_pass"] >= 6  # several buckets
        assert stats["bytes_sent_last_pass"] < stats["bytes_uncompressed"] / 6 / 4


@launched
def _several_gpus(folder: str) -> dict[str, Any]:
    """Take Accelerate's path of several GPUs on CPU tensors: it calls the handler elsewhere."""
    # or DDP is given the number of a GPU
    with mock.patch.dict(os.environ, {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}):
        handler = power_sgd()
        accelerator = new_accelerator(handler)
        accelerator.state.distributed_type = PartialState().distributed_type = (
            DistributedType.MULTI_GPU
        )
        run = Training(handler, accelerator=accelerator).train(5).save(folder)
        frozen = accelerator.prepare(make_model().requires_grad_(False))
        weights = run.train(2).weights()
        accelerator._models.pop()
        assert accelerator.distributed_type == DistributedType.MULTI_GPU
        # Accelerate loads weights to the device "cpu:0", which safetensors does not know.
        accelerator.state.distributed_type = PartialState().distributed_type = (
            DistributedType.MULTI_CPU
        )
        again = run.load(folder, 5).train(2).weights()
    return {
        "stats": run.hook.stats(),
        "attached": [handler.is_attached(model) for model in (run.model, frozen)],
        "equal": torch.equal(weights, again),
        "files": hook_files(folder),
    }


def test_the_hook_acts_on_the_path_of_several_gpus(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_several_gpus, str(tmp_path)):
        assert result["stats"]["step"] == 7 and result["stats"]["compressed_steps"] == 6
        assert result["attached"] == [True, False]
        assert result["equal"]
        assert result["files"] == FILES


@launched
def _attach_later() -> dict[str, Any]:
    accelerator = new_accelerator()
    handler = power_sgd()
    assert handler.attach(accelerator) is handler
    run = Training(handler, accelerator=accelerator).train(4)
    with pytest.raises(HookConfigError, match="has a DistributedDataParallelKwargs already"):
        power_sgd().attach(new_accelerator(DistributedDataParallelKwargs()))
    other = new_accelerator()
    other.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(
        HookConfigError, match="DEEPSPEED, which does not wrap models in DistributedDataParallel"
    ):
        power_sgd().attach(other)
    return run.hook.stats()


def test_a_handler_attaches_to_an_existing_accelerator(run_ranks: Any) -> None:
    for stats in run_ranks(_attach_later):
        assert stats["compressed_steps"] == 1


@launched
def _several_of_everything() -> None:
    """Prepare models with two accelerators, one in evaluation mode: each DDP model has a state."""
    handler = power_sgd()
    run = Training(handler).train(4)
    evaluated = run.accelerator.prepare_model(make_model(), evaluation_mode=True)
    assert not handler.is_attached(evaluated) and handler.attached_hooks == [run.hook]
    first = run.hook
    second = Training(handler, accelerator=run.accelerator).train(5)
    elsewhere = Training(handler, accelerator=new_accelerator(handler)).train(6)
    hooks = handler.attached_hooks
    assert hooks[0] is first and hooks[-1] is handler.attached
    assert [hook.stats()["step"] for hook in hooks] == [4, 5, 6]
    assert all(handler.is_attached(prepared.model) for prepared in (run, second, elsewhere))
    assert len({id(session_of(hook)) for hook in hooks}) == 3
    for other in (copy.deepcopy(handler), pickle.loads(pickle.dumps(handler))):
        assert other == handler and other.attached is None  # the configuration only
    assert not torch.equal(residuals(hooks[0])["5.weight"], residuals(hooks[1])["5.weight"])


def test_each_model_and_accelerator_has_a_state(run_ranks: Any) -> None:
    run_ranks(_several_of_everything)


@launched
def _nothing_is_kept_alive() -> None:
    handler = power_sgd()
    run = Training(handler).train(4)
    gone = [
        weakref.ref(thing) for thing in (run.model, run.hook, session_of(run.hook), run.accelerator)
    ]
    kept_stats = run.hook.stats()
    run.model, run.optimizer = run.accelerator.free_memory(run.model, run.optimizer)
    gc.collect()
    assert [ref() is None for ref in gone] == [True, True, True, False]
    assert handler.attached is None and handler.attached_hooks == []
    again = Training(handler, accelerator=run.accelerator)
    assert again.hook.stats()["step"] == 0 and kept_stats["step"] == 4
    assert handler.attached_hooks == [again.hook]
    again.train(4)
    del run, again
    gc.collect()
    assert gone[3]() is None


def test_a_state_is_freed_with_its_model(run_ranks: Any) -> None:
    run_ranks(_nothing_is_kept_alive)


class Blocks(torch.nn.Module):
    """Repeated blocks, which Accelerate can compile one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@launched
def _compiled() -> tuple[list[bool], list[str], int]:
    # In one bucket: torch 2.13 cannot compile DDP models whose first bucket is the only small one.
    handler = power_sgd({"start_powerSGD_iter": 0}, bucket_cap_mb=25)
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = new_accelerator(handler, dynamo_plugin=plugin)
    module = Blocks()
    model = accelerator.prepare(module)
    assert model is not module and hasattr(model, "_orig_mod")
    gc.collect()
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 16)).sum())
    attached = [handler.is_attached(candidate) for candidate in (model, module)]
    return (
        attached,
        list(handler.attached.state_dict()["parameters"]),
        handler.attached.stats()["compressed_steps"],
    )


def test_models_that_are_compiled_by_regions_are_hooked(run_ranks: Any) -> None:
    """Of DDP models that are compiled as a whole: local_steps/test_rounds.py."""
    for attached, names, steps in run_ranks(_compiled):
        assert attached == [True, True]
        assert names == [
            "blocks.0.0.weight",
            "blocks.0.0.bias",
            "blocks.1.0.weight",
            "blocks.1.0.bias",
        ]
        assert steps == 2


@launched
def _shared_state() -> None:
    state = commhooks.PowerSGDState(None, start_powerSGD_iter=0)
    handler = CommHookKwargs(hook=commhooks.powerSGD_hook, hook_state=state)
    Training(handler).train(1)
    other = Learned()
    twice = CommHookKwargs(hook=_own_hook, hook_state=other)
    first = Training(twice).train(1)
    with pytest.raises(
        AttachError, match=r"hook_state \(Learned\) is one object, and is used by another model"
    ):
        Training(twice)
    assert twice.attached_hooks == [first.hook]


class Learned:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _own_hook(state: Any, bucket: Any) -> Any:
    return commhooks.allreduce_hook(None, bucket)


def test_one_learned_state_serves_one_model(run_ranks: Any) -> None:
    run_ranks(_shared_state)


@launched
def _given_to_nobody() -> dict[str, Any]:
    with Warnings() as texts:
        handler = power_sgd()
        off = CommHookKwargs(hook=None)
        Training(DistributedDataParallelKwargs()).train(2)
    with Warnings() as texts_later:
        hooked = Training(power_sgd()).train(1)
        copied = copy.deepcopy(hooked.handler)
        hooked.train(1)
    members = CommHookKwargs(
        hook="diloco", members=commhooks.Torchft(lighthouse="http://127.0.0.1:1")
    )
    with pytest.raises(HookConfigError) as error:
        Training(members)
    assert handler.attached is off.attached is copied.attached is None
    return {"texts": texts, "later": texts_later, "members": str(error.value)}


def test_a_handler_that_no_accelerator_has_is_named_at_the_first_step(run_ranks: Any) -> None:
    for rank in run_ranks(_given_to_nobody):
        (text,) = rank["texts"]
        assert "hook 'powerSGD' is attached to no model, and training begins without it" in text
        assert "Write `CommHookKwargs().attach(accelerator)`" in text
        assert rank["later"] == []  # a copy of a handler is no handler that was forgotten
        assert (
            "beside DDP: call handler.attach(accelerator) before accelerator.prepare(...)"
            in rank["members"]
        )


@launched
def _by_hand() -> list[str]:
    with Warnings() as texts:
        handler = power_sgd()
        handler.register_comm_hook(torch.nn.parallel.DistributedDataParallel(make_model()))
    return texts


def test_without_an_accelerator_nobody_saves(run_ranks: Any) -> None:
    for (text,) in run_ranks(_by_hand):
        assert "was attached without an accelerator: no save_state includes its state" in text


@launched
def _trained(folder: str, variable: str) -> dict[str, Any]:
    plain = Training(DistributedDataParallelKwargs(bucket_cap_mb=SEVERAL_BUCKETS_MB)).train(4)
    with log_lines() as lines, Warnings() as warned:
        run = (
            Training(CommHookKwargs(hook=None, bucket_cap_mb=SEVERAL_BUCKETS_MB))
            .train(4)
            .save(folder)
        )
        run.load(folder, 4)
    with mock.patch.dict(os.environ, {VARIABLE: variable}):
        from_outside = Training(CommHookKwargs()).train(4)
    return {
        "plain": plain.weights(),
        "none": run.weights(),
        "outside": from_outside.weights(),
        "attached": (
            run.handler.attached,
            from_outside.handler.attached,
            run.handler.is_attached(run.model),
        ),
        "files": hook_files(folder),
        "said": lines,
        "warned": warned,
    }


def test_it_trains_and_saves_as_plain_ddp(run_ranks: Any, tmp_path: Path) -> None:
    settings = {
        "hook": "none",
        "hook_options": {"matrix_approximation_rank": 2},
        "bucket_cap_mb": SEVERAL_BUCKETS_MB,
    }
    settings_read = Settings(settings, "my.yaml", tmp_path / "message")
    ranks = run_ranks(_trained, str(tmp_path / "state"), settings_read.to_environment())
    for rank in ranks:
        assert torch.equal(rank["none"], rank["plain"]) and torch.equal(
            rank["outside"], rank["plain"]
        )
        assert (
            rank["attached"] == (None, None, False) and rank["files"] == [] and rank["warned"] == []
        )
    assert ranks[0]["said"] == ["commhooks: none: no hook, DDP averages the gradients itself"]
    assert ranks[1]["said"] == []
    assert settings_read.message_file.read_text() == ""  # the launcher has nothing to say
