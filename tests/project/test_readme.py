"""Tests hold what README promises: each row, each refusal, and each number is compared here."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.repository import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")

# By words of the claim, so that its sentence can change. What a claim says about every hook or
# front end has a test of one of them here; the others are its neighbours.
SURVIVES = {
    "a rank is killed": (
        "tests/stress/test_stragglers.py::test_a_killed_rank_is_named",
        "tests/stress/test_chaos.py::test_one_rank_is_killed_in_mid_backward",
    ),
    "machine is gone": (
        "tests/members/test_machines.py::test_machines_come_and_go",
        "tests/project/test_elastic_example.py::test_two_launchers_become_one",
    ),
    "inf or NaN": (
        (
            "tests/compressors/test_every_compressor.py::"
            "test_a_step_that_is_not_finite_changes_nothing_and_a_resume_is_bit_equal"
        ),
        "tests/hook/test_nonfinite.py::test_a_grad_scaler_that_skips_needs_no_warning",
        (
            "tests/with_lightning/test_lightning_training.py::"
            "test_a_nan_on_one_rank_is_named_and_a_callback_skips_the_step"
        ),
    ),
    "full disk": (
        "tests/checkpoint/test_files.py::test_a_full_disk_leaves_the_previous_checkpoint_whole",
        "tests/checkpoint/test_files.py::test_the_error_of_a_failed_write_names_the_file",
        "tests/stress/test_chaos.py::test_the_newest_checkpoint_is_cut_off",
    ),
    "another number of ranks": (
        "tests/checkpoint/test_resume.py::test_a_run_resumes_from_any_number_of_ranks",
        "tests/checkpoint/test_change.py::test_a_change_that_does_not_concern_the_state_is_loaded",
    ),
}
FIRST_SENTENCES = {
    "times less": ("tests/project/test_readme.py::test_how_much_less_is_sent",),
    "one line": ("tests/project/test_docs.py::test_each_snippet_runs",),
    "resumes? bit for bit": (
        "tests/checkpoint/test_resume.py::test_a_resumed_run_is_bit_equal",
        (
            "tests/with_accelerate/test_accelerate_data_order.py::"
            "test_a_resumed_run_is_bit_equal_with_a_seedable_sampler_and_set_epoch"
        ),
    ),
    "a different number of machines": SURVIVES["another number of ranks"],
    "when a machine dies": SURVIVES["machine is gone"],
}
REFUSED = {
    "mixed_precision": ("tests/engine/test_ddp_options.py::test_mixed_precision_is_refused",),
    "ddp_comm_hook": (
        "tests/with_lightning/test_lightning_config.py::test_wrong_arguments_are_refused_at_construction",
    ),
    "optimizers in backward": (
        "tests/engine/test_ddp_options.py::test_an_optimizer_in_backward_is_refused",
    ),
    "CUDA graphs": (
        "tests/gradients/test_cuda_graphs.py::test_a_captured_backward_pass_is_refused",
    ),
    "torchcomms": (
        "tests/comm/test_groups.py::test_torchcomms_without_futures_is_refused_in_one_sentence",
    ),
}
TESTS = sorted(set().union(*SURVIVES.values(), *FIRST_SENTENCES.values(), *REFUSED.values()))


def _cells(line: str) -> list[str]:
    return [cell.strip(" *") for cell in line.strip("|").split("|")]


def _rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [_cells(line) for line in lines[2:]]


def _claims_in(text: str, claims: dict[str, tuple[str, ...]]) -> list[str]:
    return [claim for claim in claims if re.search(claim, text)]


def test_every_row_of_what_a_run_survives_has_a_test() -> None:
    rows = _rows("What a run survives")
    assert len(rows) >= len(SURVIVES)
    assert [row[0] for row in rows if not _claims_in(row[0], SURVIVES)] == []
    assert {claim for row in rows for claim in _claims_in(row[0], SURVIVES)} == SURVIVES.keys()


def test_every_promise_of_the_first_sentences_has_a_test() -> None:
    first = README.partition("[start:page] -->\n")[2].partition("\n\n")[0].replace("\n", " ")
    promises = re.split(r",\s|\.\s|\sand\s|: ", first)
    assert _claims_in(first, FIRST_SENTENCES) == list(FIRST_SENTENCES)
    assert len(promises) < 3 * len(FIRST_SENTENCES), "a new promise: give it a test"


def test_every_refusal_has_a_test() -> None:
    (refused,) = re.findall(
        r"^- Refused with an error: (.+?)\. Not supported", README, re.MULTILINE | re.DOTALL
    )
    named = re.split(r",\s", refused)
    assert [what for what in named if not _claims_in(what, REFUSED)] == []


@pytest.mark.parametrize("test", TESTS)
def test_a_test_that_is_named_here_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse(Path(REPOSITORY, file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# ---- numbers -------------------------------------------------------------------------------------

PERFORMANCE = (REPOSITORY / "docs/performance.md").read_text(encoding="utf-8")
SAME = {
    "plain DDP": "plain DDP",
    "`auto`": "`auto`",
    "`int4_compress`": "int4",
    "`powerSGD`, rank 4": "PowerSGD, rank 4",
    "`diloco`": "`diloco`, every 10 steps ‡",
}
"""The first columns of the two tables, README's without what follows the name."""
SOONER = {"100 Mbit/s": (1, 5), "1 Gbit/s": (6, 7), "unlimited": (8, 9)}
"""The columns of docs/performance.md with the seconds, behind which the choice of `auto` stands,
and how many times sooner the loss was reached.
"""


def _measured() -> dict[str, list[str]]:
    table = PERFORMANCE.partition("\n## Time to loss\n")[2].partition("\n## ")[0]
    rows = [_cells(line) for line in table.splitlines() if line[:1] == "|"]
    return {row[0]: row for row in rows}


@pytest.mark.parametrize("row", _rows("Time to the same loss"), ids=lambda row: row[0])
def test_times_to_the_same_loss_are_those_of_performance(row: list[str]) -> None:
    hook, slowest, *times, loss = row
    (name,) = [name for name in SAME if hook.startswith(name)]
    measured = _measured()[SAME[name]]
    assert loss == measured[3]
    for printed, (seconds, sooner) in zip(times, SOONER.values(), strict=True):
        number = printed.strip("*").partition(" ")[0]
        exact = measured[sooner]
        if exact == "no":
            assert number == "never"
        else:
            digits = len(number.partition(".")[2])
            assert float(number) == round(float(exact), digits), (hook, printed, exact)
        chosen = re.findall(r"\(.+\)", printed)
        assert chosen == re.findall(r"\(.+\)", measured[seconds])
    if slowest.strip("*") not in ("", "1"):
        words = " ".join(PERFORMANCE.split())
        assert re.search(rf"{slowest.strip('*')} times", words), "not said of 10 Mbit/s"


def test_how_much_less_is_sent() -> None:
    """By int8, and by DiLoCo every ten steps, in the trainings of the table."""
    least, most = re.findall(r"sends (\d+) to (\d+) times less", README)[0]
    sent = {
        hook: float(row[2].replace(",", ""))
        for hook, row in _measured().items()
        if row[2][:1].isdigit()
    }
    assert round(sent["plain DDP"] / sent["int8"]) == int(least)
    assert round(sent["plain DDP"] / sent[SAME["`diloco`"]]) == int(most)


def test_the_prediction_is_the_one_that_slow_networks_shows() -> None:
    """67 s with plain DDP, 11.9 s with int8 between the machines and 2.5 s with DiLoCo."""
    shown = (REPOSITORY / "docs/slow_networks.md").read_text(encoding="utf-8")
    sentence = README.partition("67 s with plain DDP")
    assert sentence[1] and re.search(r"plain DDP +66\.5\n", shown)
    assert "11.9 s with int8" in sentence[2] and re.search(r"int8 +11\.9 \*\n", shown)
    assert "2.5 s with DiLoCo" in sentence[2] and re.search(
        r"diloco, every 5 steps +2\.47\n", shown
    )
