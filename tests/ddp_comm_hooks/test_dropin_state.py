"""`PowerSGDState` can be pickled, loaded, counted and logged as torch's users know it."""

import io
import pickle

import pytest
import torch
import torch.distributed as dist

import commhooks
from tests.support.ddp_steps import gradients, log_lines, mlp, replicas_equal, train, weights, wrap


def _pickled(thing: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _unpickled(data: bytes) -> commhooks.PowerSGDState:
    return torch.load(io.BytesIO(data), weights_only=False)


# ---- pickles -------------------------------------------------------------------------------------


def test_a_state_loads_before_there_is_a_process_group():
    state = commhooks.PowerSGDState(
        None, matrix_approximation_rank=3, start_powerSGD_iter=7, random_seed=5
    )
    assert not dist.is_initialized()
    with log_lines() as lines:
        loaded = pickle.loads(pickle.dumps(state))
    assert (loaded.matrix_approximation_rank, loaded.start_powerSGD_iter, loaded.random_seed) == (
        3,
        7,
        5,
    )
    assert loaded.process_group is None and loaded.iter == 0
    assert lines[0].startswith("NOTE: Process group is not serializable")
    assert lines[1].startswith("NOTE: Process group will be set to a default group")


# DDP options under which the same parameters lie in one bucket, in several, in several from the
# first pass on.
LAYOUTS = {
    "one bucket": {"bucket_cap_mb": 25},
    "several buckets": {},
    "several at once": {"find_unused_parameters": True},
}
Weights = dict[str, torch.Tensor]


def trained_state(start: int, layout: str) -> tuple[bytes, Weights, Weights]:
    """Three steps; the pickled state and the weights then; and the weights two steps later."""
    ddp = wrap(mlp(), **LAYOUTS[layout])
    state = commhooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=start)
    ddp.register_comm_hook(state, commhooks.powerSGD_hook)
    train(ddp, 3)
    saved = _pickled(state)
    then = weights(ddp.module)
    train(ddp, 2, first_step=3)
    return saved, then, weights(ddp.module)


def resumed_weights(saved: list[bytes], then: Weights, layout: str) -> Weights:
    """The other two steps, by another DDP with other initial weights."""
    state = _unpickled(saved[dist.get_rank()])
    module = mlp(seed=99)
    module.load_state_dict(then)
    ddp = wrap(module, **LAYOUTS[layout])
    ddp.register_comm_hook(state, commhooks.powerSGD_hook)
    train(ddp, 2, first_step=3)
    assert state.iter == 5 and replicas_equal(ddp)
    return weights(ddp.module)


@pytest.mark.parametrize(
    "start, before, after",
    [
        (0, "several buckets", "several buckets"),
        (0, "one bucket", "several at once"),
        (2, "several at once", "one bucket"),
    ],
)
def test_each_rank_with_its_own_state_resumes_bit_equal(run_ranks, start, before, after):
    trained = run_ranks(trained_state, start, before)
    resumed = run_ranks(resumed_weights, [saved for saved, _, _ in trained], trained[0][1], after)
    for name, expected in trained[0][2].items():
        assert torch.equal(resumed[0][name], expected), name


def group_set_after_loading() -> dict[str, torch.Tensor]:
    """Ranks 0 and 1 of 3: a state whose group is set only after loading."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return {}
    state = _unpickled(_pickled(commhooks.PowerSGDState(None, start_powerSGD_iter=1)))
    state.process_group = pair
    ddp = wrap(mlp(), process_group=pair)
    ddp.register_comm_hook(state, commhooks.powerSGD_hook)
    train(ddp, 2)
    assert _unpickled(_pickled(state)).process_group is None and state.process_group is pair
    train(ddp, 2, first_step=2)
    assert state.iter == 4 and replicas_equal(ddp, pair)
    return weights(ddp.module)


def pair_of_two() -> dict[str, torch.Tensor]:
    ddp = wrap(mlp())
    ddp.register_comm_hook(
        commhooks.PowerSGDState(None, start_powerSGD_iter=1), commhooks.powerSGD_hook
    )
    train(ddp, 4)
    return weights(ddp.module)


def test_the_group_can_be_set_after_loading(run_ranks):
    of_three = run_ranks(group_set_after_loading, world_size=3)[0]
    of_two = run_ranks(pair_of_two)[0]
    for name, expected in of_two.items():
        assert torch.equal(of_three[name], expected), name


# ---- statistics; their log lines: test_metrics.py ------------------------------------------------


def statistics() -> list[tuple[float, int, int]]:
    ddp = wrap(mlp())
    state = commhooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    ddp.register_comm_hook(state, commhooks.powerSGD_hook)
    statistics = []
    for step in range(6):
        train(ddp, 1, first_step=step)
        statistics.append(state.compression_stats())
    return statistics


# Per compressed step: everything, and what travels of 32 x 24, 32 x 32 and 24 x 32 matrices at rank
# 2 with 88 biases.
BEFORE, AFTER = 768 + 1024 + 768 + 88, 2 * (56 + 64 + 56) + 88


def test_compression_stats_count_compressed_elements(run_ranks):
    for rows in run_ranks(statistics):
        assert rows[2] == (0, 0, 0)
        for compressed, row in enumerate(rows[3:], start=1):
            assert row == (pytest.approx(BEFORE / AFTER), compressed * BEFORE, compressed * AFTER)


# ---- the start -----------------------------------------------------------------------------------


def first_steps(start: int) -> list[bool]:
    """Of the first four steps: did the gradient differ from plain DDP's?"""
    ddp, plain = wrap(mlp()), wrap(mlp())
    state = commhooks.PowerSGDState(None, start_powerSGD_iter=start)
    ddp.register_comm_hook(state, commhooks.powerSGD_hook)
    differs = []
    for step in range(4):
        plain.module.load_state_dict(ddp.module.state_dict())
        train(plain, 1, first_step=step)
        train(ddp, 1, first_step=step)
        ours, theirs = gradients(ddp), gradients(plain)
        differs.append(not torch.equal(ours["0.weight"], theirs["0.weight"]))
        assert torch.equal(ours["0.bias"], theirs["0.bias"])
        assert replicas_equal(ddp)
    return differs


@pytest.mark.parametrize("start", [0, 3])
def test_compression_begins_after_that_many_steps(run_ranks, start):
    for differs in run_ranks(first_steps, start):
        assert differs == [step >= start for step in range(4)]


@pytest.mark.parametrize("start", [0.1, 0.5])
def test_a_state_takes_no_fraction(start):
    with pytest.raises(commhooks.HookConfigError, match=r"expected a number of steps \(int\)"):
        commhooks.PowerSGDState(None, start_powerSGD_iter=start)


def of_a_subgroup() -> tuple[bool, list[str]]:
    """A state of a model in a group of its own, pickled and gone on with there."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    group = groups[min(dist.get_rank(), 1)]
    state = commhooks.PowerSGDState(None, 1, start_powerSGD_iter=1)
    with log_lines() as lines:
        for _ in range(2):
            ddp = wrap(mlp(), process_group=group)
            commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=state)
            train(ddp, 3)
            state = pickle.loads(pickle.dumps(state))
    return state.session.state.has_local(), [
        line for line in lines if "residual of at least one rank" in line
    ]


def test_the_residuals_of_a_model_in_a_group_of_its_own_survive_pickling(run_ranks):
    assert run_ranks(of_a_subgroup, world_size=3) == [(True, [])] * 3
