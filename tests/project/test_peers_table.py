"""`benchmarks/peers.py`: what a run costs is put together from losses and from timed steps."""

import importlib.util
import sys

import pytest

from tests.support.repository import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
# by its path, because tests/peers has a module of this name
_spec = importlib.util.spec_from_file_location(
    "peers_benchmark", REPOSITORY / "benchmarks/peers.py"
)
assert _spec is not None and _spec.loader is not None
peers = importlib.util.module_from_spec(_spec)
sys.modules["peers_benchmark"] = peers
_spec.loader.exec_module(peers)

STEPS = 400


def _row(*points: tuple[float, float, float, float]) -> peers.Row:
    return {"curve": [list(point) for point in points], "chosen": ""}


def _learned(method: str, losses: list[float], faster: float = 1.0) -> peers.Done:
    points = [(STEPS * (i + 1) // len(losses), 0.0, 0.0, loss) for i, loss in enumerate(losses)]
    return {peers.Job(method, 2, "unlimited", faster, STEPS): _row(*points)}


def _timed(method: str, *seconds: float, megabytes: float = 1.0) -> peers.Done:
    """Steps 10 to 20 of each run: they take `seconds` each, and send `megabytes`."""
    return {
        peers.Job(method, 2, "1gbit", 1.0, STEPS, turn + 1): _row(
            (10, 7.0, 3.0, 0.0), (20, 7.0 + 10 * s, 3.0 + 10 * megabytes, 0.0)
        )
        for turn, s in enumerate(seconds)
    }


DDP = _learned(peers.BASE, [4.0, 2.0]) | _timed(peers.BASE, 0.9, 1.0, 5.0)
POST_LOCAL = "torch post-local SGD"  # 100 steps of all-reduce come first
AT_1_GBIT = {
    name: peers.Job(name, 2, "1gbit", 1.0, STEPS) for name in (peers.BASE, POST_LOCAL, "torch fp16")
}


def test_the_steps_before_a_method_begins_cost_what_plain_ddp_costs() -> None:
    done = DDP | _learned(POST_LOCAL, [3.0, 2.0]) | _timed(POST_LOCAL, 0.1, megabytes=0.25)
    curve = peers.predicted(AT_1_GBIT[POST_LOCAL], done)
    assert curve is not None
    assert curve[0] == pytest.approx([200, 100 * 1.0 + 100 * 0.1, 100 + 25, 3.0])
    assert curve[1] == pytest.approx([400, 100 * 1.0 + 300 * 0.1, 100 + 75, 2.0])


def test_the_steps_before_a_method_settles_cost_what_they_did() -> None:
    auto = peers.Job("commhooks auto", 2, "1gbit", 1.0, STEPS)  # settles after 50
    done = DDP | _learned("commhooks auto", [2.0])
    done[auto._replace(turn=1)] = _row((50, 60.0, 30.0, 0.0), (60, 61.0, 31.0, 0.0))
    curve = peers.predicted(auto, done)
    assert curve is not None
    assert curve[0] == pytest.approx([400, 60 + 350 * 0.1, 30 + 350 * 0.1, 2.0])


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([4.0, 2.0], 2.0),  # the same losses in half the time
        ([2.0, 1.9], 3.99),  # there after half of the steps, too
        ([4.0, 2.5], 0.0),  # not within these steps
    ],
)
def test_sooner_compares_the_seconds_until_plain_ddps_last_loss(
    losses: list[float], expected: float
) -> None:
    done = DDP | _learned("torch fp16", losses) | _timed("torch fp16", 0.5)
    times = peers.sooner(AT_1_GBIT["torch fp16"], AT_1_GBIT[peers.BASE], done)
    assert times == pytest.approx(expected, rel=1e-3)
    assert peers.sooner(AT_1_GBIT[POST_LOCAL], AT_1_GBIT[peers.BASE], done) is None


def test_the_best_learning_rate_is_compared_with_plain_ddps_best() -> None:
    args = peers.arguments().parse_args("--rates 1gbit --factors 1 2".split())
    done = DDP | _learned(peers.BASE, [4.0, 1.0], faster=2.0) | _timed("torch fp16", 0.5)
    done |= {peers.Job("torch fp16", 2, "unlimited", 1.0, STEPS): {"error": "a rank died"}}
    row = peers.row_of("torch fp16", 2, args, done)
    assert "best_1gbit" not in row and "best" not in row  # not all of them have run
    row = peers.row_of("torch fp16", 2, args, done | _learned("torch fp16", [3.0, 1.0], faster=2.0))
    assert row["error"] == "a rank died" and row["sooner_1gbit"] is None
    assert row["best"] == "1.000 (x2)"
    assert row["best_1gbit"] == pytest.approx(2.0, rel=1e-2)


def test_a_method_that_fails_runs_once() -> None:
    args = peers.arguments().parse_args([])
    jobs = {part: peers.jobs_of(part, args) for part in peers.PARTS}
    counts = {
        name: [sum(job.method == name for job in jobs[part]) for part in peers.PARTS]
        for name in peers.METHODS
    }
    assert counts[peers.BASE] == [10, 18, 0]
    assert counts["torch bf16"] == [1, 0, 0]
    assert counts["commhooks auto"] == [10, 18, 1]
    assert len(set(jobs["time"])) == len(jobs["time"])


def test_the_page_prints_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = REPOSITORY / "docs/figures/peers.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["peers.py", "--parts", "--markdown", "--results", str(stored)]
    )
    peers.main()
    printed = capsys.readouterr().out.partition("ms of a step")[0].splitlines()
    rows = [line for line in printed if line.startswith("|")]
    page = (REPOSITORY / "docs/compared.md").read_text(encoding="utf-8").splitlines()
    assert rows[2:] and [row for row in rows if row not in page] == []


def _cells(page: str, heading: str) -> list[list[str]]:
    section = (REPOSITORY / page).read_text("utf-8").partition(f"\n## {heading}\n")[2]
    lines = section.partition("\n## ")[0].splitlines()
    return [line.strip("|").split("|") for line in lines if line.startswith("|")][2:]


def test_readme_prints_rows_of_the_page() -> None:
    page = {cells[1]: cells for cells in _cells("docs/compared.md", "Measured side by side")[::-1]}
    rows = _cells("README.md", "Beside other projects")
    assert rows and [row for row in rows if row[1:] != page[row[0]][-3:]] == []
