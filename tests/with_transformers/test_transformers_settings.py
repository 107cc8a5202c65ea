"""`CommHookTrainer`'s settings: DDP's arguments, files, mistakes, and where there is no hook."""

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from accelerate import Accelerator, DistributedType  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402
from transformers_trainer import batch, make_model, manual  # noqa: E402  # of examples/

import commhooks  # noqa: E402
from accelerate_commhooks import CommHookKwargs  # noqa: E402
from accelerate_commhooks.transformers import CommHookTrainer  # noqa: E402
from tests.support.accelerators import (
    OPTIONS,
    Warnings,
    accelerate_launched,
    hook_files,
    launched,
)  # noqa: E402
from tests.support.ddp_steps import log_lines  # noqa: E402
from tests.support.training import flat  # noqa: E402
from tests.support.transformers_runs import FILES, make_trainer  # noqa: E402


def test_ddp_arguments_and_a_users_handler_are_used(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_ddp_arguments, tmp_path)


LATE = {"hook": "powerSGD", "hook_options": {"start_powerSGD_iter": 8}}
DILOCO = {"hook": "diloco", "hook_options": {"sync_every": 9}}


@pytest.mark.parametrize(
    ("hook", "warned"),
    [
        (
            LATE,
            (
                "hook 'powerSGD' begins at step 8, but this run ends at step 4, so that it has"
                " no effect. Set "
            ),
        ),
        (
            LATE | {"total_steps": 20},
            "hook 'powerSGD' has compressed nothing in 4 backward passes: it begins at step",
        ),
        (DILOCO, None),  # the round ends with the training
    ],
    ids=["late", "late in a longer run", "diloco"],
)
def test_a_hook_that_does_nothing_is_told(
    run_ranks: Any, tmp_path: Path, hook: dict[str, Any], warned: str | None
) -> None:
    (lines, norm), (others, _) = run_ranks(_short, tmp_path, hook)
    assert [line.startswith(f"commhooks: {warned}") for line in lines] == [True] * (
        warned is not None
    )
    assert others == [] and (norm is not None and norm > 0) == (warned is None)


@launched
def _short(folder: Path, hook: dict[str, Any]) -> tuple[list[str], float | None]:
    with log_lines("commhooks.hook.unused") as lines:
        trainer = make_trainer(
            folder, hook=hook, max_steps=4, save_strategy="no", ddp_find_unused_parameters=False
        )
        trainer.train()
        norm = trainer.comm_hook.stats()["outer_gradient_norm"]
    return lines, norm


@launched
def _ddp_arguments(folder: Path) -> None:
    of_ddp = {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
    handler = CommHookKwargs(hook="powerSGD", hook_options=OPTIONS, gradient_as_bucket_view=True)
    trainer = make_trainer(
        folder, hook={"hook": handler}, max_steps=4, save_strategy="no", **of_ddp
    )
    trainer.train()
    ddp = trainer.model_wrapped
    assert ddp.find_unused_parameters is False and ddp.broadcast_buffers is False
    assert ddp.bucket_bytes_cap == int(0.005 * 2**20) and ddp.gradient_as_bucket_view is True
    assert handler.attached is trainer.comm_hook and handler.is_attached(trainer.model)
    assert trainer.comm_hook.stats()["compressed_steps"] == 1

    # A second run with the same handler begins with what the user has given it, and each Trainer
    # has its own hook.
    first = trainer
    trainer = make_trainer(folder, hook={"hook": handler}, max_steps=2, save_strategy="no")
    trainer.train()
    assert [trained.comm_hook.stats()["step"] for trained in (first, trainer)] == [4, 2]
    trainer = make_trainer(
        folder, hook={"hook": handler}, max_steps=20, save_strategy="no", ddp_bucket_cap_mb=0.01
    )
    arguments = {
        "find_unused_parameters": True,
        "bucket_cap_mb": 0.01,
        "gradient_as_bucket_view": True,
    }
    assert handler.to_dict().items() >= arguments.items() and handler.broadcast_buffers
    handler.bucket_cap_mb = 3
    with pytest.raises(commhooks.HookConfigError, match="bucket_cap_mb=3 in CommHookKwargs"):
        make_trainer(folder, hook={"hook": handler}, max_steps=20)

    # What is given goes first, also if it is DDP's default: the Trainer's own choice is the other
    # one.
    handler = CommHookKwargs(hook="powerSGD", find_unused_parameters=False)
    trainer = make_trainer(folder, hook={"hook": handler}, max_steps=30, save_strategy="no")
    assert handler.to_dict()["find_unused_parameters"] is False
    for steps, start in ((30, 3), (10, 1)):
        trainer = make_trainer(folder, hook={"hook": handler}, max_steps=steps, save_strategy="no")
        trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
        assert handler.run_length == steps and start == -(-steps // 10)
    each_batch = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    more = {"gradient_accumulation_steps": 2, "accelerator_config": each_batch}
    trainer = make_trainer(folder, hook={"hook": handler}, max_steps=10, save_strategy="no", **more)
    trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    assert handler.run_length == 20  # backward passes that call the hook
    with pytest.raises(
        commhooks.HookConfigError, match="find_unused_parameters=False in CommHookKwargs"
    ):
        make_trainer(folder, hook={"hook": handler}, ddp_find_unused_parameters=True)

    # The Trainer's own default for models, which is not DDP's, and a hook that a user wrote.
    trainer = make_trainer(
        folder, hook={"hook": _own_hook, "wrapper": "bf16"}, max_steps=2, save_strategy="no"
    )
    trainer.train()
    assert (
        trainer.model_wrapped.find_unused_parameters is True
        and trainer.model_wrapped.broadcast_buffers is True
    )
    assert (
        trainer.comm_hook.name.endswith("_own_hook")
        and trainer.comm_hook.stats()["backward_passes"] == 2
    )


def test_settings_from_outside_are_used(run_ranks: Any, tmp_path: Path) -> None:
    """A fraction in the file is one of the Trainer's steps too, as the file does not say of how
    many.
    """
    options = "hook_options: {matrix_approximation_rank: 2, start_powerSGD_iter: 0.25}"
    path = tmp_path / "hook.yaml"
    path.write_text(f"hook: powerSGD\n{options}\ngradient_as_bucket_view: true\n")
    assert run_ranks(_outside, tmp_path, path) == [(2, True)] * 2


@launched
def _outside(folder: Path, path: Path) -> tuple[int, bool]:
    with mock.patch.dict(os.environ, {"ACCELERATE_COMM_HOOK_CONFIG": str(path)}):
        trainer = make_trainer(folder, hook={"save_residual": "mean"}, save_steps=8)
    trainer.train()
    assert hook_files(folder / "checkpoint-8") == FILES[:1]
    return (
        trainer.comm_hook.options["start_powerSGD_iter"],
        trainer.model_wrapped.gradient_as_bucket_view,
    )


def test_without_a_hook_it_trains_as_the_stock_trainer(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_no_hook, tmp_path)


@launched
def _no_hook(folder: Path) -> None:
    results = []
    # whose checkpoint the last one saves over
    make_trainer(folder / "none", max_steps=4, save_steps=4).train()
    assert hook_files(folder / "none" / "checkpoint-4") != []
    for name, cls, hook in (
        ("plain", Trainer, None),
        ("none", CommHookTrainer, {"hook": None, "wrapper": "bf16"}),
    ):
        with Warnings() as texts:
            trainer = make_trainer(folder / name, cls, hook=hook, max_steps=4, save_steps=4)
            trainer.train()
        assert texts == [] and hook_files(folder / name / "checkpoint-4") == []
        results.append(flat(trainer.model.parameters()))
    assert torch.equal(*results) and trainer.comm_hook is None


def _own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer() / dist.get_world_size()
    return (
        dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])
    )


def _alone(folder: Path, **hook: Any) -> CommHookTrainer:
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        ddp_bucket_cap_mb=5,
    )
    model = make_model(width=16)
    return CommHookTrainer(
        model=model, args=args, data_collator=batch, train_dataset=manual(32)[0], **hook
    )


def test_one_process_trains_without_a_hook_and_warns(tmp_path: Path) -> None:
    with accelerate_launched(none=True), Warnings() as texts:
        trainer = _alone(tmp_path, hook="powerSGD")
        trainer.train()
    assert trainer.comm_hook is None
    [text] = texts
    # As with every front end, after what the hook is called.
    assert text.startswith("commhooks: powerSGD: there is one rank, so nothing is sent.")
    assert "there is no hook, and the gradients are exact. Start the script with torchrun" in text


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ({"hook": "powerSDG"}, "unknown hook 'powerSDG' (did you mean 'powerSGD'?)"),
        (
            {"hook": "powerSGD", "save_residuals": "mean"},
            "CommHookTrainer has no argument 'save_residuals' (did you mean 'save_residual'?)",
        ),
        (
            {"hook": "powerSGD", "eval_datasets": None},
            "no argument 'eval_datasets' (did you mean 'eval_dataset'?)",
        ),
        ({"hook": "powerSGD", "hook_options": {"start_powerSGD_iter": 1.5}}, "start_powerSGD_iter"),
        (
            {"hook": CommHookKwargs(hook="powerSGD"), "wrapper": "bf16", "strict": False},
            "wrapper and strict together with hook=CommHookKwargs(...)",
        ),
        (
            {"hook": CommHookKwargs(hook="powerSGD", bucket_cap_mb=50)},
            (
                "bucket_cap_mb=50 in CommHookKwargs(...), but ddp_bucket_cap_mb=5 in"
                " TrainingArguments(...)"
            ),
        ),
    ],
)
def test_mistakes_are_found_at_construction(
    tmp_path: Path, hook: dict[str, Any], text: str
) -> None:
    with accelerate_launched(none=True), pytest.raises(commhooks.HookConfigError) as caught:
        _alone(tmp_path, **hook)
    assert text in str(caught.value)


def test_another_type_error_of_the_trainer_stays(tmp_path: Path) -> None:
    with (
        accelerate_launched(none=True),
        pytest.raises(TypeError, match="can only concatenate list"),
    ):
        _alone(tmp_path, hook="powerSGD", callbacks=3)


def test_where_accelerate_does_not_use_ddp_the_hook_is_refused(tmp_path: Path) -> None:
    other = mock.patch.object(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with (
        accelerate_launched(none=True),
        other,
        pytest.raises(commhooks.HookConfigError, match="DEEPSPEED"),
    ):
        _alone(tmp_path, hook="powerSGD")


def test_a_model_that_is_not_in_ddp_is_an_error(tmp_path: Path) -> None:
    several = mock.patch.object(Accelerator, "num_processes", 2)
    with accelerate_launched(none=True):
        trainer = _alone(tmp_path, hook="powerSGD")
        with several, pytest.raises(commhooks.AttachError, match="a LlamaForCausalLM that"):
            trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "accelerate_commhooks.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    sentence = (
        "accelerate_commhooks.transformers needs transformers and Accelerate: pip install"
        " transformers accelerate"
    )
    with pytest.raises(ImportError) as caught:
        import accelerate_commhooks.transformers  # noqa: F401
    assert str(caught.value) == sentence
