"""The command `commhooks plan`: its flags, and its two forms of output."""

import json
from typing import Any

import pytest

import commhooks
from commhooks.tools.cli import main
from tests.support.ddp_steps import mlp, process_group_of_one, wrap

MODEL = "tests.support.plan_models:build_mlp"


def run_json(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main(["plan", MODEL, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_and_what_it_adds_up_to(capsys: Any) -> None:
    found = run_json(
        capsys, "--options", "matrix_approximation_rank=2", "start_powerSGD_iter=0.1", "--total-steps", "50",
        "--exclude", "4.*", "--wrapper", "bf16",
    )  # fmt: skip
    assert (found["hook"], found["start_step"], found["wire_dtype"]) == ("powerSGD", 5, "bfloat16")
    rows = {row["name"]: row for row in found["parameters"]}
    assert rows["0.weight"]["matrix"] == [32, 24] and rows["0.weight"]["rank"] == 2
    assert rows["0.weight"]["bytes_after"] == 2 * (32 + 24) * 2 and rows["0.weight"]["bytes_before"] == 4 * 32 * 24
    assert rows["4.weight"]["reason"] == "excluded by '4.*'" and rows["4.weight"]["matrix"] is None
    for total in ("bytes_before", "bytes_after"):
        assert sum(row[total] for row in rows.values()) == found[total]
    memory = found["memory_bytes"]
    assert memory["total"] == sum(value for key, value in memory.items() if key != "total")


@pytest.mark.parametrize(
    "hook", ["powerSGD", "batched_powerSGD", "int8", "fp16", "allreduce", "noop", "diloco", "auto"]
)
def test_it_prints_the_plan_of_the_attached_hook(hook: str, capsys: Any) -> None:
    """But for the memory, which depends on the kernel that the ranks choose."""

    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("Memory")]

    with process_group_of_one():
        expected = lines(str(commhooks.attach(wrap(mlp()), hook).plan()))
    for model in (MODEL, "tests.support.plan_models:build_for_the_doctor"):
        assert main(["plan", model, "--hook", hook]) == 0
        assert lines(capsys.readouterr().out) == expected


def test_a_pattern_without_a_match_is_told(capsys: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["plan", MODEL, "--exclude", "0.wieght"]) == 0
    assert "matches '0.wieght' (the closest name is '0.weight')" in caplog.text


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
        (["--hook", "itn8"], "did you mean 'int8'?"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], text: str, capsys: Any) -> None:
    assert main(["plan", MODEL, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("commhooks plan: ") and text in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "model, text",
    [
        ("tests.support.plan_models:no_model", "returned a int, not an nn.Module"),
        ("torch.nn:Identity", "has no parameter that requires a gradient"),
    ],
)
def test_what_is_no_model_is_one_line(model: str, text: str, capsys: Any) -> None:
    assert main(["plan", model]) == 1
    assert text in capsys.readouterr().err
