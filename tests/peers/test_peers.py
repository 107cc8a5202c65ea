"""`make test-peers` runs a case with and without a hook, and judges made-up outcomes rightly."""

import io
import sys
from collections import Counter
from pathlib import Path

import peers
import pytest
from peer_hooks import CONFIGS
from rich.console import Console

from tests.support import warm


def test_a_case_of_torch_runs_with_a_hook_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("expecttest")
    monkeypatch.setattr(sys, "executable", warm.python())
    case = "test_accumulate_gradients_no_sync_grad_is_view"
    for hook, passes in (("", 0), ("allreduce", 2)):  # one synchronised pass on each of two ranks
        outcomes, counted = peers.run([case], hook)
        assert (outcomes[case][0], counted) == ("passed", passes), outcomes


@pytest.mark.parametrize(
    ("case", "ours", "passes", "problems"),
    [
        ("test_x", "passed", 1, []),
        ("test_x", "passed", 0, ["fp16_compress: no hook ran"]),
        *(
            ("test_x", outcome, 1, [f"test_x with fp16_compress: {outcome}"])
            for outcome in ("failed", "skipped")
        ),
        ("test_sync", "failed", 1, []),  # explained
        ("test_sync", "timed out", 1, ["test_sync with fp16_compress: timed out"]),
    ],
)
def test_what_passes_only_without_us_is_wrong(
    case: str, ours: str, passes: int, problems: list[str]
) -> None:
    printed = io.StringIO()
    outcomes = {
        "": ({case: ("passed", "")}, 0),
        "fp16_compress": ({case: (ours, "the output")}, passes),
    }
    assert peers.compare(outcomes, Console(file=printed, width=200)) == problems
    assert ("the output" in printed.getvalue()) == any(ours in problem for problem in problems)


def test_explanations_are_of_cases_that_run_and_are_in_the_documentation() -> None:
    page = Path(peers.ROOT, "docs", "reliability.md").read_text()
    of_suites = {hook for suite in peers.SUITES.values() for hook in suite.hooks}
    for case, hook in peers.EXPLAINED:
        installed = case in peers.ACCELERATE + peers.TORCH and hook in CONFIGS
        assert installed or hook in of_suites
        assert f"`{case.partition('[')[0].rpartition('::')[2]}`" in page
    for hook, number in Counter(hook for _, hook in peers.EXPLAINED).items():
        assert f"`{hook}` ({number})" in page
    for suite in peers.SUITES.values():
        assert all(f"`{case}`" in page for case in suite.left_out)


@pytest.mark.parametrize(
    ("output", "late", "outcome"),
    [
        ("PASSED a_peer.py::test_x[1]\nPASSED a_peer.py::test_x[1]", False, "passed"),
        ("PASSED a_peer.py::test_x[1]\nFAILED a_peer.py::test_x[1] - assert", False, "failed"),
        ("PASSED a_peer.py::test_x[1]FAILED a_peer.py::test_x[1] - a", False, "failed"),
        ("ERROR a_peer.py::test_x[1]\nPASSED a_peer.py::test_x[1]", True, "failed"),
        ("SUBFAILED(a=1) a_peer.py::test_x[1] - a\nPASSED a_peer.py::test_x[1]", False, "failed"),
        ("PASSED a_peer.py::test_x[10]", True, "timed out"),
        ("SKIPPED [1] a_peer.py:7: no GPU", False, "skipped"),
        ("ImportError", False, "failed"),
    ],
)
def test_the_worst_outcome_of_a_case_on_any_rank_counts(
    output: str, late: bool, outcome: str
) -> None:
    assert peers.outcome_of("test_x[1]", output, late) == outcome


def test_a_suite_that_needs_a_checkout_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main(["torchft", "--source", str(tmp_path)]) == 2
    assert "torchft needs a checkout of meta-pytorch/torchft" in capsys.readouterr().out
    printed = io.StringIO()
    for name in peers.SUITES:
        assert peers._outcomes(name, [], [], Console(file=printed, width=200), wanted=False) == {}
        assert f"skipped: {name} needs a checkout" in printed.getvalue()
    for name, suite in peers.SUITES.items():
        assert (Path(peers.HERE) / f"{suite.module}.py").is_file(), name
    fixture = tmp_path / peers.SUITES["torchft"].files[0]
    fixture.parent.mkdir()
    fixture.touch()
    assert not peers.SUITES["torchft"].is_in(tmp_path)
