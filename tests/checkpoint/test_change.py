"""Something has changed between saving and loading: options, hook, wrapper, buckets, DDP, the
model, its float type, the scaler.

Each change is either right, without a word, or one error that lists the names and says what
strict=False does; and strict=False does that, with one warning on rank 0.
"""

import copy
import logging
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.ddp_steps import log_lines
from tests.support.inside import learns, session_of
from tests.support.models import same
from tests.support.training import ONE_BUCKET_MB, Run, make_model

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1, "min_compression_rate": 1}
STEPS, MORE = 3, 2


class _Sum:
    """A state of a user's own hook: how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.calls = saved["calls"]


def users_hook(state: _Sum, bucket: Any) -> Any:
    state.calls += 1
    return commhooks.allreduce_hook(None, bucket)


def _model(kind: str) -> torch.nn.Module:
    """`make_model` and what may have become of it."""
    model = make_model(getattr(torch, kind) if kind == "float64" else torch.float32)
    if kind == "renamed":
        model = torch.nn.Sequential(
            OrderedDict(("middle" if k == "5" else k, m) for k, m in model.named_children())
        )
    elif kind == "reshaped":
        model[5], model[7] = torch.nn.Linear(24, 32), torch.nn.Linear(32, 10)
    elif kind == "frozen":
        model[5].requires_grad_(False)
    return model


def _new(kind: str = "", hook: Any = "powerSGD", **changes: Any) -> Run:
    if hook == "users":
        return Run.new(_model(kind), hook=users_hook, hook_state=_Sum(), **changes)
    options = OPTIONS | changes.pop("hook_options", {}) if str(hook).endswith("powerSGD") else None
    return Run.new(_model(kind), hook=hook, hook_options=options, **changes)


def _weights_and_optimizer(run: Run, source: Run) -> None:
    torch.nn.utils.vector_to_parameters(
        source.weights().to(next(run.ddp.parameters())), run.ddp.parameters()
    )
    run.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
    run.step = source.step


def _kept(saved: dict[str, Any], run: Run) -> dict[str, bool]:
    """Name -> whether the memory of that parameter is what was saved; those that have no memory are
    left out.
    """
    memory = session_of(run.hook).state  # type: ignore[union-attr]
    kept = {}
    for name, entry in saved["parameters"].items():
        residual, q = memory["residual"].get(name), memory["q"].get(name)
        if residual is None and q is None:
            continue
        assert residual is not None and q is not None
        rows = min(len(q), len(entry["q"]))
        kept[name] = torch.equal(
            residual, entry["residual"][0].flatten().to(residual.dtype)
        ) and torch.equal(q[:rows], entry["q"][:rows].flatten(1).to(q.dtype))
    return kept


MATRICES = ["0.weight", "3.weight", "5.weight", "7.weight"]

# -------------------------------------------------------------------------------------------------
# what is right

# A compiled model has the names of the model: test_ddp_options.py.
RIGHT: dict[str, dict[str, Any]] = {
    "buckets": {  # changes nothing in the sequence of steps
        "bucket_cap_mb": ONE_BUCKET_MB,
        "ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    },
    "rank": {"hook_options": {"matrix_approximation_rank": 4}},
    "float64 and wrapper": {"kind": "float64", "wrapper": "bf16"},
}


def _right(change: dict[str, Any]) -> list[dict[str, Any]]:
    """Saved without the change and loaded with it, and the other way round with strict=False."""
    results = []
    for before, after, strict in (({}, change, True), (change, {}, False)):
        run = _new(**before).train(STEPS)
        saved = copy.deepcopy(run.hook.state_dict())
        resumed = _new(**after)
        _weights_and_optimizer(resumed, run)
        with log_lines("commhooks", logging.WARNING) as lines:
            resumed.hook.load_state_dict(saved, strict=strict)
            kept = _kept(saved, resumed)
            resumed.train(MORE)
        results.append(
            {
                "kept": kept,
                "warnings": lines,
                "stats": resumed.hook.stats(),
                "weights": resumed.weights(),
                "uninterrupted": run.train(MORE).weights(),
            }
        )
    return results


@pytest.mark.parametrize("change", RIGHT)
def test_changes_that_a_state_does_not_know_of(run_ranks: Any, change: str) -> None:
    ranks = run_ranks(_right, RIGHT[change])
    for direction, first in enumerate(ranks[0]):
        for rank in ranks:
            result = rank[direction]
            assert result["kept"] == dict.fromkeys(MATRICES, True)
            assert result["warnings"] == []
            assert (result["stats"]["step"], result["stats"]["compressed_steps"]) == (
                STEPS + MORE,
                MORE,
            )
            assert result["weights"].isfinite().all() and torch.equal(
                result["weights"], first["weights"]
            )
            if change == "buckets":
                assert torch.equal(result["weights"], result["uninterrupted"])


# ------------------------------------------------------------------------------------------------
# another model

SAVED, NOW = "in the saved state, not in the model", "in the model, not in the saved state"
# Change -> (kind of model that saves, kind that loads, what the text says of each name).
MODELS: dict[str, tuple[str, str, dict[str, str]]] = {
    "renamed": (
        "",
        "renamed",
        {"5.weight": SAVED, "5.bias": SAVED, "middle.weight": NOW, "middle.bias": NOW},
    ),
    "reshaped": (
        "",
        "reshaped",
        {
            "5.weight": "saved with shape (24, 24), now (32, 24)",
            "5.bias": "saved with shape (24,), now (32,)",
            "7.weight": "saved with shape (10, 24), now (10, 32)",
        },
    ),
    "frozen": (
        "",
        "frozen",
        {name: f"{SAVED} (removed, renamed, or frozen now)" for name in ("5.weight", "5.bias")},
    ),
    "unfrozen": (
        "frozen",
        "",
        {
            name: f"{NOW} (added, renamed, or frozen or tied then)"
            for name in ("5.weight", "5.bias")
        },
    ),
}


def _refused(run: Run, saved: dict[str, Any]) -> dict[str, Any]:
    """The error of loading into `run`, which has run already, and whether it is as before."""
    before, weights = copy.deepcopy(run.hook.state_dict()), run.weights()
    with (
        log_lines("commhooks", logging.WARNING) as lines,
        pytest.raises(commhooks.PayloadError) as error,
    ):
        run.hook.load_state_dict(saved, strict=True)
    untouched = (
        same(before, run.hook.state_dict()) and torch.equal(weights, run.weights()) and not lines
    )
    return {"error": str(error.value), "untouched": untouched, "weights": run.train(2).weights()}


def _another_model(before: str, after: str, hook: str, running: bool) -> dict[str, Any]:
    saved = copy.deepcopy(_new(before, hook).train(STEPS).hook.state_dict())
    refused = _refused(_new(after, hook).train(2), saved)
    run = _new(after, hook)
    run.train(2 if running else 0)
    with log_lines("commhooks", logging.WARNING) as lines:
        run.hook.load_state_dict(saved, strict=False)
        residuals = set(session_of(run.hook).state["residual"])  # type: ignore[union-attr]
        kept = _kept(saved, run) if hook == "powerSGD" else dict.fromkeys(residuals, True)
        compressed_before = run.hook.stats()["compressed_steps"]
        run.step = STEPS
        run.train(MORE)
    return {
        "refused": refused,
        "warnings": lines,
        "kept": kept,
        "weights": run.weights(),
        "step": run.hook.stats()["step"],
        "compressed": run.hook.stats()["compressed_steps"] - compressed_before,
    }


@pytest.mark.parametrize(
    ("change", "hook", "running"),
    [
        ("renamed", "powerSGD", True),
        ("reshaped", "batched_powerSGD", True),
        ("reshaped", "powerSGD", False),
        ("frozen", "powerSGD", True),
        ("unfrozen", "powerSGD", False),
    ],
)
def test_another_model(run_ranks: Any, change: str, hook: str, running: bool) -> None:
    before, after, problems = MODELS[change]
    ranks = run_ranks(_another_model, before, after, hook, running)
    for rank in ranks:
        refused = rank["refused"]
        assert refused["untouched"]
        assert torch.equal(refused["weights"], ranks[0]["refused"]["weights"])
        first, *lines, last = refused["error"].splitlines()
        assert first == "the saved hook state is of another model:"
        assert len(lines) == len(problems)
        for name, problem in problems.items():
            assert any(line.startswith(f"  {name}: {problem}") for line in lines), name
        assert (
            last
            == "strict=False, with hook=... or in the load, gives these parameters fresh memory and"
            " loads the others"
        )
        # All that has a residual and is as it was keeps it.
        fitting = ["0.weight", "3.weight", "5.weight", "7.weight"]
        if hook == "batched_powerSGD":
            fitting += ["0.bias", "3.bias", "5.bias", "7.bias"]
        assert rank["kept"] == {name: True for name in fitting if name not in problems}
        assert (rank["step"], rank["compressed"]) == (STEPS + MORE, MORE)
        assert rank["weights"].isfinite().all() and torch.equal(
            rank["weights"], ranks[0]["weights"]
        )
    (warning,) = ranks[0]["warnings"]
    assert all(f"  {name}: {problem}" in warning for name, problem in problems.items())
    assert "These parameters start with fresh memory (strict=False)." in warning
    assert ranks[1]["warnings"] == []


# -------------------------------------------------------------------------------------------------
# another hook

HOOKS = [
    ("powerSGD", "batched_powerSGD"),
    ("powerSGD", "fp16_compress"),
    ("powerSGD", "users"),
    ("users", "powerSGD"),
]


def _another_hook(before: str, after: str) -> dict[str, Any]:
    saver = _new(hook=before).train(STEPS)
    saved = copy.deepcopy(saver.hook.state_dict())
    running = _new(hook=after)
    if after.endswith("powerSGD"):
        # A state of its own that says to start later: to begin anew is to forget that too.
        later = _new(hook=after, hook_options={"start_powerSGD_iter": 2}).train(3)
        running.hook.load_state_dict(later.hook.state_dict())
    running.train(3)
    refused = _refused(running, saved)
    with log_lines("commhooks", logging.WARNING) as lines:
        running.hook.load_state_dict(saved, strict=False)
    memory = session_of(running.hook).state if learns(running.hook) else None
    forgotten = memory is None or not (memory["q"] or memory["residual"] or memory.nonfinite_steps)
    step, start = running.hook.stats()["step"], running.hook.options.get("start_powerSGD_iter")
    fresh = _new(hook=after)
    for run in (running, fresh):
        _weights_and_optimizer(run, saver)
        run.train(MORE)
    return {
        "refused": refused,
        "warnings": lines,
        "forgotten": forgotten,
        "step": step,
        "start": start,
        "steps": [running.hook.stats()["step"], fresh.hook.stats()["step"]],
        "weights": running.weights(),
        "fresh": fresh.weights(),
    }


@pytest.mark.parametrize(("before", "after"), HOOKS)
def test_another_hook(run_ranks: Any, before: str, after: str) -> None:
    ranks = run_ranks(_another_hook, before, after)
    old, new = (repr("users_hook" if each == "users" else each) for each in (before, after))
    for rank in ranks:
        refused = rank["refused"]
        assert (
            refused["error"]
            == f"the saved state is of hook {old}, but this hook is {new}. Attach the saved hook to"
            " continue with its memory, or pass strict=False, with hook=... or to the load, to"
            " begin this one with fresh memory"
        )
        assert refused["untouched"]
        assert rank["forgotten"] and rank["step"] == 0
        assert rank["start"] == (1 if after.endswith("powerSGD") else None)
        assert rank["steps"] == [MORE, MORE]
        assert torch.equal(rank["weights"], ranks[0]["weights"])
        # The batched form depends on the buckets, which a model that has run already has built
        # anew.
        if after != "batched_powerSGD":
            assert torch.equal(rank["weights"], rank["fresh"])
    (warning,) = ranks[0]["warnings"]
    text = (
        f"the saved state is of hook {old}, but this hook is {new}: it begins with fresh memory"
        " (strict=False)"
    )
    expected = f"commhooks: {text}"
    assert warning == expected + (
        "; its hook_state (_Sum) stays as it is" if after == "users" else ""
    )
    assert ranks[1]["warnings"] == []


def _lost_state(strict: bool) -> dict[str, Any]:
    """A user's hook whose state cannot take over what was saved; and one that can, where nothing
    was saved.
    """
    saver = _new(hook="users").train(STEPS)
    saved = copy.deepcopy(saver.hook.state_dict())
    result: dict[str, Any] = {"error": ""}
    run = Run.new(hook=users_hook, hook_state=type("Mute", (), {"calls": 0})()).train(1)
    with log_lines("commhooks", logging.WARNING) as result["warnings"]:
        try:
            run.hook.load_state_dict(saved, strict=strict)
        except commhooks.PayloadError as error:
            result["error"] = str(error)
    result["step"] = run.hook.stats()["step"]
    with log_lines("commhooks", logging.WARNING) as result["nothing saved"]:
        saver.hook.load_state_dict(saved | {"hook_state": None}, strict=strict)
    return result


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_a_state_of_ones_own_that_has_nowhere_to_go(run_ranks: Any, strict: bool) -> None:
    text = (
        "the checkpoint holds a state of hook 'users_hook', but its hook_state now (Mute) has no"
        " load_state_dict"
    )
    nothing = (
        "the checkpoint holds no state of hook 'users_hook': its hook_state (_Sum) stays as it is"
    )
    for place, rank in enumerate(run_ranks(_lost_state, strict)):
        said = place == 0
        assert rank["nothing saved"] == [f"commhooks: {nothing}"] * said
        if strict:
            assert (
                rank["error"]
                == f"{text}; strict=False, with hook=... or in the load, loads the step without"
                " that state"
            )
            assert rank["step"] == 1 and rank["warnings"] == []
        else:
            assert rank["error"] == "" and rank["step"] == STEPS
            assert rank["warnings"] == [f"commhooks: {text}: it is left out (strict=False)"] * said


# ---- another scaler, other names
# -------------------------------------------------------------------------------------


def _scaler_gone(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Saved with residuals of a scaled loss, resumed without a scaler; and resumed from the same
    residuals unscaled.
    """
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
def test_a_pickled_state_with_other_names_starts_fresh(
    run_ranks: Any, attached_first: bool
) -> None:
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


def _batched_into_running() -> torch.Tensor:
    """The learning-rate finder's rewind: a batched hook that runs already takes over a state saved
    at another rank.
    """
    options = {"start_powerSGD_iter": 0, "matrix_approximation_rank": 1}
    saved = Run.new(hook="batched_powerSGD", hook_options=options).train(3).save()
    run = Run.new(
        hook="batched_powerSGD", hook_options=options | {"matrix_approximation_rank": 2}
    ).train(3)
    return run.load(saved).train(2).weights()


def test_a_batched_state_of_another_rank_into_a_running_hook(run_ranks: Any) -> None:
    first, second = run_ranks(_batched_into_running)
    assert torch.equal(first, second)
