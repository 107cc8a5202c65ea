"""With `dp_replicate_size` Accelerate shards, and the hook averages between replicas."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState

import commhooks
from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.prepare import check_takes_hook
from accelerate_commhooks.yaml_settings import VARIABLE, Settings
from commhooks import HookConfigError
from tests.support.accelerators import (
    OPTIONS,
    Warnings,
    launched,
    pretend_to_have_accelerators,
    sharding_accelerator,
)
from tests.support.features import fully_shard_on_gloo
from tests.support.models import bits_equal
from tests.support.sharded import learned, whole_residuals
from tests.support.training import batch, flat, make_model

pytestmark = fully_shard_on_gloo

POWER_SGD = {"hook": "powerSGD", "hook_options": OPTIONS | {"start_powerSGD_iter": 1}}
DILOCO = {"hook": "diloco", "hook_options": {"sync_every": 2, "start_iter": 1}}


class Run:
    """A training on this rank, with accumulation and clipping. `handler` None: as FSDP itself does
    it (HSDP).
    """

    def __init__(self, handler: Any = None, **accelerator: Any) -> None:
        handlers = [] if handler is None else [handler]
        self.accelerator = sharding_accelerator(
            *handlers, gradient_accumulation_steps=2, **accelerator
        )
        model = make_model()
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        self.handler = handler
        self.step = 0
        self.losses = []

    def train(self, steps: int) -> "Run":
        for _ in range(2 * steps):
            images, labels = batch(self.step, self.accelerator.process_index)
            self.step += 1
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.cross_entropy(self.model(images), labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self

    def weights(self) -> torch.Tensor:
        return flat(self.model.parameters())

    @property
    def hook(self) -> Any:
        return self.handler.attached


# ---- gradients -----------------------------------------------------------------------------------


@launched
def _beside_native(message_file: Path) -> dict[str, Any]:
    native = Run()
    start = native.weights()
    native.train(2)
    hooked = Run(CommHookKwargs(hook="allreduce")).train(2)
    with mock.patch.dict(
        os.environ, {VARIABLE: Settings({"hook": "none"}, "a.yaml", message_file).to_environment()}
    ):
        without = Run(CommHookKwargs())
    return {
        "difference": float((native.weights() - hooked.weights()).abs().max()),
        "moved": float((native.weights() - start).abs().max()),
        "passes": hooked.hook.stats()["backward_passes"],
        "sent": hooked.hook.stats()["bytes_sent_last_pass"] > 0,
        "placed": {
            tuple(parameter.device_mesh.mesh_dim_names) for parameter in hooked.model.parameters()
        },
        "none": (
            without.hook,
            {parameter.device_mesh.ndim for parameter in without.model.parameters()},
        ),
    }


def test_exact_averages_are_those_of_native_hsdp(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_beside_native, tmp_path / "message", world_size=4)
    assert (tmp_path / "message").read_text() == ""  # nothing for the launcher to print
    for outcome in ranks:
        assert outcome["difference"] <= 1e-6 < outcome["moved"]
        assert outcome["passes"] == 2 and outcome["sent"]
        assert outcome["placed"] == {("dp_shard_cp",)} and outcome["none"] == (None, {2})


# ---- saved ---------------------------------------------------------------------------------------


@launched
def _saved_and_resumed(folder: str) -> dict[str, Any]:
    run = Run(CommHookKwargs(**DILOCO), form="FULL_STATE_DICT").train(2)
    run.accelerator.save_state(folder)
    at_save = run.step
    run.train(2)
    with Warnings() as texts:
        again = Run(CommHookKwargs(**DILOCO), form="FULL_STATE_DICT")
        with torch.no_grad():
            for parameter in again.model.parameters():
                parameter.add_(1)
        again.accelerator.load_state(folder)
        again.step = at_save
        again.train(2)
    one, other = learned(run.hook), learned(again.hook)
    return {
        "same weights": torch.equal(run.weights(), again.weights()),
        "same losses": run.losses[at_save:] == again.losses,
        "same state": (
            one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        ),
        "silent": texts == [],
        "weights": again.weights(),
        "stats": again.hook.stats(),
    }


def test_it_saves_in_mid_round_and_resumes(run_ranks: Any, tmp_path: Path) -> None:
    """As a full state dict. The sharded one, of PowerSGD, is that of a run that loses a replica."""
    ranks = run_ranks(_saved_and_resumed, str(tmp_path), world_size=4)
    for outcome in ranks:
        assert (
            outcome["same weights"]
            and outcome["same losses"]
            and outcome["same state"]
            and outcome["silent"]
        )
        assert torch.equal(outcome["weights"], ranks[0]["weights"])
        assert outcome["stats"]["step"] == 2
        assert outcome["stats"]["bytes_sent"] < 0.8 * outcome["stats"]["bytes_uncompressed"]
    assert (tmp_path / "comm_hook" / ".metadata").is_file()
    refused = {
        name for rank in run_ranks(_incomplete, str(tmp_path), world_size=4) for name in rank
    }
    assert refused == {"holds no state of a communication hook (comm_hook)", ""}


@launched
def _incomplete(folder: str) -> list[str]:
    (Path(folder) / "comm_hook" / ".metadata").unlink(missing_ok=True)
    run = Run(CommHookKwargs(**POWER_SGD), form="FULL_STATE_DICT")
    run.accelerator.wait_for_everyone()
    with Warnings() as texts:
        run.accelerator.load_state(folder)
    hook = run.hook
    assert hook.stats()["step"] == 0 and run.handler.is_attached(run.model)
    run.accelerator.prepare(run.model, torch.optim.SGD(run.model.parameters(), lr=0.1))
    assert hook.detached and len(run.handler.attached_hooks) == 1
    hook = run.hook
    hook.detach()
    assert (
        run.hook is None
        and not run.handler.is_attached(run.model)
        and ", detached, rank" in repr(hook)
    )
    return [text[text.index("holds") : text.index(")") + 1] for text in texts] or [""]


class _Pair:
    """Two models of one accelerator, in one replica of two shards."""

    def __init__(self) -> None:
        self.handler = CommHookKwargs(hook="int8", hook_options={"start_iter": 1})
        self.accelerator = sharding_accelerator(self.handler, replicas=1)
        self.models = [self._prepared(), self._prepared()]

    def _prepared(self) -> Any:
        model = make_model()
        return self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))[0]

    def train(self, steps: int) -> "_Pair":
        for step in range(steps):
            for number, model in enumerate(self.models):
                images, labels = batch(2 * step + number, self.accelerator.process_index)
                self.accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
        return self

    def learned(self) -> list[dict[str, torch.Tensor]]:
        """With the mean of the residuals, as loading needs it."""
        for hook in self.handler.attached_hooks:
            hook.state_dict()
        return [learned(hook) for hook in self.handler.attached_hooks]

    def steps(self) -> list[int]:
        return [hook.stats()["step"] for hook in self.handler.attached_hooks]


@launched
def _two_folders(folder: str) -> dict[str, Any]:
    saved = _Pair().train(3)
    saved.accelerator.save_state(folder)
    saved.accelerator.wait_for_everyone()
    loaded = _Pair()
    loaded.accelerator.load_state(folder)
    steps = loaded.steps()
    if loaded.accelerator.is_main_process:
        (Path(folder) / "comm_hook_1" / "__0_0.distcp").write_bytes(b"damaged")
    loaded.accelerator.wait_for_everyone()
    before = loaded.train(1).learned()
    with pytest.raises(commhooks.PayloadError) as error:
        loaded.accelerator.load_state(folder)
    same = all(bits_equal(one, other) for one, other in zip(before, loaded.learned(), strict=True))
    return {"loaded": steps, "after": loaded.steps(), "same": same, "error": str(error.value)}


def test_each_of_two_models_loads_its_folder_or_none_does(run_ranks: Any, tmp_path: Path) -> None:
    for outcome in run_ranks(_two_folders, str(tmp_path)):
        assert outcome["loaded"] == [3, 3] and outcome["after"] == [4, 4] and outcome["same"]
        assert f"{tmp_path / 'comm_hook_1'} cannot be read (" in outcome["error"]
        assert "remove this folder" in outcome["error"]


# ---- lost replicas -------------------------------------------------------------------------------


@launched
def _elastic(folder: str, replicas: int, resume: bool) -> dict[str, Any]:
    run = Run(CommHookKwargs(**POWER_SGD), replicas=replicas)
    if resume:
        run.accelerator.load_state(folder)
        loaded = whole_residuals(run.hook)
        run.train(2)
    else:
        run.train(2)
        run.accelerator.save_state(folder)
        loaded = whole_residuals(run.hook)
    stats = run.hook.stats()
    return {
        "weights": run.weights(),
        "residuals": loaded,
        "step": stats["step"],
        "here": stats["compressed_steps"],
    }


def test_a_run_that_has_lost_a_replica_goes_on(run_ranks: Any, tmp_path: Path) -> None:
    """From 2 x 2 to 1 x 2. Another number of shards:
    tests/checkpoint/test_distributed.py.
    """
    folder = str(tmp_path / "saved")
    before = run_ranks(_elastic, folder, 2, False, world_size=4)[0]
    for after in run_ranks(_elastic, folder, 1, True, world_size=2):
        assert after["step"] == before["step"] + 2 and after["here"] == 2
        assert after["weights"].isfinite().all() and not torch.equal(
            after["weights"], before["weights"]
        )
        assert sum(bool(residual.any()) for residual in after["residuals"].values()) == 3
        for name, residual in after["residuals"].items():
            assert torch.allclose(residual, before["residuals"][name], atol=1e-6), name


# ---- what cannot work ----------------------------------------------------------------------------


def _forgotten() -> str:
    """Give a sharding accelerator its handler among `kwargs_handlers`, or after `prepare`."""
    handler = CommHookKwargs(hook="int8")
    run = Run(None)
    run.accelerator.ddp_handler = handler  # as its constructor does
    with pytest.raises(commhooks.AttachError) as error:
        run.train(1)
    handler.attach(run.accelerator)
    with pytest.raises(commhooks.AttachError, match="before"):
        run.train(1)
    return str(error.value)


@launched
def _refused() -> dict[str, str]:
    def of(handler: Any, **accelerator: Any) -> str:
        with pytest.raises(commhooks.CommHookError) as error:
            Run(handler, **accelerator)
        return str(error.value)

    results = {
        "per_rank": of(CommHookKwargs(hook="int8", save_residual="per_rank")),
        "over all": of(CommHookKwargs(hook="int8"), replicas=None),
    }
    with pytest.raises(HookConfigError) as error:
        CommHookKwargs(hook="int8").attach(sharding_accelerator(replicas=None))
    results["over all, attach"] = str(error.value)
    results["forgotten"] = _forgotten()
    pretend_to_have_accelerators()
    old = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    with pytest.raises(HookConfigError) as error:
        CommHookKwargs(hook="int8").attach(old)
    results["FSDP1"] = str(error.value)
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError) as refused:
        Accelerator(
            cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        )
    results["CPUs, by Accelerate"] = str(refused.value)
    return results


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.MULTI_GPU])
def test_other_dimensions_of_parallelism_are_refused(kind: DistributedType) -> None:
    sizes = ParallelismConfig(dp_shard_size=2, tp_size=2)
    accelerator = mock.Mock(
        distributed_type=kind, is_fsdp2=kind is DistributedType.FSDP, parallelism_config=sizes
    )
    with pytest.raises(
        HookConfigError,
        match="^tp_size in ParallelismConfig: a communication hook works with dp_rep",
    ):
        check_takes_hook(accelerator)


SENTENCES = {
    "per_rank": "expected 'mean' (the default), the mean over the replicas, or 'drop'",
    "over all": (
        "use one replica per machine: ParallelismConfig(dp_replicate_size=MACHINES, dp_shard_size="
    ),
    "CPUs, by Accelerate": "but got DistributedType.MULTI_CPU",  # as docs/transformers.md says
    "FSDP1": (
        "Use fsdp_version=2, with ParallelismConfig(dp_replicate_size=MACHINES,"
        " dp_shard_size=GPUS_OF_EACH)"
    ),
}
SENTENCES["forgotten"] = (
    "hook 'int8_compress' is attached to no model, and Accelerate (FSDP) averages the gradients"
    " without it: call handler.attach(accelerator) before accelerator.prepare(...)"
)
SENTENCES["over all, attach"] = SENTENCES["over all"]


def test_what_cannot_work_is_refused_with_what_to_do(run_ranks: Any) -> None:
    for messages in run_ranks(_refused, world_size=4):
        assert messages.keys() == SENTENCES.keys()
        for name, message in messages.items():
            assert SENTENCES[name] in message, name
