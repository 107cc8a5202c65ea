"""`CommHookFSDP2` trains shards on CPU ranks, and its distributed checkpoints resume bit-equal."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from commhooks import HookConfigError, PowerSGD
from lightning_commhooks import CommHookCheckpoint, CommHookFSDP2, CommHookMonitor
from tests.support.features import fully_shard_on_gloo
from tests.support.lightning_support import (
    Data,
    Model,
    PoolEnvironment,
    assert_equal,
    caught_warnings,
    cli_config,
    data,
    difference,
    trainer,
)


class Sharded(Model):
    """Every linear layer is a unit."""

    def configure_model(self) -> None:
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return
        mesh = self.trainer.strategy.device_mesh["shard"]
        for layer in self.net:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def strategy(**options: Any) -> CommHookFSDP2:
    options = {"hook": PowerSGD(start_powerSGD_iter=1), "replicate_size": 2} | options
    return CommHookFSDP2(**options)


def whole(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor() for name, p in module.named_parameters()}


def fit(root: str, epochs: int, ckpt_path: str | None = None, **options: Any) -> dict[str, Any]:
    callbacks = options.pop("callbacks", [])
    keeper = ModelCheckpoint(root, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    made = trainer(
        root, strategy=strategy(**options), max_epochs=epochs, callbacks=[keeper, *callbacks]
    )
    module = Sharded(seed=5 if ckpt_path else 0)
    with caught_warnings() as texts:
        made.fit(module, data(), ckpt_path=ckpt_path)
    assert made.strategy.comm_hook is not None
    return {"weights": whole(module), "stats": made.strategy.comm_hook.stats(), "warnings": texts}


def _resumed(root: str) -> dict[str, Any]:
    through = fit(root + "/through", 2)
    resumed = fit(root + "/resumed", 2, f"{root}/through/epoch=0.ckpt")
    files = sorted(path.name for path in Path(root, "through", "epoch=0.ckpt").iterdir())
    return {"through": through, "resumed": resumed, "files": files}


def test_a_resumed_fit_is_bit_equal(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_resumed, str(tmp_path), world_size=4, timeout_s=100):
        assert "commhooks" in result["files"] and "meta.pt" in result["files"]
        # An epoch: 64 samples in batches of 8 on four ranks, each with samples of its own.
        assert (
            result["through"]["stats"]["step"] == 4
            and result["through"]["stats"]["compressed_steps"] == 3
        )
        assert (
            result["resumed"]["stats"]["step"] == 4
            and result["resumed"]["stats"]["compressed_steps"] == 2
        )
        assert_equal(result["resumed"]["weights"], result["through"]["weights"])
        assert not any("hook" in text for text in result["resumed"]["warnings"])


def _again_and_foreign(root: str) -> dict[str, Any]:
    """Two fits of one module, with a validation between; then a checkpoint without a hook."""
    made = trainer(root, strategy=strategy(), max_epochs=1, callbacks=[CommHookMonitor()])
    module = Sharded()
    made.fit(module, data())
    first = made.strategy.comm_hook
    made.validate(module, data(), verbose=False)
    made.fit_loop.max_epochs = 2
    made.fit(module, data())
    second = made.strategy.comm_hook
    made.save_checkpoint(root + "/weights.ckpt", weights_only=True)
    weights_only = not Path(root, "weights.ckpt", "commhooks").exists()
    return {
        "anew": first is not second and first is not None and first.stats()["step"] == 4,
        "trained": second.stats()["step"] == 4,
        "weights only": weights_only,
        # More follows where another test has imported `pytorch_lightning`: see
        # `HookedStrategy.__repr__`.
        "repr": repr(made.strategy).partition(" (")[0]
        == "CommHookFSDP2(hook='powerSGD', replicate_size=2)",
    }


def test_fits_follow_each_other(run_ranks: Any, tmp_path: Path) -> None:
    for outcome in run_ranks(_again_and_foreign, str(tmp_path)):
        assert all(outcome.values()), outcome


class _NotSharded(Sharded):
    def configure_model(self) -> None:
        pass


class _OverLightningsMesh(Sharded):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class _PartBeside(Sharded):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.head = torch.nn.Linear(3, 3)


def _refused(root: str) -> list[str]:
    errors = []
    for module, options in (
        (Sharded(), {"replicate_size": 3}),
        (Sharded(), {"callbacks": [CommHookCheckpoint()]}),
        (_NotSharded(), {}),
        (_OverLightningsMesh(), {}),
    ):
        callbacks = options.pop("callbacks", [])
        made = trainer(root, strategy=strategy(**options), max_epochs=1, callbacks=callbacks)
        with pytest.raises(HookConfigError) as error:
            made.fit(module, data())
        errors.append(str(error.value))
    return errors


def test_what_cannot_work_is_refused(run_ranks: Any, tmp_path: Path) -> None:
    for size, callback, not_sharded, over_another in run_ranks(
        _refused, str(tmp_path), world_size=4
    ):
        assert "replicate_size=3 does not divide the number of ranks, which is 4" in size
        assert "leave out the CommHookCheckpoint" in callback
        assert "needs one sharded module that contains all others, and found none" in not_sharded
        assert "is sharded over another mesh than this strategy's" in over_another
        assert "mesh=self.trainer.strategy.device_mesh['shard']" in over_another


def test_the_mesh_is_an_error_before_the_processes_have_connected() -> None:
    with pytest.raises(
        RuntimeError, match="the device mesh exists once the processes have connected"
    ):
        strategy(hook="int8").device_mesh  # noqa: B018


def _warned(root: str) -> list[str]:
    made = trainer(root, strategy=strategy(hook=PowerSGD(start_powerSGD_iter=100)), max_epochs=1)
    with caught_warnings() as texts:
        made.fit(_PartBeside(), data())
    return [text for text in texts if "drift apart" in text or "has no effect" in text]


def test_parameters_that_are_not_averaged_and_a_late_start_are_warned_about(
    run_ranks: Any, tmp_path: Path
) -> None:
    (beside, late), *others = run_ranks(_warned, str(tmp_path), world_size=2)
    assert "head.weight, head.bias: trained, but not sharded" in beside and not any(others)
    assert "hook 'powerSGD' begins at step 100, but this run ends at step 4" in late


def _accumulated(root: str) -> dict[str, Any]:
    weights = []
    stats = {}
    for replicas in (2, 1):
        options: dict[str, Any] = {"hook": "allreduce", "replicate_size": replicas}
        made = trainer(root, strategy=strategy(**options), max_epochs=1, accumulate_grad_batches=2)
        module = Sharded()
        made.fit(module, data())
        assert made.strategy.comm_hook is not None
        weights.append(whole(module))
        stats = made.strategy.comm_hook.stats() if replicas == 2 else stats
    return {"weights": weights, "passes": stats["backward_passes"], "steps": made.global_step}


@fully_shard_on_gloo
def test_replicas_of_shards_train_as_one_replica_and_send_what_was_accumulated(
    run_ranks: Any, tmp_path: Path
) -> None:
    for result in run_ranks(_accumulated, str(tmp_path), world_size=4):
        assert result["passes"] == result["steps"] == 1  # of two batches
        assert difference(*result["weights"]) < 1e-6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"replicate_size": 0}, "replicate_size=0"),
        ({"save_residual": "per_rank"}, "save_residual='per_rank'"),
        ({"hook": "powersgt"}, "did you mean"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(HookConfigError, match=sentence):
        strategy(**options)


def _from_yaml(config: str, root: str) -> dict[str, Any]:
    cli = LightningCLI(
        Sharded,
        args=["fit", "--config", config],
        run=True,
        save_config_callback=None,
        seed_everything_default=False,
        trainer_defaults={"plugins": [PoolEnvironment()], "default_root_dir": root},
        datamodule_class=Data,
    )
    hook = cli.trainer.strategy.comm_hook
    return {
        "options": hook.options,
        "shards": cli.trainer.strategy.device_mesh.shape,
        "step": hook.stats()["step"],
    }


def test_the_strategy_is_read_from_yaml(run_ranks: Any, tmp_path: Path) -> None:
    init_args = {
        "hook": "powerSGD",
        "hook_options": {"start_powerSGD_iter": 0.5},
        "replicate_size": 2,
    }
    config = cli_config(tmp_path / "c.yaml", "CommHookFSDP2", epochs=1, **init_args)
    for result in run_ranks(_from_yaml, config, str(tmp_path)):
        assert result["options"]["start_powerSGD_iter"] == 2 and result["step"] == 4
        assert result["shards"] == (2, 1)
