"""`CommHookKwargs` in the stock `Accelerator`: what it accepts, what it attaches, and what happens to it in Python."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DDPCommunicationHookType, TorchDynamoPlugin
from accelerators import OPTIONS, Training, Warnings, hook_files, launched, new_accelerator, power_sgd
from training import batch, make_model, residuals

import commhooks
from accelerate_commhooks import CommHookKwargs
from commhooks import AttachError, HookConfigError, PowerSGD


@pytest.fixture
def one_process() -> Iterator[None]:
    """For an Accelerator in the test's own process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_accepted_by_the_stock_accelerator(one_process: None) -> None:
    handler = CommHookKwargs(hook="powerSGD", bucket_cap_mb=50)
    assert Accelerator(cpu=True, kwargs_handlers=[handler]).ddp_handler is handler


def test_one_handler_of_ddp_arguments_only(one_process: None) -> None:
    for other in (DistributedDataParallelKwargs(), CommHookKwargs(hook="fp16")):
        with pytest.raises(ValueError, match="You can only pass one .*DistributedDataParallelKwargs"):
            Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs(hook="powerSGD"), other])


def test_accelerate_still_refuses_an_honest_subclass(one_process: None) -> None:
    """The reason for `CommHookKwargs.__class__`: when this fails, that property can go."""

    class Honest(DistributedDataParallelKwargs):
        pass

    with pytest.raises(KeyError, match="Honest"):
        Accelerator(cpu=True, kwargs_handlers=[Honest()])


# ---- an object like others -------------------------------------------------------------------------------------------

HANDLER = CommHookKwargs(
    bucket_cap_mb=50, hook="powerSGD", hook_options={"matrix_approximation_rank": 2}, wrapper="bf16", total_steps=9
)


@pytest.mark.parametrize("handler", [HANDLER, CommHookKwargs(comm_hook="power_sgd", comm_wrapper="fp16")])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda handler: pickle.loads(pickle.dumps(handler))])
def test_copies(handler: CommHookKwargs, way: Any) -> None:
    other = way(handler)
    assert type(other) is CommHookKwargs and other is not handler
    assert other == handler
    other.bucket_cap_mb = 7
    assert other != handler


def test_equality_looks_at_the_class_and_all_fields() -> None:
    assert CommHookKwargs(hook="fp16") == CommHookKwargs(hook="fp16")
    assert CommHookKwargs(hook="fp16") != CommHookKwargs(hook="bf16")
    plain = DistributedDataParallelKwargs()
    assert CommHookKwargs(hook="fp16") != plain and plain != CommHookKwargs(hook="fp16")
    with pytest.raises(TypeError, match="unhashable"):  # as Accelerate's own
        hash(HANDLER)


def test_repr_can_be_read_and_evaluated() -> None:
    text = repr(HANDLER)
    assert text.startswith("CommHookKwargs(bucket_cap_mb=50, hook='powerSGD', hook_options=")
    assert eval(text) == HANDLER


def test_fields_and_types() -> None:
    names = [field.name for field in dataclasses.fields(HANDLER)]
    stock = [field.name for field in dataclasses.fields(DistributedDataParallelKwargs)]
    ours = ["hook", "hook_options", "hook_state", "wrapper", "save_residual", "strict", "total_steps", "check_every"]
    assert names == stock + ours
    assert isinstance(HANDLER, CommHookKwargs) and isinstance(HANDLER, DistributedDataParallelKwargs)
    # One of Accelerate's two paths to DDP tests for truth, the other for None.
    assert not hasattr(CommHookKwargs, "__len__") and not hasattr(CommHookKwargs, "__bool__") and HANDLER


def test_to_kwargs_has_ddp_arguments_only() -> None:
    given = {"bucket_cap_mb": 50, "find_unused_parameters": True, "gradient_as_bucket_view": True}
    assert CommHookKwargs(hook="powerSGD", **given).to_kwargs() == given
    assert CommHookKwargs(hook="powerSGD", **given).to_dict() == DistributedDataParallelKwargs(**given).to_dict()


# ---- what is asked for -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Refused:
    kwargs: dict[str, Any]
    text: str


REFUSED = [
    Refused({}, "needs hook="),
    Refused({"dim": "powerSGD"}, r"write CommHookKwargs\(hook='powerSGD'\)"),
    Refused({"hook": "powerSG"}, "did you mean 'powerSGD'"),
    Refused({"hook": "powerSGD", "hook_options": {"rank": 2}}, "has no option 'rank'"),
    Refused({"hook": PowerSGD(), "hook_options": {"min_compression_rate": 2}}, "write the options into PowerSGD"),
    Refused({"hook": "powerSGD", "wrapper": "fp8"}, "wrapper='fp8'"),
    Refused({"hook": "powerSGD", "save_residual": "rank"}, "save_residual='rank'.*did you mean 'per_rank'"),
    Refused({"hook": "powerSGD", "strict": 1}, "strict=1"),
    Refused({"hook": "powerSGD", "total_steps": 0}, "total_steps=0"),
    Refused({"hook": "powerSGD", "total_steps": True}, "total_steps=True"),
    Refused({"hook": PowerSGD(start_powerSGD_iter=0.1)}, "fraction of the run.*pass total_steps="),
    Refused({"comm_hook": "power_sgd", "hook": "fp16"}, "comm_hook beside hook=.*DDP takes one only"),
    Refused({"comm_wrapper": "fp16", "hook": "powerSGD"}, "comm_wrapper beside hook="),
    Refused({"comm_state_option": {"random_seed": 1}, "hook": "powerSGD"}, "comm_state_option beside hook="),
    Refused({"comm_hook": "fp16", "wrapper": "bf16"}, "comm_hook beside hook_options or wrapper="),
    Refused({"comm_hook": "powersgd"}, "comm_hook='powersgd' .did you mean 'power_sgd'"),
    Refused({"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "comm_wrapper='power_sgd'"),
    Refused({"comm_wrapper": "fp16"}, "comm_wrapper without comm_hook"),
    Refused({"comm_hook": "fp16", "comm_state_option": {"random_seed": 1}}, "'fp16_compress' has no options"),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: str(refused.kwargs))
def test_refused_at_construction(refused: Refused) -> None:
    with pytest.raises(HookConfigError, match=refused.text):
        CommHookKwargs(**refused.kwargs)


def test_everything_of_ours_is_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        CommHookKwargs(0, True, 25, False, False, False, False, "no", "no", {}, "powerSGD")


# ---- on two ranks ----------------------------------------------------------------------------------------------------


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


STOCK = {
    "fp16": ("fp16_compress", {}),
    "bf16": ("bf16_compress", {}),
    "power_sgd": ("powerSGD", OPTIONS),
    "batched_power_sgd": ("batched_powerSGD", OPTIONS),
}


@launched
def _migrated(enum: bool) -> dict[str, Any]:
    found = {}
    for name, (_, options) in STOCK.items():
        kind = DDPCommunicationHookType
        stock = {"comm_hook": kind(name) if enum else name, "comm_state_option": options}
        if options:
            stock["comm_wrapper"] = kind.FP16 if enum else "fp16"
        run = Training(CommHookKwargs(**stock, bucket_cap_mb=0.001)).train(4)
        found[name] = (run.hook.name, run.hook.options, run.hook._spec.wrapper, run.hook.stats())
    return found


@pytest.mark.parametrize("enum", [True, False], ids=["enum", "string"])
def test_only_the_name_of_the_class_changes(run_ranks: Any, enum: bool) -> None:
    for found in run_ranks(_migrated, enum):
        for name, (ours, options) in STOCK.items():
            hook, attached, wrapper, stats = found[name]
            assert hook == ours and wrapper == ("fp16" if options else None)
            assert attached.items() >= options.items()
            assert stats["compression_rate"] > (1.9 if options else 1.99)
            assert stats["compressed_steps"] == (1 if options else None)


@launched
def _total_steps() -> list[Any]:
    starts = []
    for start in (None, 0.5):
        hook = PowerSGD(start_powerSGD_iter=start)
        starts.append(Training(CommHookKwargs(hook=hook, total_steps=40)).hook.options["start_powerSGD_iter"])
    return starts


def test_total_steps_resolves_the_start(run_ranks: Any) -> None:
    assert run_ranks(_total_steps) == [[4, 20]] * 2


@launched
def _attach_later() -> dict[str, Any]:
    accelerator = new_accelerator()
    handler = power_sgd()
    assert handler.attach(accelerator) is handler
    run = Training(handler, accelerator=accelerator).train(4)
    with pytest.raises(HookConfigError, match="has a DistributedDataParallelKwargs already"):
        power_sgd().attach(new_accelerator(DistributedDataParallelKwargs()))
    sharded = new_accelerator()
    sharded.state.distributed_type = DistributedType.FSDP
    with pytest.raises(HookConfigError, match="FSDP, where models are not wrapped in DistributedDataParallel"):
        power_sgd().attach(sharded)
    return run.hook.stats()


def test_attach_to_an_existing_accelerator(run_ranks: Any) -> None:
    for stats in run_ranks(_attach_later):
        assert stats["compressed_steps"] == 1


@launched
def _several_of_everything() -> None:
    """Two models of one accelerator, a second accelerator, a model in evaluation mode: a state for each DDP model."""
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
    assert all(handler.is_attached(each.model) for each in (run, second, elsewhere))
    assert len({id(hook._low_rank) for hook in hooks}) == 3
    assert not torch.equal(residuals(hooks[0])["5.weight"], residuals(hooks[1])["5.weight"])


def test_a_state_for_each_model_and_accelerator(run_ranks: Any) -> None:
    run_ranks(_several_of_everything)


@launched
def _nothing_is_kept_alive() -> None:
    handler = power_sgd()
    run = Training(handler).train(4)
    gone = [weakref.ref(each) for each in (run.model, run.hook, run.hook._low_rank, run.accelerator)]
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


def test_state_dies_with_its_model(run_ranks: Any) -> None:
    run_ranks(_nothing_is_kept_alive)


@launched
def _copies_carry_no_hook() -> None:
    run = Training().train(4)
    for other in (copy.deepcopy(run.handler), pickle.loads(pickle.dumps(run.handler))):
        assert other == run.handler and other.attached is None


def test_a_copy_of_a_used_handler_is_configuration_only(run_ranks: Any) -> None:
    run_ranks(_copies_carry_no_hook)


class Blocks(torch.nn.Module):
    """Repeated blocks, which Accelerate can compile one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@launched
def _compiled(regional: bool) -> tuple[list[bool], list[str], int]:
    # In one bucket: torch 2.13 cannot compile DDP models whose first bucket is the only small one.
    handler = power_sgd({"start_powerSGD_iter": 0}, bucket_cap_mb=25)
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    accelerator = new_accelerator(handler, dynamo_plugin=plugin)
    module = Blocks()
    model = accelerator.prepare(module)
    assert model is not module and hasattr(model, "_orig_mod")
    gc.collect()
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 16)).sum())
    attached = [handler.is_attached(each) for each in (model, module)]
    return attached, list(handler.attached.state_dict()["parameters"]), handler.attached.stats()["compressed_steps"]


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "by regions"])
def test_compiled_models(run_ranks: Any, regional: bool) -> None:
    for attached, names, steps in run_ranks(_compiled, regional):
        assert attached == [True, True]
        assert names == ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.1.0.weight", "blocks.1.0.bias"]
        assert steps == 2


@launched
def _scaled() -> dict[str, Any]:
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
    run = Training(power_sgd(options)).train(3)
    scaled = Training(power_sgd(options), scale=1024.0).train(2)
    assert scaled.hook._low_rank._memory.loss_scale == 1024
    scaled.accelerator.scaler.update(256.0)
    scaled.train(1)
    memory, unscaled = scaled.hook._low_rank._memory, residuals(run.hook)["5.weight"]
    apart = (memory.residuals["5.weight"] / 256 - unscaled).norm() / unscaled.norm()
    return {"scale": memory.loss_scale, "apart": apart, "norm": unscaled.norm()}


def test_the_residual_follows_the_loss_scale(run_ranks: Any) -> None:
    for result in run_ranks(_scaled):
        assert result["scale"] == 256 and result["norm"] > 0
        assert result["apart"] < 1e-3


@launched
def _shared_state() -> None:
    state = commhooks.PowerSGDState(None, start_powerSGD_iter=0)
    handler = CommHookKwargs(hook=commhooks.powerSGD_hook, hook_state=state)
    Training(handler).train(1)
    other = Learned()
    twice = CommHookKwargs(hook=_own_hook, hook_state=other)
    first = Training(twice).train(1)
    with pytest.raises(AttachError, match=r"hook_state \(Learned\) is one object, and serves another model already"):
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
def _by_hand() -> list[str]:
    with Warnings() as texts:
        handler = power_sgd()
        handler.register_comm_hook(torch.nn.parallel.DistributedDataParallel(make_model()))
    return texts


def test_without_an_accelerator_nobody_saves(run_ranks: Any) -> None:
    for (text,) in run_ranks(_by_hand):
        assert "was not attached by an accelerator: no save_state saves its state" in text


def test_accumulation(run_ranks: Any) -> None:
    for step, count in run_ranks(_accumulates):
        assert step == 3 and count == 6


@launched
def _accumulates() -> tuple[int, int]:
    handler = power_sgd()
    run = Training(handler, gradient_accumulation_steps=2)
    for step in range(6):
        with run.accelerator.accumulate(run.model):
            images, labels = batch(step, 0)
            run.accelerator.backward(torch.nn.functional.cross_entropy(run.model(images), labels))
    return run.hook.stats()["step"], step + 1
