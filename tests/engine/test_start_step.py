"""When compression begins: resolved once, and said aloud where it never will."""

import contextlib
import io
from functools import partial

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
def test_the_start_step_is_resolved_from_number_or_fraction(start, total_steps, expected):
    for config in (commhooks.PowerSGD, commhooks.BatchedPowerSGD):
        resolved = config(start_powerSGD_iter=start, matrix_approximation_rank=3).resolved(
            total_steps
        )
        assert resolved == config(start_powerSGD_iter=expected, matrix_approximation_rank=3)
        assert type(resolved.start_powerSGD_iter) is int


def test_a_fraction_of_an_unknown_length_is_refused():
    with pytest.raises(commhooks.HookConfigError, match="pass total_steps="):
        commhooks.PowerSGD(start_powerSGD_iter=0.5).resolved(None)


def started() -> list[tuple[int, int]]:
    """Start as resolved, and first compressed step, of all `CASES`."""
    results = []
    for start, total_steps, _ in CASES:
        ddp = wrap(mlp())
        hook = commhooks.attach(
            ddp, commhooks.PowerSGD(start_powerSGD_iter=start), total_steps=total_steps
        )
        compressed = []
        for step in range(6):
            backward(ddp, step)
            compressed.append(hook.stats()["compressed_steps"])
        results.append((hook.options["start_powerSGD_iter"], compressed.count(0)))
    return results


CASES = [(0.5, 6, 3), (None, 40, 4), (0, None, 0), (1, 2, 1), (1000, 6, 1000)]


def test_the_resolved_start_is_where_compression_begins(run_ranks):
    for rank in run_ranks(started):
        assert rank == [(expected, min(expected, 6)) for *_, expected in CASES]


WARNINGS = [
    *(
        (
            mlp,
            {"hook": commhooks.PowerSGD(start_powerSGD_iter=start), "total_steps": 6},
            f"'powerSGD' begins at step {at}, but this run ends at step 6, so",
        )
        for start, at in ((6, 6), (1000, 1000), (0.999, 6))
    ),
    (mlp, {"hook": commhooks.PowerSGD(start_powerSGD_iter=5), "total_steps": 6}, ""),
    (
        mlp,
        {"hook": commhooks.Auto(measure_steps=6), "total_steps": 6},
        (
            "'auto' begins at step 6, but this run ends at step 6, so that it has no effect."
            " Set measure_steps to a smaller number, or name the hook."
        ),
    ),
    (mlp, {"hook": commhooks.Auto(measure_steps=6), "total_steps": 7}, ""),
    (
        partial(nn.Linear, 4, 4),
        {"hook": "powerSGD"},
        (
            "PowerSGD (rank 1) compresses no parameter of this model: print(hook.plan()) gives the"
            " reasons."
        ),
    ),
    (mlp, {"hook": "powerSGD"}, ""),
    (partial(nn.Linear, 4, 4), {"hook": "allreduce"}, ""),
]


def warned() -> list[list[str]]:
    results = []
    for model, arguments, _ in WARNINGS:
        with log_lines() as lines:
            commhooks.attach(wrap(model()), **arguments)
        results.append(lines)
    return results


def test_a_hook_that_never_compresses_is_a_warning_on_rank_0(run_ranks):
    on_0, on_1 = run_ranks(warned)
    for (_, arguments, expected), lines in zip(WARNINGS, on_0, strict=True):
        assert len(lines) == bool(expected) and expected in "".join(lines), arguments
    assert not any(on_1)


# ---- one line at first ---------------------------------------------------------------------------


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
    (
        "powerSGD",
        None,
    ): (
        "commhooks: powerSGD (rank 2): plain all-reduce until step 2, then 3 of 6 parameters "
        "compressed (96.7 % of the bytes), 10.592 kB -> 1.760 kB per step and rank"
    ),
    (
        "powerSGD",
        "bf16",
    ): (
        "commhooks: powerSGD (rank 2): plain all-reduce until step 2, then 3 of 6 parameters"
        " compressed (96.7 % of the bytes), 10.592 kB -> 0.880 kB per step and rank, bf16 on the"
        " wire"
    ),
    (
        "int8",
        None,
    ): (
        "commhooks: int8_compress (blocks of 256): plain all-reduce until step 2, then 3 of 6"
        " parameters compressed (96.7 % of the bytes), 10.592 kB -> 2.952 kB per step and rank"
    ),
    (
        "int4",
        None,
    ): (
        "commhooks: int4_compress (blocks of 128): 3 of 6 parameters compressed (96.7 % of the"
        " bytes), 10.592 kB -> 1.712 kB per step and rank"
    ),
    (
        "diloco",
        None,
    ): (
        "commhooks: diloco (every 2 steps): plain all-reduce until step 2, then 6 of 6 parameters "
        "compressed (100.0 % of the bytes), 10.592 kB -> 5.296 kB per step and rank on average, "
        "and 10.592 kB per save with an optimizer such as Adam"
    ),
    (
        "local_sgd",
        None,
    ): (
        "commhooks: local_sgd (every 4 steps): 6 of 6 parameters compressed (100.0 % of the bytes),"
        " 10.592 kB -> 2.648 kB per step and rank on average, and 10.592 kB per save with an"
        " optimizer such as Adam"
    ),
    (
        "auto",
        None,
    ): (
        'commhooks: auto (quality="same"): plain all-reduce until step 20 or later, then the '
        "fastest hook here. Until then 10.592 kB per step and rank"
    ),
    ("allreduce", None): "commhooks: allreduce: 10.592 kB -> 10.592 kB per step and rank",
    ("fp16", None): "commhooks: fp16_compress: 10.592 kB -> 5.296 kB per step and rank",
    ("noop", None): "commhooks: noop: 10.592 kB -> 0.000 kB per step and rank",
}


WARNED = {
    "noop": (
        "commhooks: hook 'noop' averages nothing: every rank trains on its own data only, and the"
        " ranks drift apart. It is for measuring how long a step takes without a network; hook=None"
        " trains without a hook\n"
    )
}


def all_announced() -> dict[tuple[str, str | None, bool], tuple[list[str], str]]:
    return {
        (*case, with_logging): announced(*case, with_logging)
        for case in LINES
        for with_logging in (True, False)
    }


def test_rank_0_logs_one_line_at_the_first_backward(run_ranks):
    on_0, on_1 = run_ranks(all_announced)
    for (hook, wrapper), expected in LINES.items():
        warned = WARNED.get(hook, "")
        assert on_0[hook, wrapper, True] == ([expected], warned)
        # Where nobody has set up logging it is printed, or it would not be seen at all.
        assert on_0[hook, wrapper, False] == ([], expected + "\n" + warned)
    assert all(output == ([], "") for output in on_1.values())


ALONE = {
    "powerSGD": (
        "commhooks: powerSGD (rank 2): there is one rank, so nothing is sent. From step 2 on the"
        " gradients are still compressed, so the run can resume on more ranks; hook=None trains on"
        " exact gradients"
    ),
    "bf16": "commhooks: bf16_compress: there is one rank, so nothing is sent",
}


@pytest.mark.parametrize("hook", ALONE)
def test_one_rank_is_told_that_it_sends_nothing(run_ranks, hook):
    [(logged, _)] = run_ranks(announced, hook, None, True, world_size=1)
    assert logged == [ALONE[hook]]
