"""`CommHookTrainer` on two real ranks: training, checkpoints, resuming, and what makes it wrap a model anew."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

import clean_env  # noqa: E402
from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerators import OPTIONS, Warnings, accelerate_launched, hook_files, launched  # noqa: E402
from training import flat, residuals  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_utils import HPSearchBackend  # noqa: E402
from transformers_trainer import batch, make_model, manual  # noqa: E402  # of examples/

import commhooks  # noqa: E402
from accelerate_commhooks import CommHookKwargs  # noqa: E402
from accelerate_commhooks.transformers import CommHookTrainer, CommHookTrainerMixin  # noqa: E402

REPOSITORY = Path(__file__).parents[1]
FILES = ["comm_hook.pt", "comm_hook_rank0.pt", "comm_hook_rank1.pt"]
EPOCH = 8  # steps, with two ranks and the default batch size
POWER_SGD = {"hook": "powerSGD", "hook_options": OPTIONS}
# For a run that resumes, so that loading must do the work.
WRONG = {"hook": "powerSGD", "hook_options": OPTIONS | {"start_powerSGD_iter": 7}}
LAUNCH_LIMIT_S = 150


class Moments(TrainerCallback):
    """The hook's memory at the first step of each attempt to train, and how many hooks there are."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.trainer: Any = None
        self._begins = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begins = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        hook = getattr(self.trainer, "comm_hook", None)
        if self._begins and hook is not None and hook.name == "powerSGD":
            seen = {
                "step": hook.stats()["step"],
                "residuals": residuals(hook),
                "start": hook.options["start_powerSGD_iter"],
                "hooks": len(self.trainer._hook_handler.attached_hooks),
            }
            self.seen.append(seen)
        self._begins = False


def make_trainer(folder: Any, cls: Any = CommHookTrainer, *, seed: int = 3, hook: Any = None, **settings: Any) -> Any:
    """A trainer that really is one of two ranks. `hook`: its arguments for the hook, of PowerSGD by default."""
    torch.manual_seed(seed)
    model = make_model(width=16)
    settings = {"max_steps": EPOCH, "save_steps": 4, "ddp_bucket_cap_mb": 0.005} | settings
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    train, _ = manual(32)
    moments = Moments()
    given = {} if cls is Trainer else POWER_SGD if hook is None else hook
    few = torch.utils.data.Subset(train, range(EPOCH * 2 * 4))
    trainer = cls(model, args, batch, few, callbacks=[moments], **given)
    moments.trainer = trainer
    assert trainer.accelerator.distributed_type is DistributedType.MULTI_CPU
    assert trainer.args.world_size == dist.get_world_size() == 2
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    hook = getattr(trainer, "comm_hook", None)
    return {
        "weights": flat(trainer.model.parameters()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "residuals": {} if hook is None or hook.name != "powerSGD" else residuals(hook),
        "stats": {} if hook is None else hook.stats(),
        "seen": next(each.seen for each in trainer.callback_handler.callbacks if isinstance(each, Moments)),
    }


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert torch.equal(one["weights"], other["weights"])
    assert one["losses"] == other["losses"]
    assert one["residuals"].keys() == other["residuals"].keys()
    assert all(torch.equal(one["residuals"][name], other["residuals"][name]) for name in one["residuals"])


# ---- saving and resuming ---------------------------------------------------------------------------------------------


@launched
def _run(folder: Path, resume: Any = None, cls: Any = CommHookTrainer, seed: int = 3, **kwargs: Any) -> dict[str, Any]:
    with Warnings() as texts:
        trainer = make_trainer(folder, cls, seed=seed, **kwargs)
        trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer) | {"warnings": texts}


def _resume(run_ranks: Any, checkpoint: Path, **kwargs: Any) -> list[dict[str, Any]]:
    """A run with other weights and another start of compression, which loads them."""
    return run_ranks(_run, checkpoint.parent / "resumed", resume=str(checkpoint), seed=99, **kwargs)


@pytest.mark.parametrize("more", [{}, {"wrapper": "bf16", "save_residual": "mean"}], ids=["per_rank", "mean"])
def test_resume_is_bit_equal(run_ranks: Any, tmp_path: Path, more: dict[str, Any]) -> None:
    through = run_ranks(_run, tmp_path, hook=POWER_SGD | more)
    middle, end = tmp_path / "checkpoint-4", tmp_path / "checkpoint-8"
    for folder in (middle, end):
        assert hook_files(folder) == (FILES[:1] if more else FILES)  # and no temporary ones
        for name in hook_files(folder):
            torch.load(folder / name, weights_only=True)
    resumed = [_resume(run_ranks, middle, hook=WRONG | more)]
    if not more:
        shutil.rmtree(end)
        resumed.append(run_ranks(_run, tmp_path, resume=True, seed=99, hook=WRONG))
    for results in resumed:
        for run, again in zip(through, results, strict=True):
            assert_equal(run, again)
            assert torch.equal(again["weights"], through[0]["weights"])  # replicas
            assert again["warnings"] == []
            [at_start] = again["seen"]
            assert (at_start["step"], at_start["start"]) == (4, OPTIONS["start_powerSGD_iter"])
            assert any(residual.norm() > 0 for residual in at_start["residuals"].values())
            assert again["stats"]["step"] == EPOCH and again["stats"]["compressed_steps"] == 4
    for run in through:
        stats = run["stats"]
        assert stats["compressed_steps"] == EPOCH - OPTIONS["start_powerSGD_iter"]
        assert stats["compression_rate"] > 1.5 and stats["collectives_last_pass"] >= 6  # several buckets


def test_control_without_a_hook(run_ranks: Any, tmp_path: Path) -> None:
    """The Trainer itself resumes bit-equal here, so the test above is about the hook."""
    through = run_ranks(_run, tmp_path, cls=Trainer)
    resumed = _resume(run_ranks, tmp_path / "checkpoint-4", cls=Trainer)
    for run, again in zip(through, resumed, strict=True):
        assert_equal(run, again)
    assert hook_files(tmp_path / "checkpoint-4") == []


def test_without_the_hooks_files_the_resumed_run_differs(run_ranks: Any, tmp_path: Path) -> None:
    """And what `save_total_limit` and `save_only_model` leave in the folder."""
    through = run_ranks(_run, tmp_path, save_steps=2, save_total_limit=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint-6", "checkpoint-8"]
    assert all(hook_files(folder) == FILES for folder in tmp_path.iterdir())
    for name in FILES:
        (tmp_path / "checkpoint-6" / name).unlink()
    resumed = _resume(run_ranks, tmp_path / "checkpoint-6", hook=POWER_SGD, save_only_model=True)
    assert not torch.equal(resumed[0]["weights"], through[0]["weights"])
    assert torch.equal(resumed[0]["weights"], resumed[1]["weights"])
    [warning] = resumed[0]["warnings"]
    assert "holds no state of a communication hook (comm_hook.pt)" in warning
    assert [each["step"] for each in resumed[0]["seen"]] == [0]
    assert hook_files(tmp_path / "resumed" / "checkpoint-8") == []


def test_the_checkpoint_of_another_model_is_refused(run_ranks: Any, tmp_path: Path) -> None:
    for error in run_ranks(_resume_from_another_model, tmp_path):
        assert "layers.1.mlp.up_proj.weight" in error and "comm_hook.pt" in error


@launched
def _resume_from_another_model(folder: Path) -> str:
    trainer = make_trainer(folder, max_steps=4)
    trainer.train()
    if dist.get_rank() == 0:
        saved = torch.load(folder / "checkpoint-4" / FILES[0], weights_only=True)
        name = next(name for name in saved["parameters"] if name.endswith("layers.1.mlp.up_proj.weight"))
        saved["parameters"] = {("other" if key == name else key): each for key, each in saved["parameters"].items()}
        saved["fingerprint"] = commhooks.payload_parts.fingerprint(saved)
        torch.save(saved, folder / "checkpoint-4" / FILES[0])
    dist.barrier()
    with pytest.raises(commhooks.PayloadError) as caught:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    return str(caught.value)


def test_a_checkpoint_without_the_hook_is_noticed(run_ranks: Any, tmp_path: Path) -> None:
    """A user's own `save_model` may leave out what the mixin does."""
    first, second = run_ranks(_run, tmp_path, cls=OwnSave)
    assert [text.partition(":")[0] for text in first["warnings"]] == [
        f"the checkpoint of step {step} does not hold the state of hook 'powerSGD'" for step in (4, 8)
    ]
    assert "OwnSave.save_model does not call super()" in first["warnings"][0]
    assert second["warnings"] == []


class OwnSave(CommHookTrainer):
    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        Trainer.save_model(self, output_dir, _internal_call)


# ---- what makes the Trainer wrap a model anew ------------------------------------------------------------------------


def test_a_second_train_is_fresh_unless_it_resumes(run_ranks: Any, tmp_path: Path) -> None:
    """And a fraction of the run is one of the steps that the Trainer works out each time."""
    for first, second, third in run_ranks(_train_three_times, tmp_path):
        assert second["stats"]["step"] == second["stats"]["backward_passes"] == 3 * EPOCH
        assert second["stats"]["compressed_steps"] == 18
        fresh, fresh_too, loaded = third["seen"]
        assert (fresh["step"], fresh_too["step"], loaded["step"]) == (0, 0, 8)
        assert fresh["residuals"] == fresh_too["residuals"] == {} and loaded["residuals"] != {}
        # A quarter of 2 epochs, a quarter of 3; then the saved number wins.
        assert [each["start"] for each in third["seen"]] == [4, 6, 4]
        assert [each["hooks"] for each in third["seen"]] == [1, 1, 1]
        assert_equal(first, third)


@launched
def _train_three_times(folder: Path) -> list[dict[str, Any]]:
    hook = {"hook": "powerSGD", "hook_options": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0.25}}
    trainer = make_trainer(folder / "first", hook=hook, max_steps=-1, num_train_epochs=2, save_steps=8)
    assert trainer.comm_hook is None
    trainer.train()
    results = [outcome(trainer)]
    trainer.evaluate(trainer.train_dataset)
    trainer.args.num_train_epochs, trainer.args.output_dir = 3, str(folder / "second")
    trainer.train()
    results.append(outcome(trainer))
    trainer.args.num_train_epochs = 2
    trainer.train(resume_from_checkpoint=str(folder / "first" / "checkpoint-8"))
    return [*results, outcome(trainer)]


def test_default_start_is_a_tenth_of_the_run_and_total_steps_goes_first(run_ranks: Any, tmp_path: Path) -> None:
    for results in run_ranks(_starts, tmp_path):
        assert results == [1, 5]


@launched
def _starts(folder: Path) -> list[int]:
    starts = []
    for total_steps in (None, 50):
        trainer = make_trainer(folder, hook={"hook": "powerSGD", "total_steps": total_steps}, save_strategy="no")
        trainer.train()
        starts.append(trainer.comm_hook.options["start_powerSGD_iter"])
    return starts


def test_hyperparameter_search_keeps_the_hook(run_ranks: Any, tmp_path: Path) -> None:
    for results in run_ranks(_two_trials, tmp_path):
        for result in results:
            assert result["stats"]["step"] == 4 and result["stats"]["compressed_steps"] == 1
        assert [each["step"] for each in results[1]["seen"]] == [0, 0]
        assert not torch.equal(results[0]["weights"], results[1]["weights"])
    for run in ("run-0", "run-1"):
        assert hook_files(tmp_path / run / "checkpoint-4") == FILES


@launched
def _two_trials(folder: Path) -> list[dict[str, Any]]:
    """What `hyperparameter_search` does with Optuna, which is not installed."""
    trainer = make_trainer(folder, max_steps=4)
    first_accelerator, first_model = trainer.accelerator, trainer.model
    start = {name: tensor.clone() for name, tensor in first_model.state_dict().items()}

    def model_init() -> torch.nn.Module:
        model = make_model(width=16)
        model.load_state_dict(start)
        return model

    trainer.model_init = model_init
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = lambda trial: trial.params
    results = []
    for number, learning_rate in enumerate((0.01, 0.02)):
        trial = mock.Mock(number=number, params={"learning_rate": learning_rate})
        trainer.model_wrapped = None
        before = trainer.accelerator
        with mock.patch("transformers.integrations.hp_params", lambda trial: trial.params):
            trainer.train(trial=trial)
        assert trainer.accelerator is not before
        assert trainer.model_wrapped.bucket_bytes_cap == int(0.005 * 2**20)
        results.append(outcome(trainer))
    assert first_accelerator is not trainer.accelerator
    return results


def test_auto_find_batch_size_starts_fresh_in_a_users_trainer(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_auto_find_batch_size, tmp_path):
        assert result["attempts"] == [4, 3]
        assert [each["step"] for each in result["seen"]] == [0, 0]
        assert result["seen"][1]["residuals"] == {} and result["seen"][1]["hooks"] == 1
        assert result["stats"]["step"] == result["stats"]["backward_passes"] == EPOCH
        assert torch.equal(result["weights"], result["first"])


class TheirTrainer(Trainer):
    """Somebody's own: with an argument of its own, and too large a batch for the memory."""

    def __init__(self, *args: Any, fits: int = 3, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fits = fits

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if len(inputs["input_ids"]) > self.fits and self.state.global_step == 5:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, num_items_in_batch)


class TheirsWithAHook(CommHookTrainerMixin, TheirTrainer):
    pass


@launched
def _auto_find_batch_size(folder: Path) -> dict[str, Any]:
    attempts = []

    class Counting(TheirsWithAHook):
        def set_initial_training_values(self, *args: Any) -> Any:
            attempts.append(self._train_batch_size)
            return super().set_initial_training_values(*args)

    trainer = make_trainer(folder, Counting, auto_find_batch_size=True, hook=POWER_SGD | {"fits": 3})
    trainer.train()
    result = outcome(trainer) | {"attempts": attempts}
    everywhere = [torch.empty_like(result["weights"]) for _ in range(2)]
    dist.all_gather(everywhere, result["weights"])
    return result | {"first": everywhere[0]}


# ---- DDP's arguments -------------------------------------------------------------------------------------------------


def test_ddp_arguments_and_a_handler_of_the_users(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_ddp_arguments, tmp_path)


@launched
def _ddp_arguments(folder: Path) -> None:
    given = {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
    handler = CommHookKwargs(hook="powerSGD", hook_options=OPTIONS, gradient_as_bucket_view=True)
    trainer = make_trainer(folder, hook={"hook": handler}, max_steps=4, save_strategy="no", **given)
    trainer.train()
    ddp = trainer.model_wrapped
    assert ddp.find_unused_parameters is False and ddp.broadcast_buffers is False
    assert ddp.bucket_bytes_cap == int(0.005 * 2**20) and ddp.gradient_as_bucket_view is True
    assert handler.attached is trainer.comm_hook and handler.is_attached(trainer.model)
    assert trainer.comm_hook.stats()["compressed_steps"] == 1

    # The Trainer's own default for models, which is not DDP's, and a hook that a user wrote.
    trainer = make_trainer(folder, hook={"hook": _own_hook, "wrapper": "bf16"}, max_steps=2, save_strategy="no")
    trainer.train()
    assert trainer.model_wrapped.find_unused_parameters is True and trainer.model_wrapped.broadcast_buffers is True
    assert trainer.comm_hook.name.endswith("_own_hook") and trainer.comm_hook.stats()["backward_passes"] == 2


def test_settings_from_outside(run_ranks: Any, tmp_path: Path) -> None:
    """A fraction in the file is one of the Trainer's steps too, where the file does not say of how many."""
    options = "hook_options: {matrix_approximation_rank: 2, start_powerSGD_iter: 0.25}"
    settings = ["hook: powerSGD", options, "gradient_as_bucket_view: true"]
    for name, more, start in (("a.yaml", [], 2), ("b.yaml", ["total_steps: 16"], 4)):
        (tmp_path / name).write_text("\n".join(settings + more))
        assert run_ranks(_outside, tmp_path, tmp_path / name) == [(start, True)] * 2


@launched
def _outside(folder: Path, path: Path) -> tuple[int, bool]:
    with mock.patch.dict(os.environ, {"ACCELERATE_COMM_HOOK_CONFIG": str(path)}):
        trainer = make_trainer(folder, hook={"save_residual": "mean"}, save_steps=8)
    trainer.train()
    assert hook_files(folder / "checkpoint-8") == FILES[:1]
    return trainer.comm_hook.options["start_powerSGD_iter"], trainer.model_wrapped.gradient_as_bucket_view


def _own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])


# ---- one process, and mistakes ---------------------------------------------------------------------------------------


def _alone(folder: Path, **hook: Any) -> CommHookTrainer:
    args = TrainingArguments(
        str(folder), use_cpu=True, max_steps=1, report_to="none", disable_tqdm=True, save_strategy="no",
        dataloader_pin_memory=False, ddp_bucket_cap_mb=5,
    )  # fmt: skip
    return CommHookTrainer(make_model(width=16), args, batch, manual(32)[0], **hook)


def test_one_process_trains_without_a_hook_and_says_so(tmp_path: Path) -> None:
    with accelerate_launched(none=True), Warnings() as texts:
        trainer = _alone(tmp_path, hook="powerSGD")
        trainer.train()
    assert trainer.comm_hook is None
    [text] = texts
    assert "nothing is communicated and hook 'powerSGD' has nothing to do" in text


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ({"hook": "powerSDG"}, "unknown hook 'powerSDG' (did you mean 'powerSGD'?)"),
        ({"hook": "powerSGD", "hook_options": {"rank": 4}}, "no option 'rank'"),
        ({"hook": "powerSGD", "hook_options": {"start_powerSGD_iter": 1.5}}, "start_powerSGD_iter"),
        ({"hook": "powerSGD", "save_residual": "none"}, "save_residual='none'"),
        ({"hook": "powerSGD", "total_steps": 0}, "total_steps=0"),
        (
            {"hook": CommHookKwargs(hook="powerSGD"), "wrapper": "bf16", "strict": False},
            "wrapper and strict beside hook=CommHookKwargs(...)",
        ),
        (
            {"hook": CommHookKwargs(hook="powerSGD", bucket_cap_mb=50)},
            "bucket_cap_mb=50 in CommHookKwargs(...), but ddp_bucket_cap_mb=5 in TrainingArguments(...)",
        ),
    ],
)
def test_mistakes_are_found_at_construction(tmp_path: Path, hook: dict[str, Any], text: str) -> None:
    with accelerate_launched(none=True), pytest.raises(commhooks.HookConfigError) as caught:
        _alone(tmp_path, **hook)
    assert text in str(caught.value)


def test_where_accelerate_does_not_use_ddp_the_hook_is_refused(tmp_path: Path) -> None:
    fsdp = mock.patch.object(Accelerator, "distributed_type", DistributedType.FSDP)
    with accelerate_launched(none=True), fsdp, pytest.raises(commhooks.HookConfigError, match="FSDP"):
        _alone(tmp_path, hook="powerSGD")


def test_a_model_that_is_not_in_ddp_is_an_error(tmp_path: Path) -> None:
    several = mock.patch.object(Accelerator, "num_processes", 2)
    with accelerate_launched(none=True):
        trainer = _alone(tmp_path, hook="powerSGD")
        with several, pytest.raises(commhooks.AttachError, match="a LlamaForCausalLM that"):
            trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate_commhooks.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    sentence = 'accelerate_commhooks.transformers needs transformers: pip install "commhooks[transformers]"'
    with pytest.raises(ImportError) as caught:
        import accelerate_commhooks.transformers  # noqa: F401
    assert str(caught.value) == sentence


# ---- the example, in processes of its own ----------------------------------------------------------------------------

EXAMPLE = [str(REPOSITORY / "examples" / "transformers_trainer.py"), "--steps", "16", "--save-steps", "4"]


def _environ(home: Path) -> dict[str, str]:
    return clean_env.cleaned(os.environ, str(home)) | {"PYTHONPATH": str(REPOSITORY)}


def _two_ranks(folder: Path) -> list[subprocess.Popen[bytes]]:
    """What torchrun starts, without torchrun: killed, it would leave its processes behind for a while."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, *EXAMPLE, "--folder", str(folder)],
            env=_environ(folder.parent) | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


@pytest.mark.timeout(3 * LAUNCH_LIMIT_S)
def test_example_goes_on_bit_equal_after_a_kill(tmp_path: Path) -> None:
    """From the README's command; what is killed and started again is compared with what was not."""
    through, killed = tmp_path / "through", tmp_path / "killed"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    uninterrupted = subprocess.Popen([*torchrun, *EXAMPLE, "--folder", str(through)], env=_environ(tmp_path))
    ranks = _two_ranks(killed)
    try:
        deadline = time.monotonic() + LAUNCH_LIMIT_S
        while not (killed / "checkpoint-8" / "trainer_state.json").exists():
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks)
            time.sleep(0.02)
        time.sleep(0.1)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            assert rank.wait(LAUNCH_LIMIT_S) == -signal.SIGKILL
        assert not (killed / "checkpoint-16").exists()
        ranks = _two_ranks(killed)
        assert [rank.wait(LAUNCH_LIMIT_S) for rank in ranks] == [0, 0]
        assert uninterrupted.wait(LAUNCH_LIMIT_S) == 0
    finally:
        for process in [*ranks, uninterrupted]:
            if process.poll() is None:
                process.terminate()  # torchrun ends its processes then
                process.wait()
    results = [json.loads((folder / "result.json").read_text()) for folder in (through, killed)]
    assert results[0]["test_loss"] == results[1]["test_loss"] < 5
    assert [each["stats"]["step"] for each in results] == [16, 16]
    assert 4 <= results[1]["stats"]["compressed_steps"] <= 8 < results[0]["stats"]["compressed_steps"]
    for name in ("final/model.safetensors",):
        assert (through / name).read_bytes() == (killed / name).read_bytes()
    for name in FILES:
        one, other = (torch.load(folder / "checkpoint-16" / name, weights_only=True) for folder in (through, killed))
        assert one["fingerprint"] == other["fingerprint"]
        for key, residual in one.get("residuals", {}).items():
            assert torch.equal(residual, other["residuals"][key])
