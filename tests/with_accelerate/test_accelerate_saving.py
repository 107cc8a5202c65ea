"""`accelerator.save_state` and `load_state` with a hook, on real ranks: the tables in
docs/accelerate.md. That a run resumes bit-equal, `checkpoint/test_resume.py` shows for every front
end.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file

import commhooks
from accelerate_commhooks import CommHookKwargs
from tests.support.accelerators import (
    FILES,
    OPTIONS,
    WRONG,
    Training,
    Warnings,
    accelerate_launched,
    assert_equal,
    hook_files,
    launched,
    new_accelerator,
    outcome,
    power_sgd,
    sharding_accelerator,
)
from tests.support.ddp_steps import log_lines
from tests.support.features import ddp_models_stay_as_they_are
from tests.support.inside import session_of
from tests.support.training import batch, flat, make_model, residuals
from tests.support.workers import WorkerPool


@launched
def _saved(folder: str, save_at: int = 6, then: int = 3, **handler: Any) -> dict[str, Any]:
    return outcome(Training(power_sgd(**handler)).train(save_at).save(folder).train(then))


@launched
def _resumed(
    folder: str, step: int = 6, then: int = 3, options: Any = WRONG, **handler: Any
) -> dict[str, Any]:
    with Warnings() as texts:
        run = Training.resumed(folder, step, power_sgd(options, **handler))
        loaded = residuals(run.hook)
        run.train(then)
    return outcome(run) | {"loaded": loaded, "warnings": texts}


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def saved_by_two(
    worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.Tensor]:
    """Save on two ranks, and return the weights three steps after a resume without residuals."""
    folder = tmp_path_factory.mktemp("saved")
    worker_pool.import_first("accelerate")
    worker_pool.run(_saved, str(folder))
    without = Path(shutil.copytree(folder, tmp_path_factory.mktemp("without") / "checkpoint"))
    for name in FILES[1:]:
        (without / name).unlink()
    results = worker_pool.run(_resumed, str(without))
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    return folder, results[0]["weights"]


@pytest.fixture
def checkpoint(saved_by_two: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(saved_by_two[0], tmp_path / "checkpoint"))


# ---- ways in which people save -------------------------------------------------------------------


def test_a_save_writes_these_files(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_saved, str(tmp_path), 6, 0)
    assert hook_files(tmp_path) == FILES
    for name in FILES:
        torch.load(tmp_path / name, weights_only=True)
    # In a mean there are no residuals of a rank, and those of the earlier save go.
    run_ranks(_saved, str(tmp_path), 6, 0, save_residual="mean")
    assert hook_files(tmp_path) == FILES[:1]
    (tmp_path / FILES[0]).unlink()
    first, second = run_ranks(_resumed, str(tmp_path), options=OPTIONS)
    assert torch.equal(first["weights"], second["weights"]) and second["warnings"] == []
    assert "holds no state of a communication hook (comm_hook.pt)" in first["warnings"][0]


@launched
def _scaled(folder: str) -> dict[str, Any]:
    run = Training(scale=64.0).train(6).save(folder).train(3)
    resumed = Training.resumed(folder, 6, scale=2.0)
    # The scale has grown at the end of the step whose residual was saved.
    assert (
        resumed.accelerator.scaler.get_scale()
        == session_of(resumed.hook).state.loss_scale * 2
        == 256
    )
    return {"run": outcome(run), "resumed": outcome(resumed.train(3))}


def _two_nodes(folder: str) -> dict[str, Any]:
    """Each rank is a node with its own disk."""
    rank = dist.get_rank()
    mine = f"{folder}/node{rank}"
    config = ProjectConfiguration(save_on_each_node=True)
    with accelerate_launched(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"):
        run = Training(project_config=config).train(6).save(mine)
        assert run.accelerator.is_local_main_process and hook_files(mine) == [
            "comm_hook.pt",
            f"comm_hook_rank{rank}.pt",
        ]
        return {
            "run": outcome(run.train(3)),
            "resumed": outcome(Training.resumed(mine, 6).train(3)),
        }


@pytest.mark.parametrize("work", [_scaled, _two_nodes])
def test_a_run_resumes_bit_equal(run_ranks: Any, tmp_path: Path, work: Callable[..., Any]) -> None:
    for result in run_ranks(work, str(tmp_path)):
        assert_equal(result["run"], result["resumed"])


@launched
def _save_on_main(folder: str) -> dict[str, Any]:
    run = Training().train(5).save(folder).train(1)
    with Warnings() as texts:
        if run.accelerator.is_main_process:
            run.accelerator.save_state(folder)
    run.train(3)  # no collective of the save meets those of the training
    run.accelerator.wait_for_everyone()
    return outcome(run) | {"warnings": texts}


def test_a_save_on_the_main_process_only_resumes_without_residuals(
    run_ranks: Any, saved_by_two: Any, tmp_path: Path
) -> None:
    """Over a save of all ranks."""
    saving = run_ranks(_save_on_main, str(tmp_path))
    assert torch.equal(saving[0]["weights"], saving[1]["weights"]) and saving[0]["warnings"] == []
    assert hook_files(tmp_path) == FILES
    resumed = run_ranks(_resumed, str(tmp_path))
    for result in resumed:  # the same as if nobody had saved a residual
        assert torch.equal(result["weights"], saved_by_two[1])
    assert "is of another save" in resumed[1]["warnings"][0]


@launched
def _two_runs_in_a_folder(folder: str) -> list[str]:
    """Both save at the same step, the second one on the main process only."""
    for number in range(2):
        run = Training(CommHookKwargs(hook="int8")).train(4)
        if number == 0 or run.accelerator.is_main_process:
            run.accelerator.save_state(folder)
        run.accelerator.wait_for_everyone()
    with Warnings() as texts:
        Training(CommHookKwargs(hook="int8")).load(folder, 4)
    return list(texts)


def test_residuals_of_another_run_are_noticed(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_two_runs_in_a_folder, str(tmp_path))
    assert not any("another save" in text for text in first)
    assert any("comm_hook_rank1.pt is of another save" in text for text in second), second


@launched
def _mean_on_main(folder: str) -> dict[str, Any]:
    run = Training(power_sgd(save_residual="mean")).train(6)
    run.hook.joint_save_limit_s = 0.5
    with Warnings() as texts:
        if run.accelerator.is_main_process:
            run.accelerator.save_state(folder)
    run.train(2)
    run.accelerator.wait_for_everyone()
    run.hook.joint_save_limit_s = 100.0
    run.save(folder + "/all")  # a later save that all ranks join is exact again
    return outcome(run) | {"warnings": texts}


def test_the_mean_on_the_main_process_only_is_marked(
    run_ranks: Any, saved_by_two: Any, tmp_path: Path
) -> None:
    saving = run_ranks(_mean_on_main, str(tmp_path))
    assert (
        "without residuals, because not every rank took part within 0.5 s"
        in saving[0]["warnings"][0]
    )
    assert not torch.load(tmp_path / FILES[0], weights_only=True)["exact"]
    assert torch.load(tmp_path / "all" / FILES[0], weights_only=True)["exact"]
    resumed = run_ranks(_resumed, str(tmp_path), save_residual="mean")
    assert torch.equal(resumed[1]["weights"], saved_by_two[1])
    assert "marked inexact" in resumed[0]["warnings"][0]


@launched
def _large(folder: str) -> list[list[str]]:
    """The warnings of three saves: one that is just small enough, one that is not, and a mean."""
    results = []
    run = Training().train(4)
    run.save(folder)
    kept = torch.load(f"{folder}/{FILES[1]}", weights_only=True)["residuals"]
    limit = run.accelerator.num_processes * sum(residual.nbytes for residual in kept.values())
    for saving, least in (
        (run, limit),
        (run, limit - 1),
        (Training(power_sgd(save_residual="mean")).train(4), 1),
    ):
        with mock.patch("accelerate_commhooks.saving.LARGE_SAVE_BYTES", least), Warnings() as texts:
            saving.save(folder).save(folder)
        results.append(list(texts))
    return results


def test_a_large_save_suggests_the_mean_once(run_ranks: Any, tmp_path: Path) -> None:
    (small, (large,), mean), others = run_ranks(_large, str(tmp_path))
    assert "save_residual='mean' writes one copy for all ranks" in large
    assert small == mean == [] and others == [[], [], []]


@launched
def _save_model(folder: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    run = Training(CommHookKwargs(hook="local_sgd", hook_options={"sync_every": 3})).train(4)
    run.accelerator.save_model(run.model, folder)
    return run.weights(), {
        name: p.detach().clone() for name, p in run.model.module.named_parameters()
    }


def test_save_model_in_mid_round_saves_the_common_weights(run_ranks: Any, tmp_path: Path) -> None:
    (first, named), (second, _) = run_ranks(_save_model, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(first, second) and all(
        torch.equal(named[name], saved[name]) for name in named
    )


# ---- over a folder of an earlier run -------------------------------------------------------------


def _two_models() -> Training:
    run = Training()
    run.second = run.accelerator.prepare(make_model())
    return run


def _sharded(hook: str | None) -> Training:
    handler = CommHookKwargs(hook=hook)
    return Training(handler, accelerator=sharding_accelerator(handler, replicas=1))


def _attached_later() -> Training:
    accelerator = Accelerator()
    return Training(CommHookKwargs(hook=None).attach(accelerator), accelerator=accelerator)


RUNS = {
    "two models": _two_models,
    "one model": Training,
    "none": lambda: Training(CommHookKwargs(hook=None)),
    "none, attached later": _attached_later,
    "sharded": lambda: _sharded("int8"),
    "sharded, none": lambda: _sharded(None),
}
NOT_OURS = ["comm_hook_notes.pt", "my_comm_hook.pt"]


@launched
def _saved_over(folder: str, name: str) -> list[str]:
    RUNS[name]().train(4).save(folder)
    there = [name for name in hook_files(folder) if name not in NOT_OURS]
    return [
        name
        for name in there
        if (Path(folder) / name / ".metadata").is_file() or name.endswith(".pt")
    ]


@pytest.mark.parametrize(
    ("before", "over", "left"),
    [
        ("two models", "none", []),
        ("one model", "none, attached later", []),
        ("two models", "one model", FILES),
        ("one model", "sharded", ["comm_hook"]),
        ("sharded", "sharded, none", []),
    ],
)
def test_nothing_of_an_old_hook_stays(
    run_ranks: Any, tmp_path: Path, before: str, over: str, left: list[str]
) -> None:
    """It belongs to weights that are gone."""
    assert all(run_ranks(_saved_over, str(tmp_path), before))
    for name in NOT_OURS:
        (tmp_path / name).touch()
    assert run_ranks(_saved_over, str(tmp_path), over) == [left, left]
    assert all((tmp_path / name).is_file() for name in NOT_OURS)


def test_a_save_by_fewer_ranks_removes_the_files_of_the_others(
    run_ranks: Any, tmp_path: Path
) -> None:
    run_ranks(_saved, str(tmp_path), 6, 0, world_size=3)
    assert hook_files(tmp_path) == [*FILES, "comm_hook_rank2.pt"]
    run_ranks(_saved, str(tmp_path), 6, 0)
    assert hook_files(tmp_path) == FILES


# ---- what load_state may meet --------------------------------------------------------------------


def _rewrite(path: Path, **changes: Any) -> None:
    torch.save(torch.load(path, weights_only=True) | changes, path)


DAMAGE_OF_ONE_RANK = {
    "missing": (lambda folder: (folder / FILES[2]).unlink(), "is missing"),
    "of another rank": (
        lambda folder: _rewrite(folder / FILES[2], rank=0),
        "is of rank 0, not of rank 1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE_OF_ONE_RANK)
def test_where_one_rank_lacks_its_residual_all_do_without(
    run_ranks: Any, saved_by_two: Any, checkpoint: Path, damage: str
) -> None:
    change, text = DAMAGE_OF_ONE_RANK[damage]
    change(checkpoint)
    first, second = run_ranks(_resumed, str(checkpoint))
    for result in (first, second):
        assert torch.equal(result["weights"], saved_by_two[1])
        assert result["stats"]["step"] == 9 and result["stats"]["compressed_steps"] == 3
    # Rank 1 names its file, rank 0 says once what follows.
    [warning] = second["warnings"]
    assert str(checkpoint / FILES[2]) in warning and text in warning
    [warning] = first["warnings"]
    assert "all ranks start from residuals of zero" in warning


def test_another_world_size_needs_the_files_of_all(run_ranks: Any, checkpoint: Path) -> None:
    _truncate(checkpoint / FILES[2])
    for result in run_ranks(_resumed, str(checkpoint), world_size=3):
        assert result["loaded"] == {} and result["stats"]["step"] == 9
        assert "comm_hook_rank1.pt cannot be read" in result["warnings"][0]


@launched
def _fails_to_load(folder: str, **handler: Any) -> str:
    run = Training(power_sgd(WRONG | {"start_powerSGD_iter": 1}, **handler)).train(3)
    before = outcome(run)
    with pytest.raises(commhooks.PayloadError) as caught:
        run.load(folder, 6)
    assert_equal(outcome(run), before)
    assert outcome(run)["stats"]["step"] == 3
    return str(caught.value)


DAMAGE_OF_THE_SHARED_FILE = {
    "truncated": (
        lambda folder: _truncate(folder / FILES[0]),
        "comm_hook.pt cannot be read: it is cut off after ",
    ),
    "missing": (
        lambda folder: (folder / FILES[0]).unlink(),
        "comm_hook.pt is missing, though comm_hook_rank",
    ),
    "changed": (
        lambda folder: _rewrite(folder / FILES[0], step=7),
        "fingerprint do not belong together",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE_OF_THE_SHARED_FILE)
def test_a_bad_shared_file_is_an_error_on_every_rank_before_anything_changes(
    run_ranks: Any, checkpoint: Path, damage: str
) -> None:
    change, text = DAMAGE_OF_THE_SHARED_FILE[damage]
    change(checkpoint)
    for error in run_ranks(_fails_to_load, str(checkpoint)):
        assert text in error and str(checkpoint) in error
        assert "Load another checkpoint, or remove its comm_hook*.pt files" in error


@launched
def _loads_of_another_hook(folder: str, file: str) -> list[str]:
    run = Training(CommHookKwargs.from_config(file))
    changed = f"{file} folder"
    with log_lines() as lines:
        run.load(folder, 6).train(1).save(changed).load(changed, 7)
    assert run.hook.stats()["step"] == 1
    return lines


def test_another_hook_is_an_error_unless_strict_is_off(
    run_ranks: Any, checkpoint: Path, tmp_path: Path
) -> None:
    for error in run_ranks(_fails_to_load, str(checkpoint), hook="batched_powerSGD"):
        assert error.startswith(f"{checkpoint / FILES[0]}: ")
        assert "is of hook 'powerSGD', but this hook is 'batched_powerSGD'" in error
    file = tmp_path / "hook.yaml"
    file.write_text("hook: int8\nstrict: false\n")
    lines, others = run_ranks(_loads_of_another_hook, str(checkpoint), str(file))
    # Said each time: `strict: false`, written once for a changed hook, would hide what goes wrong
    # later.
    assert (
        sum(
            "int8_compress: strict=False: this load leaves out what does not fit" in line
            for line in lines
        )
        == 2
    )
    assert any("begins with fresh state (strict=False)" in line for line in lines)
    assert not any("strict=False" in line for line in others)


@launched
def _loaded_on_one_rank(folder: str) -> str:
    run = Training(power_sgd(WRONG))
    if run.accelerator.process_index == 1:
        run.accelerator.load_state(folder)
    with pytest.raises(commhooks.HookRunError) as caught:
        run.train(1)
    return str(caught.value)


def test_loading_on_some_ranks_only_is_an_error_on_all(run_ranks: Any, checkpoint: Path) -> None:
    for error in run_ranks(_loaded_on_one_rank, str(checkpoint)):
        assert "rank 0: 0, rank 1: 6" in error


def _one_process(folder: str, made_by_two: str) -> None:
    """Without a launcher Accelerate does not wrap in DDP, and nothing has a hook."""
    with accelerate_launched(none=True), Warnings() as texts:
        handler = power_sgd()
        run = Training(handler, accelerator=Accelerator(kwargs_handlers=[handler]))
        run.train(1).save(folder).load(made_by_two, 6).train(1)
        assert handler.attached is None and not handler.is_attached(run.model)
        assert hook_files(folder) == [] and ["there is one rank" in text for text in texts] == [
            True
        ]


@launched
def _without_hook(folder: str, made_by_two: str) -> None:
    Training(CommHookKwargs(hook=None)).save(folder).load(made_by_two, 6).train(1)


def test_without_a_hook_no_files_of_one_are_read(
    run_ranks: Any, checkpoint: Path, tmp_path: Path
) -> None:
    _truncate(checkpoint / FILES[0])
    run_ranks(_one_process, str(tmp_path / "alone"), str(checkpoint), world_size=1, init=False)
    run_ranks(_without_hook, str(tmp_path / "without"), str(checkpoint))


# ---- users' own hooks, states and objects --------------------------------------------------------


class Counter:
    def __init__(self, count: int = 0, plain: bool = True) -> None:
        self.count = count
        self.plain = plain

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} | ({} if self.plain else {"object": Counter()})

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@launched
def _own_hooks_and_objects(folder: str) -> dict[str, Any]:
    """Empty the lists that save hooks get, as users do, and save an object of one's own."""

    def prepare(handler: CommHookKwargs, count: int) -> tuple[Training, Counter]:
        accelerator = new_accelerator(handler)

        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            if accelerator.is_main_process:
                torch.save(weights[0], os.path.join(output_dir, "mine.pt"))
            weights.clear()

        def load(models: list[Any], input_dir: str) -> None:
            models.pop().load_state_dict(
                torch.load(os.path.join(input_dir, "mine.pt"), weights_only=True)
            )

        # before `prepare`, so that they are called before the hook's
        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        run = Training(handler, accelerator=accelerator)
        counter = Counter(count)
        accelerator.register_for_checkpointing(counter)
        return run, counter

    run, _ = prepare(power_sgd(), 41)
    run.train(6).save(folder).train(3)
    resumed, counter = prepare(power_sgd(WRONG), 0)
    resumed.load(folder, 6).train(3)
    assert counter.count == 41
    return {"run": outcome(run), "resumed": outcome(resumed)}


def test_users_own_hooks_and_objects_are_saved(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_own_hooks_and_objects, str(tmp_path)):
        assert_equal(result["run"], result["resumed"])
    names = {path.name for path in tmp_path.iterdir()}
    assert {"mine.pt", "custom_checkpoint_0.pkl"} <= names and "model.safetensors" not in names


def own_hook(state: Counter, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.count += 1 + dist.get_rank()
    return commhooks.allreduce_hook(None, bucket)


@launched
def _own_hook(folder: str, plain: bool = True, save: bool = True) -> tuple[int, int, list[str]]:
    handler = CommHookKwargs(hook=own_hook, hook_state=Counter(plain=plain))
    resumed = Counter()
    run = Training(handler)
    with Warnings() as texts:
        if save:
            run.train(2).save(folder)
        saved = handler.hook_state.count
        Training.resumed(folder, 2, CommHookKwargs(hook=own_hook, hook_state=resumed))
    return saved, resumed.count, texts


def test_the_state_of_a_users_hook_is_saved(run_ranks: Any, tmp_path: Path) -> None:
    (saved, resumed, _), (of_second, resumed_second, _) = run_ranks(_own_hook, str(tmp_path))
    assert resumed == saved > 0 and resumed_second == of_second == 2 * saved
    assert hook_files(tmp_path) == FILES
    elsewhere = run_ranks(_own_hook, str(tmp_path), save=False, world_size=3)
    assert [count for _, count, _ in elsewhere] == [saved] * 3
    assert "every rank gets rank 0's state" in elsewhere[0][2][0]
    for _, count, (warning, *_) in run_ranks(_own_hook, str(tmp_path / "unreadable"), plain=False):
        assert count == 0 and "is not saved" in warning and "weights_only=True" in warning


# ---- several models ------------------------------------------------------------------------------


class Pair:
    """Train two models of one shape, after one in evaluation mode that is prepared first."""

    def __init__(self, options: Any = OPTIONS) -> None:
        self.handler = power_sgd(options)
        self.accelerator = new_accelerator(self.handler)
        self.accelerator.prepare_model(make_model(), evaluation_mode=True)
        self.first = self.accelerator.prepare(make_model())
        self.second = self.accelerator.prepare(make_model())
        self.first_hook, self.second_hook = self.handler.attached_hooks

    def train(self, start: int, steps: int) -> "Pair":
        for step in range(start, start + steps):
            for factor, model in ((1, self.first), (3, self.second)):
                images, labels = batch(step, self.accelerator.process_index)
                self.accelerator.backward(
                    torch.nn.functional.cross_entropy(model(factor * images), labels)
                )
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.05 * parameter.grad
                        parameter.grad = None
        return self

    def memory(self) -> list[torch.Tensor]:
        hooks = (self.first_hook, self.second_hook)
        return [residuals(hook)["5.weight"] for hook in hooks] + [flat(self.second.parameters())]


@launched
def _pair(folder: str) -> list[list[torch.Tensor]]:
    pair = Pair().train(0, 5)
    pair.accelerator.save_state(folder)
    pair.accelerator.wait_for_everyone()
    resumed = Pair(WRONG)
    resumed.accelerator.load_state(folder)
    at_load = [pair.memory(), resumed.memory()]
    return [*at_load, pair.train(5, 2).memory(), resumed.train(5, 2).memory()]


@launched
def _second_file_damaged(folder: str) -> None:
    pair = Pair().train(0, 4)
    before = pair.memory()
    with pytest.raises(commhooks.PayloadError, match="comm_hook_1.pt"):
        pair.accelerator.load_state(folder)
    assert all(torch.equal(a, b) for a, b in zip(before, pair.memory(), strict=True))
    assert pair.first_hook.stats()["step"] == 4


def test_two_models_have_a_state_each(run_ranks: Any, tmp_path: Path) -> None:
    for saved, loaded, through, again in run_ranks(_pair, str(tmp_path)):
        assert not torch.equal(saved[0], saved[1])
        assert all(torch.equal(a, b) for a, b in zip(saved + through, loaded + again, strict=True))
    assert hook_files(tmp_path) == sorted(
        [*FILES, *(name.replace("hook", "hook_1") for name in FILES)]
    )
    _truncate(tmp_path / "comm_hook_1.pt")
    run_ranks(_second_file_damaged, str(tmp_path))


@launched
def _freed_and_gone(folder: str) -> None:
    pair = Pair().train(0, 5)
    second = residuals(pair.second_hook)["5.weight"]
    pair.first = pair.first_hook = None
    assert pair.handler.attached_hooks == [pair.second_hook]
    pair.accelerator.save_state(folder + "/gone")
    pair.accelerator.wait_for_everyone()
    part = torch.load(
        f"{folder}/gone/comm_hook_1_rank{pair.accelerator.process_index}.pt", weights_only=True
    )
    assert torch.equal(part["residuals"]["5.weight"].flatten(), second)  # it kept its number
    pair.accelerator.load_state(folder + "/gone")
    assert pair.second_hook.stats()["step"] == 5

    stale = pair.second  # a variable that `free_memory` knows nothing of
    pair.accelerator.free_memory()
    pair.second = pair.accelerator.prepare(make_model())
    assert pair.handler.attached.stats()["step"] == 0 and pair.handler.is_attached(stale)
    pair.accelerator.save_state(folder + "/freed")
    pair.accelerator.wait_for_everyone()
    assert torch.load(folder + "/freed/comm_hook.pt", weights_only=True)["step"] == 0

    pair.first = pair.accelerator.prepare(make_model())
    pair.accelerator.free_memory()
    again = pair.accelerator.prepare(pair.first.module)  # the second of two, now alone
    pair.accelerator.save_state(folder + "/again")
    pair.accelerator.wait_for_everyone()
    assert pair.handler.is_attached(again)


def test_only_models_that_are_still_prepared_are_saved(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_freed_and_gone, str(tmp_path))
    assert hook_files(tmp_path / "gone") == [name.replace("hook", "hook_1") for name in FILES]
    assert hook_files(tmp_path / "freed") == hook_files(tmp_path / "again") == FILES[:1]


@launched
def _prepared_twice(folder: str) -> None:
    handler = power_sgd()
    accelerator = new_accelerator(handler)
    module, other = make_model(), make_model()
    models = accelerator.prepare(module, other)
    third = accelerator.prepare(module)  # a DDP model of its own around the same module
    hooks = handler.attached_hooks
    assert len(hooks) == 1 + len(models)
    accelerator.backward(third(torch.ones(2, 1, 8, 8)).sum())
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    steps = [torch.load(f"{folder}/comm_hook{n}.pt", weights_only=True)["step"] for n in ("", "_1")]
    assert steps == [1, 0] and accelerator.prepare(third) is third and handler.attached is hooks[2]


@ddp_models_stay_as_they_are
def test_a_module_that_is_prepared_twice_keeps_its_number(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_prepared_twice, str(tmp_path))
    assert hook_files(tmp_path) == ["comm_hook.pt", "comm_hook_1.pt"]
