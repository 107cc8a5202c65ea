"""Golden payloads load to the bit and train on as they did, and payloads keep their form.

If these tests fail, the format has changed.
"""

from typing import Any

import pytest
import torch

import commhooks
from commhooks.checkpoint import parts as payload_parts
from commhooks.checkpoint.payload import VERSION
from tests.golden import golden_runs
from tests.golden.golden_runs import KINDS, SAVED_AT
from tests.support.models import all_finite, bits_equal, relative_error

GOLDEN: dict[str, Any] = torch.load(golden_runs.FILE, weights_only=True)


@pytest.fixture(scope="module")
def resumed(worker_pool: Any) -> list[dict[str, Any]]:
    return worker_pool.run(golden_runs.resume_all, GOLDEN["saved"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_golden_payload_loads_to_the_bit(resumed: Any, kind: str) -> None:
    for rank in range(2):
        loaded = resumed[rank][kind]
        saved = GOLDEN["saved"][rank][kind]
        if kind == "users":
            assert form(loaded["users"]) == form(saved["hook_state"])
            assert loaded["step"] == saved["step"] == loaded["users"]["calls"] // 3 == SAVED_AT
            assert bits_equal(loaded["users"]["momentum"], saved["hook_state"]["momentum"])
            continue
        shared, part = saved if kind == "parts" else (saved, None)
        assert loaded["step"] == shared["step"] == SAVED_AT
        assert loaded["start"] == 1  # and not 900, as the options of the new hook say
        residuals = {}
        for name in shared["parameters"]:
            residual = residual_in(shared, part, name, rank)
            if residual is not None:
                residuals[name] = residual.flatten()
        q = {
            name: entry["q"].flatten(1)
            for name, entry in shared["parameters"].items()
            if entry["q"] is not None
        }
        q |= shared["batched_q"]
        assert sorted(residuals) == (
            ["bias", "conv", "wide"] if kind == "batched" else ["conv", "wide"]
        )
        assert len(q) == (1 if kind == "batched" else 2)
        assert bits_equal(loaded["residuals"], residuals)
        assert bits_equal(loaded["q"], q)


def residual_in(shared: Any, part: Any, name: str, rank: int) -> torch.Tensor | None:
    """Return the residual that this rank loads: its own, or the mean."""
    if part is not None:
        return part["residuals"].get(name)
    residual = shared["parameters"][name]["residual"]
    if isinstance(residual, list):
        return residual[shared["residual_ranks"].index(rank)]
    return residual


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_a_golden_payload_has_the_golden_gradients(resumed: Any, kind: str) -> None:
    first, second = (resumed[rank][kind]["gradients"] for rank in range(2))
    for step, then in enumerate(GOLDEN["gradients"][kind]):
        assert all_finite(then.values()) and first[step].keys() == then.keys()
        for name in then:
            assert torch.equal(first[step][name], second[step][name])
            # Not to the bit: processors differ in the order of sums.
            assert relative_error(first[step][name], then[name]) < 1e-5, name


def test_the_golden_gradients_differ_between_hooks() -> None:
    expected = {kind: steps[0]["wide"] for kind, steps in GOLDEN["gradients"].items()}
    for kind in ("mean", "parts"):
        assert relative_error(expected[kind], expected["gathered"]) < 1e-5
    for kind in ("batched", "users"):
        assert relative_error(expected[kind], expected["gathered"]) > 1e-2


# ---- the form of what is saved today


@pytest.fixture(scope="module")
def saved_today(worker_pool: Any) -> list[dict[str, Any]]:
    return worker_pool.run(golden_runs.save_all)


def form(value: Any) -> Any:
    """Return all types and values except options, fingerprints and the numbers in tensors."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.device}"
    if isinstance(value, dict):
        return {
            key: type(item) if key in ("fingerprint", "options") else form(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [form(item) for item in value]
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_has_the_form_of_the_golden_one(saved_today: Any, kind: str) -> None:
    for today, then in zip(saved_today, GOLDEN["saved"], strict=True):
        assert form(today[kind]) == form(then[kind])


# ---- other versions


def _refused(saved: dict[str, Any], hook: str, strict: bool) -> tuple[str, int]:
    _, attached = golden_runs.new(hook, start=1)
    with pytest.raises(commhooks.PayloadError) as error:
        attached.load_state_dict(saved, strict=strict)
    return str(error.value), attached.stats()["step"]


OTHER = (
    f"the saved hook state has format version {VERSION + 1}; this commhooks reads version"
    f" {VERSION}: load it with the commhooks that saved it"
)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("kind", "hook"), [("mean", "powerSGD"), ("users", "users"), ("mean", "allreduce")]
)
def test_another_version_is_refused_by_name(
    run_ranks: Any, kind: str, hook: str, strict: bool
) -> None:
    """Another version may have other keys, and strict=False does not help."""
    saved = GOLDEN["saved"][0][kind]
    other = {key: saved[key] for key in ("format", "hook")} | {
        "version": VERSION + 1,
        "something": "new",
    }
    assert run_ranks(_refused, other, hook, strict) == [(OTHER, 0)] * 2


def test_a_shared_part_of_another_version_is_refused_by_name() -> None:
    shared, _ = GOLDEN["saved"][0]["parts"]
    with pytest.raises(commhooks.PayloadError) as error:
        payload_parts.check_shared(shared | {"version": VERSION + 1})
    assert str(error.value) == OTHER
