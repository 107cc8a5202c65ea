"""`lightning_commhooks.pytorch_lightning`: the same strategies and callbacks for the package
`pytorch_lightning`. The other tests of Lightning are for `lightning.pytorch`; these hold what could
differ.
"""

import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.fabric
import pytest
import torch
import torch.distributed as dist

import lightning_commhooks
from commhooks import PowerSGD
from tests.support import lightning_support as support
from tests.support import warm
from tests.support.lightning_support import (
    PoolEnvironment,
    assert_equal,
    caught_warnings,
    data,
    weights,
)
from tests.support.workers import RanksFailed

twin = pytest.importorskip("pytorch_lightning")

import lightning_fabric  # noqa: E402
from lightning_fabric.plugins import ClusterEnvironment  # noqa: E402
from pytorch_lightning.cli import LightningCLI  # noqa: E402
from pytorch_lightning.strategies import StrategyRegistry  # noqa: E402

from lightning_commhooks import fabric  # noqa: E402
from lightning_commhooks import lightning_fabric as twin_fabric  # noqa: E402
from lightning_commhooks import pytorch_lightning as ours  # noqa: E402

HOOK = PowerSGD(start_powerSGD_iter=4, matrix_approximation_rank=2)


class Pool(PoolEnvironment, ClusterEnvironment):
    """`PoolEnvironment` for the twin."""


class Model(twin.LightningModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Data(twin.LightningDataModule):
    def train_dataloader(self) -> Any:
        return data()


def _fit(
    root: str, seed: int = 0, ckpt_path: str | None = None, **options: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    options = {"strategy": ours.CommHookDDP(HOOK), "max_epochs": 4} | options
    trainer = support.trainer(root, pool=False, made_by=twin.Trainer, plugins=[Pool()], **options)
    model = Model(seed)
    trainer.fit(model, data(), ckpt_path=ckpt_path)
    return trainer, weights(model)


def _saved_and_resumed(root: str) -> dict[str, Any]:
    keeper = twin.callbacks.ModelCheckpoint(
        root, filename="{step}", save_top_k=-1, every_n_epochs=2
    )
    monitor = ours.CommHookMonitor(every_n_steps=1)
    with caught_warnings() as texts:
        _, whole = _fit(root, callbacks=[keeper, monitor], enable_checkpointing=True)
    trainer, resumed = _fit(root, seed=1, ckpt_path=f"{root}/step=8.ckpt")
    saved = torch.load(f"{root}/step=8.ckpt", weights_only=True)["commhooks"]
    return {
        "whole": whole,
        "resumed": resumed,
        "stats": ours.hook_stats(trainer),
        "residuals": sum(entry["residual"] is not None for entry in saved["parameters"].values()),
        "warnings": [text for text in texts if "commhooks" in text],
        "callbacks": [
            type(callback).__module__
            for callback in trainer.callbacks
            if "CommHook" in type(callback).__name__
        ],
    }


def test_a_resumed_fit_is_bit_equal(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_saved_and_resumed, str(tmp_path))
    for rank in ranks:
        assert_equal(rank["resumed"], rank["whole"])
        assert_equal(rank["whole"], ranks[0]["whole"])
        # since the resume
        assert rank["stats"]["step"] == 16 and rank["stats"]["compressed_steps"] == 8
        assert rank["residuals"] == 2 and not rank["warnings"]
        assert rank["callbacks"] == ["lightning_commhooks.pytorch_lightning"]


def _by_name(root: str) -> dict[str, Any]:
    trainer, trained = _fit(root, strategy="ddp_powersgd", max_epochs=1)
    return {
        "type": type(trainer.strategy).__module__,
        "stats": trainer.strategy.comm_hook.stats(),
        "weights": trained,
    }


def test_names_are_those_of_lightning(run_ranks: Any, tmp_path: Path) -> None:
    from lightning.pytorch.strategies import StrategyRegistry as Other

    names = {name for name in Other if Other[name]["strategy"] is lightning_commhooks.CommHookDDP}
    assert len(names) >= 12
    for name in names:
        assert StrategyRegistry[name]["strategy"] is ours.CommHookDDP
        assert StrategyRegistry[name]["init_params"] == Other[name]["init_params"]
    for rank in run_ranks(_by_name, str(tmp_path)):
        assert (
            rank["type"] == "lightning_commhooks.pytorch_lightning"
            and rank["stats"]["compressed_steps"] == 3
        )


def _steps(made: Any, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        batch = torch.randn(
            8, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
        )
        made.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _with_fabric(package: Any, strategy: Any, pool: Any, path: str) -> dict[str, torch.Tensor]:
    """Return the weights after eight steps, of which the last three are repeated after a load."""
    made = package.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[pool])
    made.launch()
    net = Model().net
    model, optimizer = made.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    state = {"model": model, "optimizer": optimizer}
    _steps(made, model, optimizer, range(5))
    made.save(path, state)
    _steps(made, model, optimizer, range(5, 8))
    whole = weights(net)
    made.load(path, state)
    _steps(made, model, optimizer, range(5, 8))
    assert_equal(weights(net), whole)
    assert made.strategy.hook_of(model).stats()["compressed_steps"] == 4 + 3
    return whole


def _with_both_fabrics(root: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return (
        _with_fabric(
            lightning.fabric, fabric.CommHookDDP(HOOK), PoolEnvironment(), f"{root}/one.ckpt"
        ),
        _with_fabric(lightning_fabric, twin_fabric.CommHookDDP(HOOK), Pool(), f"{root}/other.ckpt"),
    )


def test_fabric_of_either_package_trains_and_resumes_alike(run_ranks: Any, tmp_path: Path) -> None:
    for one, other in run_ranks(_with_both_fabrics, str(tmp_path)):
        assert_equal(one, other)


def test_strategies_are_pickled_by_name() -> None:
    for strategy in (
        ours.CommHookDDP(HOOK),
        ours.CommHookFSDP2("int8"),
        lightning_commhooks.CommHookDDP(HOOK),
    ):
        copy = pickle.loads(pickle.dumps(strategy))
        assert type(copy) is type(strategy) and copy._request == strategy._request


# ---- wrong twins ---------------------------------------------------------------------------------


def test_a_trainer_gets_a_strategy_of_its_own_package_only() -> None:
    import lightning.pytorch as pl

    right = r"write `from lightning_commhooks import CommHookDDP`"
    with pytest.raises(ValueError, match=rf"a `lightning.pytorch.Trainer` cannot use it: {right}"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=ours.CommHookDDP(HOOK), logger=False)
    right = (
        "write `from lightning_commhooks.pytorch_lightning import CommHookFSDP2`, or replace every"
        " import"
    )
    with pytest.raises(ValueError, match=rf"a `pytorch_lightning.Trainer` cannot use it: {right}"):
        strategy = lightning_commhooks.CommHookFSDP2(HOOK)
        twin.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)


def _callback_of_the_other(root: str, name: str) -> None:
    _fit(root, callbacks=[getattr(lightning_commhooks, name)()])


@pytest.mark.parametrize("name", ["CommHookCheckpoint", "CommHookMonitor"])
def test_a_callback_of_the_other_package_is_an_error(
    run_ranks: Any, tmp_path: Path, name: str
) -> None:
    right = f"write `from lightning_commhooks.pytorch_lightning import {name}`"
    with pytest.raises(
        RanksFailed,
        match=f"HookConfigError: this {name} is for the Trainer of lightning.pytorch.*{right}",
    ):
        run_ranks(_callback_of_the_other, str(tmp_path), name)


# ---- CLI -----------------------------------------------------------------------------------------


def _cli(config: str, root: str) -> Any:
    cli = LightningCLI(
        Model,
        Data,
        args=["fit", "--config", config],
        save_config_callback=None,
        seed_everything_default=False,
        trainer_defaults={"plugins": [Pool()], "default_root_dir": root},
    )
    return cli.trainer.strategy.comm_hook.options


def test_the_cli_takes_the_strategy(run_ranks: Any, tmp_path: Path) -> None:
    hook = {"class_path": "commhooks.PowerSGD", "init_args": {"matrix_approximation_rank": 3}}
    config = support.cli_config(
        tmp_path / "c.yaml", "pytorch_lightning.CommHookDDP", epochs=1, hook=hook, bucket_cap_mb=1
    )
    for options in run_ranks(_cli, config, str(tmp_path)):
        assert options["matrix_approximation_rank"] == 3


# ---- imports -------------------------------------------------------------------------------------


def _packages(folder: Path, **sources: str) -> None:
    """Packages with the names that ours takes from Lightning. Real ones take 6 s each to import."""
    names = "class Callback: ...\nDDPStrategy = ModelParallelStrategy = Callback\n"
    registry = (
        "class StrategyRegistry(dict):\n    def register(self, name, *_, **__): self[name] = _\n"
    )
    for name in ("lightning", "lightning/pytorch", "pytorch_lightning"):
        (folder / name).mkdir()
        source = sources.get(name, f"__version__ = '2.6.0'\n{names}")
        (folder / name / "__init__.py").write_text(source)
        (folder / name / "strategies.py").write_text(
            f"{names}{registry}StrategyRegistry = StrategyRegistry()"
        )


def _imported(folder: Path, code: str) -> list[str]:
    """Return which packages know the strategy names after `code`, in a process without them."""
    code = f"""import sys
for name in [*sys.modules]:
    if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
        del sys.modules[name]  # of the process that this one was forked from
sys.path.insert(0, {str(folder)!r})
{code}
for package in ("lightning.pytorch", "pytorch_lightning"):
    if package in sys.modules and hasattr(sys.modules[package], "Callback"):
        print(package, "ddp_powersgd" in sys.modules[package].strategies.StrategyRegistry)
assert not [each for each in sys.meta_path if "commhooks" in type(each).__module__]"""
    done = subprocess.run(
        [warm.python("lightning.pytorch"), "-c", code], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "import lightning.pytorch; from lightning_commhooks import CommHookDDP",
            ["lightning.pytorch True"],
        ),
        (
            "import pytorch_lightning, lightning_commhooks.pytorch_lightning",
            ["pytorch_lightning True"],
        ),
        ("import lightning_commhooks", ["lightning.pytorch True", "pytorch_lightning True"]),
    ],
)
def test_names_are_registered_with_what_is_imported_or_else_with_both(
    tmp_path: Path, code: str, expected: list[str]
) -> None:
    _packages(tmp_path)
    assert _imported(tmp_path, code) == expected


@pytest.mark.parametrize(
    ("package", "sentence"),
    [
        (
            "pytorch_lightning",
            (
                "lightning_commhooks.pytorch_lightning needs pytorch_lightning: pip install"
                " pytorch-lightning. For lightning.pytorch import from lightning_commhooks"
            ),
        ),
        (
            "lightning_fabric",
            (
                "lightning_commhooks.lightning_fabric needs lightning_fabric: pip install"
                " lightning-fabric. For lightning.fabric import from lightning_commhooks.fabric"
            ),
        ),
    ],
)
def test_a_missing_package_is_named(
    package: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"lightning_commhooks.{package}")
    with pytest.raises(ImportError) as error:
        importlib.import_module(f"lightning_commhooks.{package}")
    assert str(error.value) == sentence


def test_a_broken_twin_does_no_harm(tmp_path: Path) -> None:
    _packages(tmp_path, pytorch_lightning="raise AttributeError('of an old torch')")
    assert _imported(tmp_path, "import lightning_commhooks") == ["lightning.pytorch True"]
