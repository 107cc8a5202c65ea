"""Files that version 1 has written still load and train on as they did then; what is saved today has the same form.

The files are made by tests/golden/make.py. Whoever sees these tests fail has changed the format: it needs another
version then.
"""

from typing import Any

import pytest
import torch

import commhooks
from commhooks.checkpoint import parts as payload_parts
from commhooks.checkpoint.checks import VERSION
from commhooks.comm.counters import CONTINUED
from tests.support import golden_runs
from tests.support.golden_runs import KINDS, OF_EACH_RANK, SAVED_AT
from tests.support.models import all_finite, relative_error

VERSIONS = sorted(int(folder.name[1:]) for folder in golden_runs.FOLDER.glob("v*"))
LOADED = [kind for kind in KINDS if kind != "shared"]  # which is loaded with the parts
FILES = [(kind, rank) for kind in KINDS for rank in range(2 if kind in OF_EACH_RANK else 1)]


def stored(kind: str, rank: int, version: int) -> dict[str, Any]:
    return torch.load(golden_runs.path(kind, rank, version), weights_only=True)


def test_every_version_has_its_files() -> None:
    assert VERSIONS == list(range(1, VERSION + 1))


# --------------------------------------------------------------------------------------------- what was saved, loads


@pytest.fixture(scope="module")
def resumed(worker_pool: Any) -> dict[int, list[dict[str, Any]]]:
    return {version: worker_pool.run(golden_runs.resume_all, version) for version in VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", LOADED)
def test_step_start_q_and_residuals_are_those_of_the_file(resumed: Any, kind: str, version: int) -> None:
    for rank in range(2):
        found, file = resumed[version][rank][kind], stored("shared" if kind == "part" else kind, rank, version)
        assert found["step"] == file["step"] == SAVED_AT
        if KINDS[kind][0] in ("fp16_compress", "users"):
            assert found["calls"] == (file["hook_state"]["calls"] if kind == "users" else None)
            continue
        assert found["start"] == 1  # and not the 900 that the new hook was told
        assert found["missing"] == (kind == "inexact")
        residuals = {name: residual_in(file, name, rank) for name in file["parameters"]}
        if kind == "part":
            residuals = stored("part", rank, version)["residuals"]
        residuals = {name: residual.flatten() for name, residual in residuals.items() if residual is not None}
        q = {name: entry["q"].flatten(1) for name, entry in file["parameters"].items() if entry["q"] is not None}
        q |= file["batched_q"]
        with_residuals = {"drop": [], "inexact": [], "batched": ["bias", "conv", "wide"]}.get(kind, ["conv", "wide"])
        assert sorted(residuals) == with_residuals
        assert len(q) == (1 if kind == "batched" else 2)
        for loaded, expected in ((found["residuals"], residuals), (found["q"], q)):
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def residual_in(file: dict[str, Any], name: str, rank: int) -> torch.Tensor | None:
    """This rank's, or the mean; None where there is none (in the shared part: where it is elsewhere)."""
    residual = file["parameters"][name]["residual"]
    if isinstance(residual, list):
        return residual[file["residual_ranks"].index(rank)] if residual else None
    return residual


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", LOADED)
def test_training_goes_on_as_it_did_then(resumed: Any, kind: str, version: int) -> None:
    expected = torch.load(golden_runs.FOLDER / f"v{version}" / "expected.pt", weights_only=True)
    first, second = (resumed[version][rank][kind]["gradients"] for rank in range(2))
    for step, then in enumerate(expected[kind]):
        assert all_finite(then.values()) and first[step].keys() == then.keys()
        for name in then:
            assert torch.equal(first[step][name], second[step][name])
            # Not to the bit: processors differ in the order of sums.
            assert relative_error(first[step][name], then[name]) < (1e-3 if kind == "simple" else 1e-5), name


def test_the_expected_gradients_tell_the_ways_of_saving_apart() -> None:
    expected = torch.load(golden_runs.FOLDER / "v1" / "expected.pt", weights_only=True)
    base = expected["per_rank"][0]["wide"]
    for kind in ("mean", "gathered", "part"):
        assert relative_error(expected[kind][0]["wide"], base) < 1e-5
    for kind in ("drop", "inexact", "batched", "simple", "users"):
        assert relative_error(expected[kind][0]["wide"], base) > 1e-2
    assert relative_error(expected["drop"][0]["wide"], expected["inexact"][0]["wide"]) < 1e-5


# ----------------------------------------------------------------------------------- what is saved today has its form


@pytest.fixture(scope="module")
def saved_today(worker_pool: Any) -> list[dict[str, Any]]:
    return worker_pool.run(golden_runs.save_all)


def form(value: Any) -> Any:
    """Keys, types, shapes and dtypes, in their order, without the numbers."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.device}"
    if isinstance(value, dict):
        return {key: form(each) for key, each in value.items()}
    if isinstance(value, list):
        return [form(each) for each in value]
    return type(value).__name__


@pytest.mark.parametrize(("kind", "rank"), FILES)
def test_the_form_is_that_of_the_files(saved_today: Any, kind: str, rank: int) -> None:
    today, then = dict(saved_today[rank][kind]), stored(kind, rank, VERSION)
    if "hook" in today:  # payloads have got this key, which older programs leave alone
        counters = today.pop("counters")
        assert counters.keys() == set(CONTINUED) and all(type(count) is int for count in counters.values())
    # A hook may get another option, which older programs leave alone.
    options = {key: today.get("options", {}).get(key) for key in then.get("options", {})}
    assert form(today | ({"options": options} if "options" in today else {})) == form(then)
    assert list(today) == list(then)
    for key in set(then) - {"options", "parameters", "batched_q", "hook_state", "residuals", "fingerprint"}:
        assert today[key] == then[key], key
    assert options == then.get("options", {})
    for name, entry in then.get("parameters", {}).items():
        assert {key: today["parameters"][name][key] for key in ("shape", "row_dim")} == {
            key: entry[key] for key in ("shape", "row_dim")
        }


# ---------------------------------------------------------------------------------------------------- newer versions


def _refused(saved: dict[str, Any], hook: str, strict: bool) -> tuple[str, int]:
    _, attached = golden_runs.new(hook, start=1)
    with pytest.raises(commhooks.PayloadError) as error:
        attached.load_state_dict(saved, strict=strict)
    return str(error.value), attached.stats()["step"]


NEWER = (
    f"the saved hook state has version {VERSION + 1}: it was saved by a newer commhooks, this one reads up to version "
    f"{VERSION}. Load it with the version of commhooks that wrote it, or a newer one"
)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("kind", "hook"), [("mean", "powerSGD"), ("simple", "fp16_compress"), ("mean", "allreduce")])
def test_a_newer_version_is_refused_by_name(run_ranks: Any, kind: str, hook: str, strict: bool) -> None:
    """Whatever else it may hold: a newer version may have other keys, and strict=False does not help."""
    saved = stored(kind, 0, VERSION)
    newer = {key: saved[key] for key in ("format", "hook")} | {"version": VERSION + 1, "something": "new"}
    assert run_ranks(_refused, newer, hook, strict) == [(NEWER, 0)] * 2


def test_a_newer_shared_part_is_refused_by_name() -> None:
    with pytest.raises(commhooks.PayloadError) as error:
        payload_parts.check_shared(stored("shared", 0, VERSION) | {"version": VERSION + 1})
    assert str(error.value) == NEWER
