"""`commhooks plan --shards` predicts, in one process, the plan of a model that is sharded."""

import json
from typing import Any

import pytest

import commhooks
from commhooks.tools.cli import SHARDS, main
from tests.sharded.shards_models import sharded
from tests.support.features import custom_collectives

MODEL = "tests.sharded.shards_models:Net"
PLAN = ["plan", MODEL, "--shards", "int8"]


def _attached(ranks_per_node: int | None) -> dict[str, Any]:
    shards = commhooks.Shards(
        block_size=32, ranks_per_node=ranks_per_node, exclude=["blocks.1.up.*"]
    )
    return commhooks.attach(sharded(), None, shards=shards).plan().as_dict()


@custom_collectives
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(3, None), (4, 2)])
def test_the_command_prints_the_plan_of_the_attached_hook(
    run_ranks: Any, capsys: Any, ranks: int, ranks_per_node: int | None
) -> None:
    """Also with uneven shards. Memory is that of an accelerator, and so differs."""
    nodes = [] if ranks_per_node is None else ["--ranks-per-node", str(ranks_per_node)]
    options = ["--options", "block_size=32", "--exclude", "blocks.1.up.*"]
    assert main([*PLAN, "--ranks", str(ranks), *nodes, *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = run_ranks(_attached, ranks_per_node, world_size=ranks)[0]
    assert printed.pop("memory_bytes")["total"] > 0 and expected.pop("memory_bytes")
    assert printed == expected


def test_the_command_says_how_often_weights_are_gathered(capsys: Any) -> None:
    assert main([*PLAN, "--ranks", "4", "--ranks-per-node", "4"]) == 0
    *_, summary = capsys.readouterr().out.splitlines()
    assert summary.startswith("shards (int8; blocks of 128): ")
    assert summary.endswith(" for 5 all-gathers and 3 reduce-scatters of 3 units")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--shards without --ranks"),
        (["--ranks", "4", "--hook", "int8"], "--hook with --shards, which plans"),
        (["--ranks", "4", "--wrapper", "bf16"], "--wrapper with --shards, which plans"),
        (["--ranks", "4", "--ranks-per-node", "3"], "4 ranks with 3 per node; expected a multiple"),
        (["--ranks", "0"], "0 ranks with 1 per node; expected a multiple, 1 or more"),
        (["--ranks", "4", "--options", "block=64"], "Shards has no option 'block'"),
        (["--ranks", "4", "--options", "block_size=5"], "Shards: block_size=5; expected"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], sentence: str, capsys: Any) -> None:
    assert main([*PLAN, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and sentence in err and err.count("\n") == 1


def test_ranks_are_for_shards(capsys: Any) -> None:
    assert main(["plan", MODEL, "--ranks", "4"]) == 1
    assert "--ranks without --shards" in capsys.readouterr().err


def test_the_command_offers_the_forms_of_shards() -> None:
    from commhooks.sharded.options import FORMS

    assert SHARDS == FORMS
