"""Saves that not every rank joins end in time, do no harm and are marked inexact."""

import io
import logging
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commhooks.comm import joint_save
from commhooks.gradients.torch_private import store_of
from tests.support.ddp_steps import log_lines
from tests.support.inside import session_of
from tests.support.models import masks
from tests.support.sharded import attached, backward, random_gradients
from tests.support.training import Run, residuals

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
LIMIT_S, NOBODY_COMES_S = 60.0, 0.5


def _run() -> Run:
    run = Run.new(hook_options=OPTIONS, save_residual="mean")
    run.hook.joint_save_limit_s = LIMIT_S
    return run.train(3)


def _save_alone(run: Run) -> dict[str, Any]:
    run.hook.joint_save_limit_s = NOBODY_COMES_S
    saved = run.hook.state_dict()
    run.hook.joint_save_limit_s = LIMIT_S
    return saved


def _describe(saved: dict[str, Any]) -> tuple[str, bool, bool]:
    has_residual = any(entry["residual"] is not None for entry in saved["parameters"].values())
    return saved["residual"], saved["exact"], has_residual


EXACT = ("mean", True, True)
INEXACT = ("none", False, False)


def _alone() -> dict[str, Any]:
    run, untouched = _run(), _run()
    started = time.monotonic()
    first = _describe(_save_alone(run)) if dist.get_rank() == 0 else None
    waited = time.monotonic() - started
    run.train(2)
    untouched.train(2)
    weights = run.weights()
    second = run.save()["hook"]
    kept = residuals(run.hook)
    run.train(2)
    return {
        "first": first,
        "waited": waited,
        "second": _describe(second),
        "undisturbed": torch.equal(weights, untouched.weights()),
        "set to the mean": all(
            torch.equal(kept[name], second["parameters"][name]["residual"].flatten())
            for name in kept
        ),
        "weights": run.weights(),
    }


def test_a_rank_that_saves_alone_gets_an_inexact_state(run_ranks: Any) -> None:
    results = run_ranks(_alone)
    assert results[0]["first"] == INEXACT
    assert NOBODY_COMES_S <= results[0]["waited"] < LIMIT_S / 2
    for result in results:
        assert result["second"] == EXACT
        assert result["undisturbed"]
        assert result["set to the mean"]
        assert torch.equal(result["weights"], results[0]["weights"])


def _late() -> tuple[Any, Any]:
    """Rank 1 comes when rank 0 has given up: neither may begin a collective."""
    run = _run()
    if dist.get_rank() == 1:
        dist.barrier()
    late = _describe(_save_alone(run))
    if dist.get_rank() == 0:
        dist.barrier()
    run.train(1)
    return late, _describe(run.hook.state_dict())


def test_a_rank_that_comes_too_late_makes_the_save_inexact(run_ranks: Any) -> None:
    assert run_ranks(_late) == [(INEXACT, EXACT)] * 2


def _fails_in_the_middle() -> tuple[Any, Any, bool]:
    """Rank 1 fails between two collectives: both ranks learn it, both keep their own residuals."""
    run = _run()
    run.hook.state_dict(residual="mean")
    run.train(1)
    before = residuals(run.hook)
    saver = run.hook._hook.checkpointer.joint_save()  # type: ignore[union-attr]
    assert saver is not None
    if dist.get_rank() == 1:
        calls = 0
        mean = saver.mean

        def failing(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("the network is gone")
            return mean(tensor)

        saver.mean = failing  # type: ignore[method-assign]
    failed = _describe(run.hook.state_dict())
    after = residuals(run.hook)
    saver.__dict__.pop("mean", None)
    run.train(1)
    kept = all(torch.equal(before[name], after[name]) for name in before)
    return failed, _describe(run.hook.state_dict()), kept


def test_a_failure_in_the_middle_leaves_both_ranks_their_residuals(run_ranks: Any) -> None:
    assert run_ranks(_fails_in_the_middle) == [(INEXACT, EXACT, True)] * 2


def _on_an_accelerator(in_thread: bool) -> dict[str, Any]:
    """The CPU stands for an accelerator. `in_thread`: rank 1 saves in another thread than the one
    that trains.
    """
    sizes = []
    all_reduce = dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    with masks():
        run = _run()
        saved = []
        means = {name: residual.clone() for name, residual in residuals(run.hook).items()}
        for mean in means.values():
            dist.all_reduce(mean)
        gloo = mock.patch.object(dist, "ProcessGroupGloo", wraps=dist.ProcessGroupGloo)
        pieces = mock.patch.object(joint_save, "PIECE_NUMEL", 100)
        with gloo as groups, pieces, mock.patch.object(dist, "all_reduce", noted):
            thread = threading.Thread(target=lambda: saved.append(run.hook.state_dict()))
            if in_thread and dist.get_rank() == 1:
                thread.start()
                thread.join()
            else:
                thread.run()
        kept = residuals(run.hook)
        return {
            "saved": _describe(saved[0]),
            "is the mean": all(
                torch.allclose(kept[n], mean / 2, atol=1e-7) for n, mean in means.items()
            ),
            "goes on from it": all(
                torch.equal(kept[name], saved[0]["parameters"][name]["residual"].flatten())
                for name in kept
            ),
            "groups": groups.call_count,
            "largest": max(sizes, default=0),
        }


@pytest.mark.parametrize("in_thread", [False, True])
def test_an_accelerator_averages_in_pieces_over_the_models_group(
    run_ranks: Any, in_thread: bool
) -> None:
    """Unless the collectives of the save could come between those of the training."""
    for outcome in run_ranks(_on_an_accelerator, in_thread):
        groups, largest = outcome.pop("groups"), outcome.pop("largest")
        assert outcome == {"saved": EXACT, "is the mean": True, "goes on from it": True}
        assert (groups, largest) == ((1, 0) if in_thread else (0, 100))


def _keys_left() -> tuple[int, list[int]]:
    """Return the keys in the group's store after joint saves that succeed and that fail."""
    run = _run()
    store = store_of(dist.group.WORLD)
    rank = dist.get_rank()
    saver = run.hook._hook.checkpointer.joint_save()  # type: ignore[union-attr]
    assert saver is not None

    def after_a_save() -> int:
        saver.__dict__.pop("mean", None)
        run.train(1)
        assert _describe(run.hook.state_dict()) == EXACT
        dist.barrier()
        count = store.num_keys()
        dist.barrier()
        run.train(1)
        return count

    first = after_a_save()
    later = []
    for case in ("rank 1 alone", "rank 1 fails", "no network", "rank 1 declines"):
        if case == "rank 1 declines":
            session_of(run.hook).state.local_missing = rank == 1
        if rank == 1 and case == "rank 1 fails":
            saver.mean = failing  # type: ignore[method-assign]
        connect = failing if case == "no network" else dist.ProcessGroupGloo
        with mock.patch.object(dist, "ProcessGroupGloo", connect):
            if case != "rank 1 alone":
                assert _describe(run.hook.state_dict()) == INEXACT
            elif rank == 1:
                assert _describe(_save_alone(run)) == INEXACT
        session_of(run.hook).state.local_missing = False
        later.append(after_a_save())
    return first, later


def test_what_failed_saves_wrote_is_deleted(run_ranks: Any) -> None:
    for first, later in run_ranks(_keys_left):
        assert later == [first] * 4


def _again_without_exchange() -> tuple[Any, int, bool]:
    """A second save at the same step needs no exchange: rank 0 alone may make it."""
    run = _run()
    first = run.hook.state_dict()
    second = run.hook.state_dict() if dist.get_rank() == 0 else first
    same = all(
        entry["residual"] is None
        or torch.equal(entry["residual"], second["parameters"][name]["residual"])
        for name, entry in first["parameters"].items()
    )
    return _describe(second), second["step"], same


def test_a_second_save_at_the_same_step_exchanges_nothing(run_ranks: Any) -> None:
    assert run_ranks(_again_without_exchange) == [(EXACT, 3, True)] * 2


def _saved_in_mid_commit() -> tuple[bool, str]:
    """A signal handler may save while the state is being written: it cannot trust the residuals."""
    run = _run()
    session_of(run.hook).held.in_commit = True
    saved = run.hook.state_dict(residual="per_rank")
    return saved["exact"], saved["residual"]


def test_a_save_in_mid_commit_is_inexact(run_ranks: Any) -> None:
    assert run_ranks(_saved_in_mid_commit) == [(False, "none")] * 2


def _one_step_ahead() -> tuple[Any, float]:
    """Rank 0 saves while its commit writes; rank 1 has ended the same commit."""
    run = _run()
    session = session_of(run.hook)
    if dist.get_rank() == 0:
        session.held.in_commit = True
    else:
        session.state.step += 1
    began = time.monotonic()
    return _describe(run.hook.state_dict()), time.monotonic() - began


def test_nobody_waits_for_a_rank_that_saves_in_mid_commit(run_ranks: Any) -> None:
    results = run_ranks(_one_step_ahead)
    assert [described for described, _ in results] == [INEXACT] * 2
    assert max(waited for _, waited in results) < LIMIT_S / 2


def _warned(case: str) -> list[str]:
    """What is logged on this rank by a save that cannot be joint."""
    run = _run()
    rank = dist.get_rank()
    if case[0].isdigit():
        run.hook.joint_save_limit_s = NOBODY_COMES_S
    if case == "before the first pass":
        run = Run.new(hook_options=OPTIONS, save_residual="mean").load(run.save())
    with log_lines("commhooks", logging.WARNING) as lines:
        if case == "nobody tries":
            run.hook.state_dict(joint=False)
        elif case == "one fails while another connects":
            saver = run.hook._hook.checkpointer.joint_save()  # type: ignore[union-attr]
            assert saver is not None
            refuse = saver._refuse

            def refused(*args: Any) -> Any:
                failure = refuse(*args)
                store_of(dist.group.WORLD).set("refused", "")
                return failure

            if rank == 1:
                saver.mean = failing
                saver._refuse = refused  # type: ignore[method-assign]
            connect = _too_late if rank == 0 else dist.ProcessGroupGloo
            with mock.patch.object(dist, "ProcessGroupGloo", connect):
                run.hook.state_dict()
        elif case == "wrong interface":
            with mock.patch.object(dist, "ProcessGroupGloo", failing):
                run.hook.state_dict()
        elif case == "before the first pass":
            state = session_of(run.hook).state  # type: ignore[union-attr]
            state.local_shared = False  # as after a load of residuals per rank
            run.hook.state_dict()
        elif rank in map(int, case.split(",")):
            run.hook.state_dict()
    return lines


def failing(*_: Any) -> Any:
    raise RuntimeError("the network is gone")


def _too_late(
    store: dist.Store, rank: int, size: int, limit: timedelta, connect: Any = dist.ProcessGroupGloo
) -> Any:
    """Connect, but not before another rank has failed and closed its connections."""
    _connected = connect(store, rank, size, limit)
    store_of(dist.group.WORLD).wait(["refused"])
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("case", "speakers", "reason"),
    [
        ("nobody tries", [0], "rank 0 saved on its own"),
        (
            "one fails while another connects",
            [1],
            "rank 1 failed: RuntimeError: the network is gone",
        ),
        (
            "wrong interface",
            [0, 1, 2],
            "set GLOO_SOCKET_IFNAME to the network interface between them",
        ),
        ("before the first pass", [0], "no backward pass has run"),
        ("1,2", [1, 2], "not every rank took part"),
    ],
)
def test_one_rank_warns(run_ranks: Any, case: str, speakers: list[int], reason: str) -> None:
    """The first rank that knows of the failure."""
    by_rank = run_ranks(_warned, case, world_size=3)
    warnings = {rank: lines for rank, lines in enumerate(by_rank) if lines}
    assert len(warnings) == 1 and next(iter(warnings)) in speakers
    (warning,) = next(iter(warnings.values()))
    assert reason in warning and "marked inexact" in warning


def _sharded() -> list[tuple[bool, list[str]]]:
    """Return which saves are exact, and what is logged, when ranks of a shard fail."""
    model, hook = attached(2, 2, hook_options=OPTIONS)
    backward(model, random_gradients(0))
    saver = hook._hook.checkpointer.joint_save()
    exact = []  # type: ignore[union-attr]
    assert saver is not None
    for step, ranks in enumerate(([1], [0, 1, 2, 3], []), start=1):
        backward(model, random_gradients(step))
        if dist.get_rank() in ranks:
            saver.mean = failing  # type: ignore[method-assign]
        with log_lines("commhooks", logging.WARNING) as lines:
            saved = hook.state_dict()
        saver.__dict__.pop("mean", None)
        exact.append(
            (bool(torch.load(io.BytesIO(saved["commhooks"]), weights_only=True)["exact"]), lines)
        )
    return exact


def test_a_save_of_shards_fails_as_one(run_ranks: Any) -> None:
    for number, ranks in enumerate(zip(*run_ranks(_sharded, world_size=4), strict=True)):
        assert [exact for exact, _ in ranks] == [number == 2] * 4
        warnings = [line for _, lines in ranks for line in lines]
        assert len(warnings) == (number < 2)
        assert all("the network is gone" in line and "marked inexact" in line for line in warnings)
