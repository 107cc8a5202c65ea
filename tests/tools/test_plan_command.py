"""The command `commhooks plan`: its flags, its two forms of output, and the time of the codec."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import commhooks
from commhooks.compressors.powersgd import native_products
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.tools import codec_time
from commhooks.tools.cli import main
from tests.support.compilers import needs_compiler
from tests.support.kernels import computing_with


def run_json(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "tests.support.plan_models:build_mlp", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_and_what_it_adds_up_to(capsys: Any) -> None:
    found = run_json(
        capsys, "--options", "matrix_approximation_rank=2", "start_powerSGD_iter=0.1", "--total-steps", "50",
        "--exclude", "4.*", "--wrapper", "bf16", "--world-size", "4", "--codec-ms", "2", "--bucket-cap-mb", "0.003",
    )  # fmt: skip
    assert (found["hook"], found["start_step"], found["wire_dtype"]) == ("powerSGD", 5, "bfloat16")
    rows = {row["name"]: row for row in found["parameters"]}
    assert rows["0.weight"]["matrix"] == [32, 24] and rows["0.weight"]["rank"] == 2
    assert rows["0.weight"]["bytes_after"] == 2 * (32 + 24) * 2 and rows["0.weight"]["bytes_before"] == 4 * 32 * 24
    assert rows["4.weight"]["reason"] == "excluded by '4.*'" and rows["4.weight"]["matrix"] is None
    for total in ("bytes_before", "bytes_after"):
        assert sum(row[total] for row in rows.values()) == found[total] == sum(b[total] for b in found["buckets"])
    estimate, memory = found["estimate"], found["memory_bytes"]
    assert memory["total"] == sum(value for key, value in memory.items() if key != "total")
    # Each of four ranks sends 2 * 3 / 4 times what it hands to a ring all-reduce.
    assert estimate["wire_bytes_before"] == 1.5 * found["bytes_before"]
    saved = 1.5 * (found["bytes_before"] - found["bytes_after"] - found["flag_bytes"])
    assert estimate["break_even_gbit_s"] == pytest.approx(8 * saved / 0.002 / 1e9)
    speed = estimate["at_gbit_s"]["1.0"]
    assert speed["without_s"] == pytest.approx(12 * found["bytes_before"] / 1e9)
    assert 0 < speed["with_s"] - 0.002 < speed["without_s"]
    assert "ring all-reduce" in estimate["assumed"] and "doctor" in estimate["assumed"]
    assert estimate["codec_kernel"] is None  # not measured
    assert found["note"] == "" and found["buckets_from"].startswith("estimated")


def test_round_trips(capsys: Any) -> None:
    def times(*more: str) -> tuple[dict[str, Any], int, dict[str, float]]:
        options = ["--options", "start_powerSGD_iter=0", "--bucket-cap-mb", "0.003", "--codec-ms", "2"]
        found = run_json(capsys, *options, *more)
        return found, len(found["buckets"]), found["estimate"]["at_gbit_s"]["100.0"]

    found, buckets, far = times("--rtt-ms", "50")
    assert buckets > 1 and found["estimate"]["break_even_gbit_s"] > 0
    assert far["without_s"] == pytest.approx(0.05 * buckets, rel=1e-2)
    assert far["with_s"] == pytest.approx(0.002 + 0.05 * 2 * buckets, rel=1e-2)  # P and Q of every bucket
    _, _, three = times("--rtt-ms", "50", "--world-size", "3")
    assert three["with_s"] == pytest.approx(0.002 + 0.1 * 2 * buckets, rel=1e-2)  # there and back twice in a ring
    assert main(["plan", "tests.support.plan_models:build_mlp", "--rtt-ms", "50", "--codec-ms", "2"]) == 0
    assert "a round trip of 50 ms, nothing overlaps" in " ".join(capsys.readouterr().out.split())


def test_the_codec_is_timed(capsys: Any) -> None:
    with computing_with("torch"):
        found = run_json(capsys)["estimate"]
    assert found["codec_s"] > 0 and found["codec_measured_on"] == "cpu" and found["codec_sample_share"] == 1
    assert found["codec_kernel"] == "torch"


@pytest.mark.parametrize("ranks", ['{"*": 2}', '{"2.*": 2}', "2"])
def test_the_codec_is_timed_with_ranks_by_globs(ranks: str, capsys: Any, monkeypatch: Any) -> None:
    """And with a last bucket of which too few rows are left to compress them."""
    monkeypatch.setattr(codec_time, "BUCKET_NUMEL", 2)
    monkeypatch.setattr(codec_time, "SAMPLE_NUMEL", 32 * 24 + 9)
    assert run_json(capsys, "--options", f"matrix_approximation_rank={ranks}")["estimate"]["codec_s"] > 0


@needs_compiler
def test_the_codec_is_timed_with_the_kernel_that_a_training_would_use(capsys: Any) -> None:
    assert run_json(capsys)["estimate"]["codec_kernel"] == "native"
    assert main(["plan", "tests.support.plan_models:build_mlp"]) == 0
    assert "native kernel)" in " ".join(capsys.readouterr().out.split())


def test_a_plan_says_what_would_make_the_codec_faster(capsys: Any, tmp_path: Path) -> None:
    native_products.load.cache_clear()
    with mock.patch.dict(os.environ, {"CC": "/bin/false", "XDG_CACHE_HOME": str(tmp_path)}):
        found = run_json(capsys)
    native_products.load.cache_clear()
    assert found["estimate"]["codec_kernel"] == "torch"
    assert found["note"].startswith("Computed with torch: the native kernel cannot be compiled: /bin/false ")


@pytest.mark.parametrize(
    "rows, share", [((512, 64), 1), ((2048, 1024, 64, 64), 1088 / 3200), ((8192,), 1 / 4)], ids=str
)
def test_of_large_models_a_sample_is_timed(rows: tuple[int, ...], share: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(codec_time, "SAMPLE_NUMEL", 2**20)
    options = commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0)
    compressor = PowerSGDCompressor(options)
    plans = compressor.plan([ParameterInfo(str(n), torch.empty(n, 512, device="meta")) for n in rows])
    timed = codec_time.measure_codec(compressor, plans, torch.device("cpu"))
    assert timed.share == pytest.approx(share) and 0 < timed.seconds < 10


@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD", "fp16", "allreduce", "noop"])
def test_text(hook: str, capsys: Any) -> None:
    assert main(["plan", "tests.support.plan_models:build_mlp", "--hook", hook, "--codec-ms", "0.01"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "On the wire each of 2 ranks sends 10.592 kB per step without and" in text
    assert ("Memory per rank: " in text) == (hook not in ("allreduce", "noop"))
    assert ("Gbit/s per rank (codec 0.01 ms)." in text) == (hook not in ("allreduce", "noop"))
    assert ("Break-even: none, the hook saves no bytes." in text) == (hook == "allreduce")
    assert ("Gbit/s without, ms with the hook, ms" in text) == (hook != "noop")
    assert ("Assumed: a ring all-reduce" in text) == (hook != "noop")
    assert hook == "batched_powerSGD" or "Buckets, estimated: how DDP cuts them after the first step" in text


def test_auto_says_that_a_training_decides(capsys: Any) -> None:
    assert run_json(capsys, "--hook", "auto")["estimate"] is None
    assert main(["plan", "tests.support.plan_models:build_mlp", "--hook", "auto"]) == 0
    text = capsys.readouterr().out
    assert "auto decides during the training" in text and "Break-even" not in text


def test_a_pattern_without_a_match_is_told(capsys: Any) -> None:
    assert main(["plan", "tests.support.plan_models:build_mlp", "--exclude", "0.wieght", "--codec-ms", "1"]) == 0
    assert "matches '0.wieght' (the closest name is '0.weight')" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--hook", "powerSDG"], "unknown hook 'powerSDG' (did you mean 'powerSGD'?)"),
        (["--options", "rank=4"], "no option 'rank' (did you mean 'matrix_approximation_rank'?)"),
        (["--options", "rank"], "--options rank: expected NAME=VALUE"),
        (["--options", "exclude=[*a*]"], "--options exclude=[*a*]: a value is not YAML; put text with special"),
        (["--options", "exclude=['a']", "--exclude", "b"], "give the patterns in one of them"),
        (["--hook", "batched_powerSGD", "--exclude", "b"], "whole buckets are compressed here; use PowerSGD"),
        (["--options", "start_powerSGD_iter=0.5"], "is a fraction of the run, whose length is unknown"),
        (["--hook", "tests.support.plan_models:no_model"], "only its own code knows what it sends"),
        (["--bucket-cap-mb", "0"], "--bucket-cap-mb 0.0: expected a number above 0"),
        (["--world-size", "1"], "--world-size 1: expected a number from 2"),
        (["--rtt-ms", "inf"], "--rtt-ms inf: expected a number from 0"),
        (["--codec-ms", "nan"], "--codec-ms nan: expected a number"),
        (["--rtt-ms", "-1"], "--rtt-ms -1.0: expected a number from 0"),
        (["--nodes", "1"], "--nodes 1: expected a number from 2"),
        (["--nodes", "2", "--ranks-per-node", "0"], "--ranks-per-node 0: expected a number from 1"),
        (["--nodes", "2", "--bandwidth", "0"], "--bandwidth 0.0: expected a number above 0"),
        (["--ranks-per-node", "4"], "--ranks-per-node is for the table of many nodes: add --nodes N"),
        (["--latency-us", "0"], "--latency-us is for the table of many nodes"),
        (["--nodes", "4", "--hook", "int8"], "--hook with --nodes, which compares all hooks"),
        (["--device", "cpu", "--codec-ms", "1"], "give one"),
        (["--hook", "itn8"], "did you mean 'int8'?"),
        (["--hook", "int8", "--step-ms", "2"], "--step-ms is for hooks with rounds, such as diloco"),
        (["--hook", "diloco", "--step-ms", "0"], "--step-ms 0.0: expected a number above 0"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], text: str, capsys: Any) -> None:
    assert main(["plan", "tests.support.plan_models:build_mlp", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("commhooks plan: ") and text in err and err.count("\n") == 1


def test_rounds(capsys: Any) -> None:
    rest = ["--hook", "local_sgd", "--codec-ms", "4", "--step-ms", "2", "--options"]
    flags = [*rest, "sync_every=4"]
    estimate = run_json(capsys, *flags)["estimate"]
    # What is needed does not depend on what is asked for.
    larger = run_json(capsys, *rest, "sync_every=40")["estimate"]["at_gbit_s"]
    assert [times["sync_every"] for times in larger.values()] == [
        times["sync_every"] for times in estimate["at_gbit_s"].values()
    ]
    # The outer step sends as much as the gradients of one step, and takes 4 times what is counted for each step.
    assert estimate["wire_bytes_after"] == pytest.approx(estimate["wire_bytes_before"] / 4, rel=0.01)
    for times in estimate["at_gbit_s"].values():
        outer = times["outer_step_s"]
        assert outer == pytest.approx(times["without_s"] + 4e-3, rel=0.01)
        every = times["sync_every"]
        assert outer / (outer + every * 2e-3) <= 0.05 and (every == 1 or outer / (outer + (every - 1) * 2e-3) > 0.05)
    assert main(["plan", "tests.support.plan_models:build_mlp", *flags]) == 0
    out = capsys.readouterr().out
    assert "sync_every for 5 % of the time" in out and "the average over a round of 4 steps" in out


@pytest.mark.parametrize("hook", ["diloco", "local_sgd"])
def test_outer_steps_are_timed(hook: str, capsys: Any) -> None:
    estimate = run_json(capsys, "--hook", hook)["estimate"]
    assert estimate["codec_s"] > 0 and estimate["codec_measured_on"]
