"""Loading where something has changed since saving: the scaler, the float type, the kind of names, one rank's luck."""

import copy
import gc
import logging
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.engine.backward_pass import BackwardPass, RunningExchange
from tests.support.ddp_steps import log_lines
from tests.support.features import switches_per_library
from tests.support.models import masks
from tests.support.training import Run, make_model

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


def _scaler_gone(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Saved with residuals of a scaled loss, resumed without a scaler; and resumed from the same residuals unscaled."""
    saved = Run.new(hook_options=OPTIONS).train(5).save()
    scaled = copy.deepcopy(saved)
    scaled["hook"]["loss_scale"] = scale
    for entry in scaled["hook"]["parameters"].values():
        if entry["residual"] is not None:
            entry["residual"] = [scale * each for each in entry["residual"]]
    return (
        Run.new(hook_options=OPTIONS).load(scaled).train(3).weights(),
        Run.new(hook_options=OPTIONS).load(saved).train(3).weights(),
    )


def test_residuals_of_a_scaler_that_is_gone(run_ranks: Any) -> None:
    for scaled, plain in run_ranks(_scaler_gone, 65536.0):
        assert torch.equal(scaled, plain)


def _make_inexact(payload: dict[str, Any]) -> None:
    payload.update(residual="none", residual_ranks=[], exact=False)
    for entry in payload["parameters"].values():
        entry["residual"] = None


def _one_rank_inexact() -> torch.Tensor:
    saved = Run.new(hook_options=OPTIONS).train(5).save()
    if dist.get_rank() == 1:
        _make_inexact(saved["hook"])
    return Run.new(hook_options=OPTIONS).load(saved).train(3).weights()


def _nobody_has_residuals() -> torch.Tensor:
    saved = Run.new(hook_options=OPTIONS).train(5).save(residual="drop")
    return Run.new(hook_options=OPTIONS).load(saved).train(3).weights()


def test_an_inexact_file_of_one_rank_makes_all_ranks_do_without(run_ranks: Any) -> None:
    expected = run_ranks(_nobody_has_residuals)
    for weights in run_ranks(_one_rank_inexact):
        assert torch.equal(weights, expected[0])


def _use(state: commhooks.PowerSGDState, attached: bool) -> None:
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    if attached:
        commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=state)
    else:
        ddp.register_comm_hook(state, commhooks.powerSGD_hook)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ddp(torch.randn(4, 1, 8, 8, generator=generator)).square().mean().backward()


def _other_names(attached_first: bool) -> tuple[int, int, bool]:
    state = commhooks.PowerSGDState(None, 2, 0)
    _use(state, attached_first)
    loaded = pickle.loads(pickle.dumps(state))
    _use(loaded, not attached_first)
    kinds = {name.startswith("float32.cpu.") for name in loaded.session.state["q"]}
    return loaded.iter, len(loaded.session.state["q"]), kinds == {attached_first}


@pytest.mark.parametrize("attached_first", [True, False])
def test_a_pickled_state_with_other_names_starts_fresh(run_ranks: Any, attached_first: bool) -> None:
    for steps, matrices, only_new_names in run_ranks(_other_names, attached_first):
        assert (steps, matrices) == (6, 4)
        assert only_new_names


def _pickled() -> bytes:
    state = commhooks.PowerSGDState(None, 2, 0)
    _use(state, attached=False)
    return pickle.dumps(state)


def _unpickled(saved: bytes) -> tuple[bool, bool]:
    state = pickle.loads(saved)
    had = bool(state.session.state["residual"])
    state._adapt_pickled_state()
    return had, bool(state.session.state["residual"])


def test_a_pickled_residual_is_not_that_of_another_world(run_ranks: Any) -> None:
    saved = run_ranks(_pickled)[0]
    assert run_ranks(_unpickled, saved, world_size=1) == [(True, False)]
    assert run_ranks(_unpickled, saved, world_size=2) == [(True, True), (True, False)]


def _first_step_bad(masked: bool) -> tuple[torch.Tensor, int]:
    """The first compressed step overflows, as a GradScaler's first steps do."""
    with masks(masked):
        run = Run.new(hook_options=OPTIONS | {"start_powerSGD_iter": 0})
        handle = run.ddp.module[3].weight.register_hook(lambda gradient: gradient * float("inf"))
        weights = run.weights()
        run.train(1)
        handle.remove()
        torch.nn.utils.vector_to_parameters(weights, run.ddp.parameters())
        run.optimizer.state.clear()
        run.train(1)
        return run.gradients[-1], run.hook.stats()["nonfinite_steps"]


def test_a_bad_first_step_leaves_nothing_behind_a_mask(run_ranks: Any) -> None:
    host, masked = run_ranks(_first_step_bad, False)[0], run_ranks(_first_step_bad, True)[0]
    assert host[1] == masked[1] == 1
    assert (host[0] - masked[0]).norm() < 1e-4 * host[0].norm()


def _torn_on_one() -> tuple[str, bool, list[str]]:
    """The commit of rank 1 fails; then all ranks save the mean."""
    run = Run.new(hook_options=OPTIONS).train(3)
    run.hook.joint_save_limit_s = 1000.0  # longer than the test may take
    if dist.get_rank() == 1:
        failing = mock.Mock(side_effect=MemoryError)
        with mock.patch.object(BackwardPass, "commit", failing), pytest.raises(MemoryError):
            run.train(1)
    else:
        run.train(1)
    with log_lines("commhooks", logging.WARNING) as lines:
        found = [run.hook.state_dict("mean") for _ in range(2)]
    return found[1]["residual"], found[0]["exact"], lines


def test_nobody_waits_for_a_rank_whose_commit_failed(run_ranks: Any) -> None:
    for rank, (residual, exact, lines) in enumerate(run_ranks(_torn_on_one)):
        assert residual == "none" and not exact
        said = [line for line in lines if "rank 1 has lost its residuals" in line]
        assert len(said) == len(lines) == (2 if rank == 1 else 0)


def _declined_before_a_step() -> list[tuple[str, bool]]:
    """Rank 1 loads a payload without residuals, so that it declines the next joint save, but not the one after it."""
    run = Run.new(hook_options=OPTIONS).train(3)
    run.hook.joint_save_limit_s = 60.0
    payload = run.hook.state_dict("per_rank", gather=False)
    if dist.get_rank() == 1:
        _make_inexact(payload)
    run.hook.load_state_dict(payload)
    saved = [run.hook.state_dict("mean"), run.train(1).hook.state_dict("mean")]
    return [(each["residual"], each["exact"]) for each in saved]


def test_a_rank_that_declined_a_joint_save_takes_part_in_that_of_the_next_step(run_ranks: Any) -> None:
    for declined, joint in run_ranks(_declined_before_a_step):
        assert declined == ("none", False) and joint[0] == "mean"


def _alone_without_a_residual() -> tuple[str, bool]:
    """Rank 1 saves on its own while it has no residual, and then loads one."""
    run = Run.new(hook_options=OPTIONS).train(3)
    run.hook.joint_save_limit_s = 60.0
    payload = run.hook.state_dict("per_rank", gather=False)
    if dist.get_rank() == 1:
        without = copy.deepcopy(payload)
        _make_inexact(without)
        run.hook.load_state_dict(without)
        assert run.hook.state_dict("mean", joint=False)["residual"] == "none"
    run.hook.load_state_dict(payload)
    saved = run.hook.state_dict("mean")
    return saved["residual"], saved["exact"]


def test_a_save_of_one_rank_alone_declines_no_joint_save(run_ranks: Any) -> None:
    assert run_ranks(_alone_without_a_residual) == [("mean", True)] * 2


def _wrapped_anew(model: torch.nn.Module, state: commhooks.PowerSGDState) -> Run:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    return Run(ddp, optimizer, commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=state))


def _after_torn() -> dict[str, Any]:
    """The commit fails in the third bucket. DDP is of no use after that; wrapped anew, the same state goes on."""
    state = commhooks.PowerSGDState(None, 2, 1)
    run = _wrapped_anew(make_model(), state).train(3)
    advance, verdicts = RunningExchange.advance, 0

    def failing(self: RunningExchange, verdict: Any = None) -> None:
        nonlocal verdicts
        verdicts += isinstance(verdict, bool)
        if verdicts == 3:
            raise MemoryError
        advance(self, verdict)

    with mock.patch.object(RunningExchange, "advance", failing), pytest.raises(MemoryError):
        run.train(1)
    torn = run.hook.state_dict("per_rank")
    module = run.ddp.module
    del run
    gc.collect()  # the old wrapper has hooks on the parameters
    run = _wrapped_anew(module, state).train(2)
    saved = copy.deepcopy(run.save())
    run.train(3)
    resumed = _wrapped_anew(make_model(), commhooks.PowerSGDState(None, 2, 900)).load(saved).train(3)
    return {
        "torn": (torn["residual"], torn["exact"], torn["step"]),
        "later": (saved["hook"]["residual"], saved["hook"]["exact"], saved["hook"]["step"]),
        "weights": run.weights(),
        "resumed": resumed.weights(),
    }


def test_after_a_commit_that_failed_the_next_one_is_whole_again(run_ranks: Any) -> None:
    """What was lost stays lost, but what was gathered since then is all that a resumed run needs."""
    for result in run_ranks(_after_torn):
        assert result["torn"] == ("none", False, 3)
        assert result["later"] == ("per_rank", True, 5)
        assert torch.equal(result["weights"], result["resumed"])


def _inherited_precision() -> tuple[str, str]:
    torch.backends.fp32_precision = "tf32"
    try:
        Run.new(hook_options=OPTIONS).train(2)
        torch.backends.fp32_precision = "ieee"
        return torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    finally:
        torch.backends.fp32_precision = "none"


@switches_per_library
def test_an_inherited_precision_stays_inherited(run_ranks: Any) -> None:
    assert run_ranks(_inherited_precision) == [("ieee", "ieee")] * 2


def _batched_into_running() -> torch.Tensor:
    """The learning-rate finder's rewind: a batched hook that runs already takes over a state saved at another rank."""
    options = {"start_powerSGD_iter": 0, "matrix_approximation_rank": 1}
    saved = Run.new(hook="batched_powerSGD", hook_options=options).train(3).save()
    run = Run.new(hook="batched_powerSGD", hook_options=options | {"matrix_approximation_rank": 2}).train(3)
    return run.load(saved).train(2).weights()


def test_a_batched_state_of_another_rank_into_a_running_hook(run_ranks: Any) -> None:
    first, second = run_ranks(_batched_into_running)
    assert torch.equal(first, second)
