"""A Distributed Checkpoint loads into any number of shards and replicas, and into DDP."""

import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.ddp_steps import log_lines
from tests.support.inside import session_of
from tests.support.models import all_finite, bits_equal, relative_error, same_bits
from tests.support.sharded import (
    NAMES,
    POWERSGD,
    Prescribed,
    attached,
    backward,
    learned,
    random_gradients,
    whole_gradients,
    whole_residuals,
)

SAVE_AT = 2
STEPS = 4


def new(replicas: int, shards: int, **more: Any) -> tuple[nn.Module, commhooks.CommHook]:
    """Attach the hook to a new model; with 0 shards to a DDP model."""
    if shards == 0:
        ddp = DistributedDataParallel(
            Prescribed(), bucket_cap_mb=0.001, find_unused_parameters=True
        )
        return ddp, commhooks.attach(
            ddp, "powerSGD", hook_options=POWERSGD, save_residual="distributed", **more
        )
    return attached(replicas, shards, hook_options=POWERSGD, **more)


def gradients_of(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    if isinstance(model, DistributedDataParallel):
        model.zero_grad()
        model(random_gradients(step)).backward()
        parameters = model.module.named_parameters()
        return {name: p.grad.clone() for name, p in parameters if p.grad is not None}
    return backward(model, random_gradients(step))


def trained(replicas: int, shards: int, **more: Any) -> tuple[nn.Module, commhooks.CommHook]:
    """Attach the hook to a new model, and run `SAVE_AT` steps."""
    model, hook = new(replicas, shards, **more)
    for step in range(SAVE_AT):
        gradients_of(model, step)
    return model, hook


def _train_and_save(replicas: int, shards: int, folder: str) -> dict[str, Any]:
    model, hook = trained(replicas, shards)
    dcp.save({"hook": hook}, checkpoint_id=folder)
    residuals = whole_residuals(hook)
    later = [gradients_of(model, step) for step in range(SAVE_AT, STEPS)]
    return {
        "later": later,
        "learned": learned(hook),
        "residuals": residuals,
        "step": hook.stats()["step"],
    }


def _load_and_go_on(replicas: int, shards: int, folder: str) -> dict[str, Any]:
    model, hook = new(replicas, shards)
    dcp.load({"hook": hook}, checkpoint_id=folder)
    loaded = {
        "step": hook.stats()["step"],
        "residuals": whole_residuals(hook),
        "q": {name: q.clone() for name, q in session_of(hook).state["q"].items()},
    }
    later = [gradients_of(model, step) for step in range(SAVE_AT, STEPS)]
    return loaded | {
        "later": later,
        "learned": learned(hook),
        "finite": all(all_finite(gradients.values()) for gradients in later),
        "compressed": hook.stats()["compressed_steps"],
    }


@pytest.fixture(scope="module")
def saved_by(worker_pool: Any, tmp_path_factory: Any) -> Any:
    """Return a function that saves on two replicas of so many shards, once.

    It returns the folder, and what each rank returned.
    """

    @functools.cache
    def saved(shards: int) -> tuple[str, list[dict[str, Any]]]:
        folder = str(tmp_path_factory.mktemp("saved"))
        return folder, worker_pool.run(
            _train_and_save, 2, shards, folder, world_size=2 * max(1, shards)
        )

    return saved


@pytest.fixture(scope="module")
def resumed(worker_pool: Any, saved_by: Any) -> Any:
    """Return a function that resumes with so many replicas and shards, and `before` shards saved.

    It returns what each rank returned.
    """

    @functools.cache
    def resume(replicas: int, shards: int, before: int = 2) -> list[dict[str, Any]]:
        world_size = replicas * max(1, shards)
        return worker_pool.run(
            _load_and_go_on, replicas, shards, saved_by(before)[0], world_size=world_size
        )

    return resume


def test_a_resumed_run_is_bit_equal(saved_by: Any, resumed: Any) -> None:
    saved = saved_by(2)[1]
    for before, after in zip(saved, resumed(2, 2), strict=True):
        assert after["step"] == SAVE_AT
        assert all(map(bits_equal, before["later"], after["later"]))
        assert bits_equal(before["learned"], after["learned"])
    assert any(tensor.any() for tensor in saved[0]["residuals"].values())


@pytest.mark.parametrize(("before", "replicas", "shards"), [(2, 1, 3), (2, 2, 0), (0, 2, 2)])
def test_the_mean_residual_moves_to_another_number_of_shards(
    saved_by: Any, resumed: Any, before: int, replicas: int, shards: int
) -> None:
    saved = saved_by(before)[1]
    for after in resumed(replicas, shards, before):
        assert after["step"] == SAVE_AT and after["finite"]
        assert after["compressed"] == STEPS - SAVE_AT
        for name, expected in saved[0]["residuals"].items():
            if expected.any():
                assert relative_error(after["residuals"][name], expected) < 1e-6, name
        assert sum(bool(residual.any()) for residual in after["residuals"].values()) >= 3


def test_a_new_shard_takes_the_q_of_the_shard_that_held_its_first_row(resumed: Any) -> None:
    two = [rank["q"] for rank in resumed(2, 2)]
    three = [rank["q"] for rank in resumed(1, 3)]
    # `first.weight` has 33 rows: the shards begin at 0, 17 and at 0, 11, 22.
    for new_shard, old_shard in ((0, 0), (1, 0), (2, 1)):
        assert same_bits(three[new_shard]["first.weight"], two[old_shard]["first.weight"])
    assert not same_bits(two[0]["first.weight"], two[1]["first.weight"])


def _with_another_matrix_rank(folder: str) -> dict[str, bool]:
    options = POWERSGD | {"matrix_approximation_rank": 1, "start_powerSGD_iter": 100}
    model, hook = attached(2, 2, hook_options=options)
    dcp.load({"hook": hook}, checkpoint_id=folder)
    residuals = whole_residuals(hook)
    gradients_of(model, SAVE_AT)
    return {
        "start": hook.options["start_powerSGD_iter"] == 1,
        "residuals": sum(bool(residual.any()) for residual in residuals.values()) == 3,
        "refitted": {q.shape[0] for q in session_of(hook).state["q"].values()} == {1},
        "compressed": hook.stats()["compressed_steps"] == 1,
    }


def test_another_matrix_rank_keeps_residuals_and_refits_q(run_ranks: Any, saved_by: Any) -> None:
    for outcome in run_ranks(_with_another_matrix_rank, saved_by(2)[0], world_size=4):
        assert all(outcome.values()), outcome


# ---- asynchronous saves, and saves that fail


def _async_save(folder: str) -> dict[str, Any]:
    """Train on while the checkpoint is written: it must hold the step at which it was called."""
    model, hook = trained(2, 1)
    waiting = threading.Event()
    writer = _SlowWriter(folder, waiting)
    # With its own group, because its collectives run between those of the training.
    saving = dcp.async_save({"hook": hook}, storage_writer=writer, process_group=dist.new_group())
    for step in range(SAVE_AT, STEPS):
        gradients_of(model, step)
    in_time = not saving.done()
    waiting.set()
    saving.result()
    _, other = new(2, 1)
    dcp.load({"hook": other}, checkpoint_id=folder)
    _undisturbed, reference = trained(2, 1)
    reference.state_dict()  # sets the residuals to their mean, as the save did
    return {"in time": in_time, "one step": bits_equal(learned(other), learned(reference))}


class _SlowWriter(dcp.FileSystemWriter):
    def __init__(self, path: str, go_on: threading.Event) -> None:
        super().__init__(path)
        self.go_on = go_on

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        assert self.go_on.wait(30)
        return super().write_data(*args, **kwargs)


def test_an_asynchronous_save_never_mixes_two_steps(run_ranks: Any, tmp_path: Path) -> None:
    for outcome in run_ranks(_async_save, str(tmp_path)):
        assert outcome == {"in time": True, "one step": True}


def _inexact(folder: str) -> dict[str, Any]:
    """Save where the replicas of one shard cannot save their residuals together."""
    _model, hook = trained(2, 2)
    if dist.get_rank() % 2:
        session_of(hook).state.local_missing = True
        hook.joint_save_limit_s = 0.2
        if dist.get_rank() == 3:
            session_of(hook).state.step += 1  # so it votes in another save
    dcp.save({"hook": hook}, checkpoint_id=folder)
    _, other = new(2, 2)
    with log_lines("commhooks.checkpoint") as lines:
        dcp.load({"hook": other}, checkpoint_id=folder)
    state = session_of(other).state
    return {
        "residuals": len(state["residual"]),
        "missing": state.local_missing,
        "q": len(state["q"]) > 0,
        "lines": lines,
    }


def test_without_the_residuals_of_one_shard_none_are_loaded(run_ranks: Any, tmp_path: Path) -> None:
    first, *others = run_ranks(_inexact, str(tmp_path), world_size=4)
    for outcome in (first, *others):
        assert outcome["residuals"] == 0 and outcome["missing"] and outcome["q"]
    assert len(first["lines"]) == 1 and not any(other["lines"] for other in others)


def _refused() -> list[str]:
    model, hook = trained(1, 2)
    errors = []
    for call in (
        lambda: hook.state_dict("per_rank"),
        lambda: hook.state_dict("mean"),
        lambda: hook.state_dict(joint=False),
        lambda: hook.state_dict("else"),
        lambda: new(1, 2, save_residual="mean"),
    ):
        with pytest.raises(commhooks.HookConfigError) as error:
            call()
        errors.append(str(error.value))
    state = hook.state_dict()
    before = learned(hook)
    for change in (
        {"commhooks": b"nonsense"},
        {"commhooks": 3},
        {"residual": {"first.weight": torch.full(NAMES["first.weight"], float("nan"))}},
        {"residual": {"first.weight": torch.ones(3, 3)}},
        trained(2, 0)[1].state_dict(),
    ):
        with pytest.raises(commhooks.PayloadError) as wrong:
            hook.load_state_dict(state | change)
        errors.append(str(wrong.value))
    assert bits_equal(before, learned(hook))
    hook.load_state_dict(state)
    assert whole_gradients(model)
    return errors


def test_a_sharded_model_refuses_what_it_cannot_save_or_load(run_ranks: Any) -> None:
    other_sharding = "was saved for another sharding. Load it with torch.distributed.checkpoint"
    expected = (
        "residual='per_rank'; expected one of 'distributed', 'drop'",
        "residual='mean'; expected one of 'distributed', 'drop'",
        "needs all ranks",
        "'else'",
        "save_residual='mean' with a model sharded by fully_shard",
        "cannot be read",
        "is a int, not bytes",
        "holds inf or NaN",
        other_sharding,
        other_sharding,
    )
    for errors in run_ranks(_refused):
        for error, text in zip(errors, expected, strict=True):
            assert text in error


def _dropped(folder: str) -> dict[str, Any]:
    _model, hook = trained(1, 2, save_residual="drop")
    dcp.save({"hook": hook}, checkpoint_id=folder)
    _, other = new(1, 2, save_residual="drop")
    dcp.load({"hook": other}, checkpoint_id=folder)
    state = session_of(other).state
    return {
        "keys": list(hook.state_dict()),
        "step": state.step,
        "residuals": len(state["residual"]),
    }


def test_a_save_without_residuals_holds_none(run_ranks: Any, tmp_path: Path) -> None:
    for outcome in run_ranks(_dropped, str(tmp_path)):
        assert outcome == {"keys": ["commhooks"], "step": SAVE_AT, "residuals": 0}
