"""CommHookDDP is made by name, in Python and by LightningCLI, and refuses what cannot work."""

import importlib
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import clean_env
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks
from commhooks import BF16Compress, HookConfigError
from commhooks.registry import COMPRESSORS
from lightning_commhooks import CommHookDDP
from tests.support import lightning_support as support
from tests.support import warm
from tests.support.lightning_support import (
    Data,
    Model,
    assert_equal,
    cli_config,
    data,
    trainer,
    weights,
)
from tests.support.repository import PYTHONPATH

NAMES = {
    "ddp_powersgd": "powerSGD",
    "ddp_batched_powersgd": "batched_powerSGD",
    "ddp_fp16_compress": "fp16_compress",
    "ddp_bf16_compress": "bf16_compress",
    "ddp_int8_compress": "int8_compress",
    "ddp_int4_compress": "int4_compress",
    "ddp_auto": "auto",
}


# ---- names ---------------------------------------------------------------------------------------


def _by_name(root: str, name: str) -> dict[str, Any]:
    t = trainer(root, strategy=name, max_epochs=3)
    model = Model()
    t.fit(model, data())
    return {"weights": weights(model), "stats": t.strategy.comm_hook.stats()}


def test_a_registered_name_trains(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_by_name, str(tmp_path), "ddp_powersgd")
    for rank in ranks:
        assert rank["stats"]["hook"] == "powerSGD" and rank["stats"]["backward_passes"] == 12
        assert rank["stats"]["bytes_sent"] < 0.6 * rank["stats"]["bytes_uncompressed"]
        assert rank["stats"]["compressed_steps"] == 10  # all but the first 10 % of 12 steps
        assert_equal(rank["weights"], ranks[0]["weights"])


def test_importing_again_registers_nothing_twice() -> None:
    before = set(StrategyRegistry)
    importlib.reload(lightning_commhooks)
    assert set(StrategyRegistry) == before and set(NAMES) <= before
    for name, hook in NAMES.items():
        assert StrategyRegistry[name]["strategy"] is CommHookDDP
        assert StrategyRegistry[name]["init_params"] == {"hook": hook}
        notebook = name.replace("ddp_", "ddp_notebook_")
        assert StrategyRegistry[notebook]["strategy"] is CommHookDDP
        assert StrategyRegistry[notebook]["init_params"] == {"hook": hook, "start_method": "fork"}
    assert "ddp" in before and StrategyRegistry["ddp"]["strategy"] is not CommHookDDP


def test_the_names_for_notebooks_are_those_that_work_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)  # private, lightning 2.6
    pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_notebook_powersgd", logger=False)
    with pytest.raises(
        MisconfigurationException, match="not compatible with an interactive environment"
    ):
        pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_powersgd", logger=False)


# ---- construction --------------------------------------------------------------------------------


def my_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages, as DDP does without a hook."""
    future = dist.all_reduce(
        bucket.buffer().div_(dist.get_world_size()), async_op=True
    ).get_future()
    return future.then(lambda done: done.value()[0])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"hook": "powerSDG"}, r"unknown hook 'powerSDG' \(did you mean 'powerSGD'\?\)"),
        (
            {"hook": "powerSGD", "bucket_cap": 25},
            r"CommHookDDP has no argument 'bucket_cap' \(did you mean 'bucket_cap_mb'\?\); known"
            r" are "
            "(?!.*(ddp_comm|mixed_)).*find_unused_parameters, .*static_graph",
        ),
        (
            {"hook": "powerSGD", "wraper": "fp16"},
            r"no argument 'wraper' \(did you mean 'wrapper'\?\)",
        ),
        ({"hook": "powerSGD", "device_ids": [0]}, "CommHookDDP has no argument 'device_ids'"),
        (
            {"hook": "int8", "loss_scale": 100},
            "no argument 'loss_scale': Lightning passes the scale.*; leave it out",
        ),
        (
            {"hook": "int8", "total_steps": 100},
            "no argument 'total_steps': the Trainer knows .*; leave it out",
        ),
        (
            {"hook": "powerSGD", "ddp_comm_hook": my_hook},
            "ddp_comm_hook= together with hook=: .* is hook='local_sgd'",
        ),
        ({"hook": "powerSGD", "ddp_comm_state": object()}, "ddp_comm_state= together with hook="),
        (
            {"hook": "powerSGD", "ddp_comm_wrapper": my_hook},
            "ddp_comm_wrapper= together with hook=",
        ),
        (
            {"hook": "powerSGD", "model_averaging_period": 4},
            "model_averaging_period= together with hook=",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments: dict[str, Any], text: str) -> None:
    """What `HookRequest` refuses for every front end is in options/test_request.py."""
    with pytest.raises(HookConfigError, match=text):
        CommHookDDP(**arguments)


def test_every_keyword_of_ddp_is_known_and_none_means_none() -> None:
    names = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {
        "self",
        "module",
        "device_ids",
    }
    CommHookDDP(
        "powerSGD",
        **dict.fromkeys(names),
        ddp_comm_hook=None,
        ddp_comm_state=None,
        ddp_comm_wrapper=None,
    )


def _pickled_after_fit(root: str) -> Any:
    t = trainer(root, max_epochs=1)
    t.fit(Model(), data())
    t.strategy.model = None
    copy = pickle.loads(pickle.dumps(t.strategy.__getstate__()["_comm_hook"]))
    plan = str(t.strategy.comm_hook.plan())
    return {
        "copy": copy,
        "plan": plan,
        "compressed": t.strategy.comm_hook.stats()["compressed_steps"],
    }


def test_after_fit_the_hook_is_kept_but_never_pickled(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_pickled_after_fit, str(tmp_path)):
        assert rank["copy"] is None
        assert "net.2.weight" in rank["plan"]
        assert rank["compressed"] == 2


def _with_a_callback_of_the_twin(root: str) -> list[str]:
    with mock.patch.dict(os.environ):  # this import sets a variable where no test before has
        import pytorch_lightning as twin

    class Mine(twin.Callback):
        pass

    callbacks: Any = [Mine(), pl.Callback(), twin.callbacks.ModelCheckpoint(root)]
    with support.caught_warnings() as texts:
        trainer(root, max_epochs=1, callbacks=callbacks).fit(Model(), data())
    return [text for text in texts if "pytorch_lightning" in text]


def test_a_callback_of_the_twin_is_a_warning_of_rank_0(run_ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    (text,), _ = run_ranks(_with_a_callback_of_the_twin, str(tmp_path))
    assert text.startswith(
        "commhooks: this Trainer is from lightning.pytorch, and these are from pytorch_lightning:"
        " Mine, Model"
    )
    assert text.endswith("replace every import of pytorch_lightning")


def test_without_pytorch_lightning_the_representation_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    assert repr(CommHookDDP(BF16Compress())) == "CommHookDDP(hook='bf16_compress')"


# ---- CLI -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns about arguments of the process beside those that it is given."""
    monkeypatch.setattr(sys, "argv", ["program"])


def _cli(arguments: list[str], **options: Any) -> LightningCLI:
    return LightningCLI(
        Model,
        Data,
        args=arguments,
        save_config_callback=None,
        seed_everything_default=False,
        **options,
    )


def _config(folder: Path, hook: Any, **init_args: Any) -> str:
    return cli_config(folder / "c.yaml", "CommHookDDP", hook=hook, **init_args)


POWERSGD = {
    "class_path": "commhooks.PowerSGD",
    "init_args": {
        "matrix_approximation_rank": 2,
        "start_powerSGD_iter": 0.25,
        "min_compression_rate": 1.5,
    },
}


def _cli_fit(config: str, root: str) -> dict[str, Any]:
    plugins = [support.PoolEnvironment()]
    cli = _cli(
        ["fit", "--config", config], trainer_defaults={"plugins": plugins, "default_root_dir": root}
    )
    hook = cli.trainer.strategy.comm_hook
    return {"options": hook.options, "stats": hook.stats(), "weights": weights(cli.model)}


def test_the_cli_trains_with_a_config_class_and_a_bucket_size(
    run_ranks: Any, tmp_path: Path
) -> None:
    config = _config(tmp_path, POWERSGD, bucket_cap_mb=support.SEVERAL_BUCKETS_MB, wrapper="bf16")
    ranks = run_ranks(_cli_fit, config, str(tmp_path))
    for rank in ranks:
        assert rank["options"]["matrix_approximation_rank"] == 2
        assert rank["options"]["start_powerSGD_iter"] == 2  # a quarter of 8 steps
        assert rank["stats"]["compressed_steps"] == 6
        # two per bucket: the bucket size has arrived
        assert rank["stats"]["collectives_last_pass"] == 6
        assert_equal(rank["weights"], ranks[0]["weights"])


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (
            "test_lightning_config.my_hook",
            "my_hook",
        ),  # as jsonargparse writes the path of a function
        ("test_lightning_config:my_hook", "test_lightning_config:my_hook"),  # as commhooks does
    ],
)
def test_the_cli_takes_a_callable(tmp_path: Path, hook: str, name: str) -> None:
    request = _cli(["--config", _config(tmp_path, hook)], run=False).trainer.strategy._request
    assert request.name == name


@pytest.mark.parametrize(
    ("init_args", "text"),
    [
        ({"bucket_cap": 25}, "Option 'bucket_cap' is not accepted"),
        ({"wrapper": "fp8"}, "fp8"),
        ({"save_residual": "men"}, "men"),
    ],
)
def test_cli_typos_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], init_args: dict[str, Any], text: str
) -> None:
    """Those of options: options/test_options.py."""
    with pytest.raises(SystemExit):
        _cli(["--config", _config(tmp_path, POWERSGD, **init_args)], run=False)
    assert text in capsys.readouterr().err


CLI_SCRIPT = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_commhooks
LightningCLI(BoringModel, run=False)
"""


@pytest.mark.parametrize("process", [{}, {"RANK": "1", "WORLD_SIZE": "2"}])
def test_the_sentence_about_a_wrong_option_is_the_last_line(
    tmp_path: Path, process: dict[str, str]
) -> None:
    """jsonargparse's error has it in the middle, before the values of all arguments. Rank 0 alone
    repeats it.
    """
    (tmp_path / "cli.py").write_text(CLI_SCRIPT)
    config = _config(tmp_path, "powerSGD", hook_options={"matrix_aproximation_rank": 2})
    env = clean_env.cleaned(os.environ, str(tmp_path)) | {"PYTHONPATH": PYTHONPATH} | process
    command = [warm.python("lightning.pytorch.cli"), str(tmp_path / "cli.py"), "--config", config]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert (
        done.returncode == 1
        and "Does not validate against any of the Union subtypes" in done.stderr
    )
    sentence = (
        "commhooks: error: hook 'powerSGD' has no option 'matrix_aproximation_rank' "
        "(did you mean 'matrix_approximation_rank'?)"
    )
    assert done.stderr.splitlines()[-1].startswith(sentence) is not bool(process), done.stderr


def test_cli_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _cli(["--trainer.strategy.help", "lightning_commhooks.CommHookDDP"], run=False)
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for name in ("hook", "hook_options", "hook_state", "wrapper", "save_residual", "strict"):
        assert f"--trainer.strategy.{name} " in text
    for name in ("start_method", "process_group_backend", "timeout"):  # of DDPStrategy
        assert f"--trainer.strategy.{name} " in text
    # of DDP
    for name in (
        "bucket_cap_mb",
        "find_unused_parameters",
        "static_graph",
        "gradient_as_bucket_view",
    ):
        assert f"--trainer.strategy.{name} " in text
    classes = [kind.Config.__name__ for kind in COMPRESSORS.values()]
    assert ", ".join([*classes, "Callable", "str"]) in _joined(text)
    with pytest.raises(SystemExit):
        _cli(
            [
                "--trainer.strategy=lightning_commhooks.CommHookDDP",
                "--trainer.strategy.hook.help=PowerSGD",
            ],
            run=False,
        )
    text = _joined(capsys.readouterr().out)
    assert (
        "matrix_approximation_rank" in text
        and "start_powerSGD_iter" in text
        and "rank of the factors" in text
    )


def _joined(text: str) -> str:
    return " ".join(text.split())
