"""When compression begins: resolved once, and said aloud where it never will."""

import contextlib
import io

import pytest
from torch import nn

import commhooks
from tests.support.ddp_steps import backward, log_lines, mlp, train, wrap
from tests.support.kernels import computing_with

# start_powerSGD_iter, total_steps -> the step
STARTS = [
    (None, None, 100),
    (None, 50_000, 1000),
    (None, 10_000, 1000),
    (None, 9_999, 1000),
    (None, 5_000, 500),
    (None, 15, 2),
    (None, 1, 1),
    (0, None, 0),
    (0, 10, 0),
    (1, 10, 1),
    (70, None, 70),
    (70, 10, 70),
    (0.5, 10, 5),
    (0.25, 10, 3),
    (0.001, 10, 1),
    (0.999, 10, 10),
]


@pytest.mark.parametrize("start, total_steps, expected", STARTS)
def test_resolve_start(start, total_steps, expected):
    for config in (commhooks.PowerSGD, commhooks.BatchedPowerSGD):
        resolved = config(start_powerSGD_iter=start, matrix_approximation_rank=3).resolved(total_steps)
        assert resolved == config(start_powerSGD_iter=expected, matrix_approximation_rank=3)
        assert type(resolved.start_powerSGD_iter) is int


def test_a_fraction_of_an_unknown_length():
    with pytest.raises(commhooks.HookConfigError, match="pass total_steps="):
        commhooks.PowerSGD(start_powerSGD_iter=0.5).resolved(None)


def started(config: commhooks.PowerSGD, total_steps: int | None) -> tuple[int, int, list[str]]:
    """Start as resolved, first compressed step, warnings."""
    ddp = wrap(mlp())
    with log_lines() as lines:
        hook = commhooks.attach(ddp, config, total_steps=total_steps)
    first = -1
    for step in range(6):
        backward(ddp, step)
        if hook.stats()["compressed_steps"] and first < 0:
            first = step
    return hook.options["start_powerSGD_iter"], first, [line for line in lines if "has no effect" in line]


@pytest.mark.parametrize("start, total_steps, expected", [(0.5, 6, 3), (None, 40, 4), (0, None, 0), (1, 2, 1)])
def test_the_resolved_start_is_where_compression_begins(run_ranks, start, total_steps, expected):
    for resolved, first, warnings in run_ranks(started, commhooks.PowerSGD(start_powerSGD_iter=start), total_steps):
        assert resolved == first == expected
        assert warnings == []


@pytest.mark.parametrize("start, total_steps", [(6, 6), (1000, 6), (0.999, 6)])
def test_a_start_that_is_never_reached_is_a_warning(run_ranks, start, total_steps):
    config = commhooks.PowerSGD(start_powerSGD_iter=start)
    on_0, on_1 = run_ranks(started, config, total_steps)
    resolved = start if isinstance(start, int) else 6
    assert on_0[1] == -1
    assert len(on_0[2]) == 1
    assert f"hook 'powerSGD' begins at step {resolved}, but this training ends at step 6, so" in on_0[2][0]
    assert on_1[2] == []


def warned_by_auto(total_steps: int) -> list[str]:
    with log_lines() as lines:
        commhooks.attach(wrap(mlp()), commhooks.Auto(measure_steps=6), total_steps=total_steps)
    return lines


def test_auto_that_never_decides_is_a_warning(run_ranks):
    on_0, on_1 = run_ranks(warned_by_auto, 6)
    assert on_0 == [
        "commhooks: hook 'auto' begins at step 6, but this training ends at step 6, so that it has no effect. Set "
        "measure_steps to a smaller number, or name the hook."
    ]
    assert on_1 == [] and run_ranks(warned_by_auto, 7) == [[], []]


def nothing_to_compress() -> list[str]:
    with log_lines() as lines:
        for model in (nn.Linear(4, 4), mlp()):
            commhooks.attach(wrap(model), "powerSGD")
            commhooks.attach(wrap(model), "allreduce")
    return [line for line in lines if "compresses no parameter" in line]


def test_a_model_in_which_nothing_is_compressed_is_a_warning(run_ranks):
    on_0, on_1 = run_ranks(nothing_to_compress)
    assert on_0 == [
        "commhooks: PowerSGD (rank 1) compresses no parameter of this model: print(hook.plan()) gives the reasons."
    ]
    assert on_1 == []


# -------------------------------------------------------------------------------------------------- one line at first


OPTIONS = {
    "powerSGD": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
    "batched_powerSGD": {"start_powerSGD_iter": 2},
    "int8": {"start_iter": 2},
    "int4": {"start_iter": 0},
    "diloco": {"start_iter": 2, "sync_every": 2, "wire": "float32"},
    "local_sgd": {"sync_every": 4},
    "auto": {"measure_steps": 20},
}


@computing_with("torch")
def announced(hook: str, wrapper: str | None, with_logging: bool) -> tuple[list[str], str]:
    """What is logged and what is printed in three backward passes."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.ExitStack() as stack:
        lines = stack.enter_context(log_lines("commhooks.summary")) if with_logging else []
        ddp = wrap(mlp())
        commhooks.attach(ddp, hook, hook_options=OPTIONS.get(hook), wrapper=wrapper)
        assert not lines and not printed.getvalue()
        train(ddp, 3)
    return [line for line in lines if line.startswith("commhooks: ")], printed.getvalue()


LINES = {
    ("powerSGD", None): "commhooks: powerSGD (rank 2): plain all-reduce until step 2, then 3 of 6 parameters "
    "compressed (96.7 % of the bytes), 10.592 kB -> 1.760 kB per step and rank",
    ("powerSGD", "bf16"): "commhooks: powerSGD (rank 2): plain all-reduce until step 2, then 3 of 6 parameters "
    "compressed (96.7 % of the bytes), 10.592 kB -> 0.880 kB per step and rank, bf16 on the wire",
    ("int8", None): "commhooks: int8_compress (blocks of 256): plain all-reduce until step 2, then 3 of 6 parameters "
    "compressed (96.7 % of the bytes), 10.592 kB -> 2.952 kB per step and rank",
    ("int4", None): "commhooks: int4_compress (blocks of 128): 3 of 6 parameters compressed (96.7 % of the bytes), "
    "10.592 kB -> 1.712 kB per step and rank",
    ("diloco", None): "commhooks: diloco (every 2 steps): plain all-reduce until step 2, then 6 of 6 parameters "
    "compressed (100.0 % of the bytes), 10.592 kB -> 5.296 kB per step and rank on average, "
    "and 10.592 kB per save with an optimizer such as Adam",
    ("local_sgd", None): "commhooks: local_sgd (every 4 steps): 6 of 6 parameters compressed (100.0 % of the bytes), "
    "10.592 kB -> 2.648 kB per step and rank on average, and 10.592 kB per save with an optimizer such as Adam",
    (
        "auto",
        None,
    ): 'commhooks: auto (quality="same"): plain all-reduce until step 20 or later, then the '
    "fastest hook here. Until then 10.592 kB per step and rank",
    ("allreduce", None): "commhooks: allreduce: 10.592 kB -> 10.592 kB per step and rank",
    ("fp16", None): "commhooks: fp16_compress: 10.592 kB -> 5.296 kB per step and rank",
    ("noop", None): "commhooks: noop: 10.592 kB -> 0.000 kB per step and rank",
}


WARNED = {
    "noop": "commhooks: hook 'noop' averages nothing: every rank trains on its own data only, and the ranks drift "
    "apart. It is for measuring how long a step takes without a network; hook=None trains without a hook\n"
}


@pytest.mark.parametrize("hook, wrapper", LINES, ids=str)
def test_one_line_at_the_first_backward_on_rank_0(run_ranks, hook, wrapper):
    expected, warned = LINES[hook, wrapper], WARNED.get(hook, "")
    (logged, printed), on_1 = run_ranks(announced, hook, wrapper, True)
    assert logged == [expected] and printed == warned
    assert on_1 == ([], "")
    # Where nobody has set up logging it is printed, or it would not be seen at all.
    (logged, printed), on_1 = run_ranks(announced, hook, wrapper, False)
    assert logged == [] and printed == expected + "\n" + warned
    assert on_1 == ([], "")


ALONE = {
    "powerSGD": "commhooks: powerSGD (rank 2): there is one rank, so nothing is sent. From step 2 on the gradients are "
    "compressed as among several, so that the run can go on with any number of them; hook=None trains on exact "
    "gradients",
    "bf16": "commhooks: bf16_compress: there is one rank, so nothing is sent",
}


@pytest.mark.parametrize("hook", ALONE)
def test_one_rank_is_told_that_it_sends_nothing(run_ranks, hook):
    [(logged, _)] = run_ranks(announced, hook, None, True, world_size=1)
    assert logged == [ALONE[hook]]
