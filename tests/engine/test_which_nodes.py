"""`ranks_per_node`: which ranks are a node, who owns what in it, and what is refused."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commhooks import AttachError, HookConfigError
from commhooks.comm.nodes import find_nodes
from commhooks.engine.node_reduction import WINDOW_NUMEL, owners_of
from commhooks.request import HookRequest
from tests.support.ddp_steps import log_lines


def _nodes(ranks_per_node: Any, group_ranks: list[str] | None) -> Any:
    environment = {} if group_ranks is None else {"GROUP_RANK": group_ranks[dist.get_rank()]}
    with mock.patch.dict(os.environ, environment):
        assert dist.group.WORLD is not None
        try:
            nodes = find_nodes(ranks_per_node, dist.group.WORLD, torch.device("cpu"))
        except AttachError as error:
            return str(error)
    if nodes is None:
        return None
    return dist.get_process_group_ranks(nodes.intra_node), dist.get_process_group_ranks(
        nodes.inter_node
    )


@pytest.mark.parametrize(
    ("ranks_per_node", "group_ranks", "expected"),
    [
        (2, None, [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]),
        (
            "auto",
            ["0", "1", "0", "1"],
            [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])],
        ),
        (4, None, [None] * 4),
        (1, None, [None] * 4),
        ("auto", ["0"] * 4, [None] * 4),
        ("auto", ["0", "1", "2", "3"], [None] * 4),
    ],
)
def test_nodes_are_found_by_number_or_by_group_rank(
    run_ranks: Any, ranks_per_node: Any, group_ranks: Any, expected: Any
) -> None:
    assert run_ranks(_nodes, ranks_per_node, group_ranks, world_size=4) == expected


@pytest.mark.parametrize(
    ("ranks_per_node", "group_ranks"), [(3, None), ("auto", ["0", "0", "0", "1"])]
)
def test_nodes_of_different_sizes_are_refused(
    run_ranks: Any, ranks_per_node: Any, group_ranks: Any
) -> None:
    for text in run_ranks(_nodes, ranks_per_node, group_ranks, world_size=4):
        assert "the nodes have 3 and 1 ranks" in text and "ranks_per_node=None" in text


def _warnings(ranks_per_node: Any) -> list[str]:
    with log_lines() as lines:
        assert _nodes(ranks_per_node, None) is None
    return lines


def test_a_number_larger_than_that_of_the_ranks_is_a_warning(run_ranks: Any) -> None:
    on_0, on_1 = run_ranks(_warnings, 3)
    assert (
        len(on_0) == 1 and "ranks_per_node=3, but there are only 2 ranks" in on_0[0] and on_1 == []
    )
    assert run_ranks(_warnings, 2) == [[], []]
    assert run_ranks(_warnings, 8, world_size=1) == [[]]


def test_owners_share_the_work() -> None:
    owners = owners_of({"a": 100, "b": 60, "c": 50, "d": 30, "e": 1}, 2)
    assert owners == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}


def test_owners_share_every_bucket() -> None:
    """A rank without a share of some bucket would leave its network card idle."""
    layer = {
        "norm": 1,
        "attention": WINDOW_NUMEL // 4,
        "out": WINDOW_NUMEL // 4,
        "mlp": WINDOW_NUMEL // 3,
    }
    sizes = {f"{number}.{name}": numel for number in range(6) for name, numel in layer.items()}
    owners = owners_of(sizes, 2)
    for number in range(6):  # with DDP's default, each layer is a bucket
        load = [
            sum(sizes[n] for n in owners if n.startswith(f"{number}.") and owners[n] == rank)
            for rank in (0, 1)
        ]
        assert max(load) <= 0.61 * sum(load), load
    total = [sum(sizes[name] for name in owners if owners[name] == rank) for rank in (0, 1)]
    assert max(total) - min(total) <= max(sizes.values())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"hook": "powerSGD", "ranks_per_node": 0},
            "ranks_per_node=0; expected 'auto', a number of ranks",
        ),
        ({"hook": "powerSGD", "ranks_per_node": "all"}, "ranks_per_node='all'; expected 'auto'"),
        ({"hook": "noop", "ranks_per_node": 2}, "'noop', which sends nothing"),
        ({"hook": "batched_powerSGD", "ranks_per_node": 2}, "which compresses whole buckets"),
        (
            {"hook": lambda state, bucket: None, "ranks_per_node": 2},
            "a function: write a compressor",
        ),
    ],
)
def test_wrong_numbers_of_ranks_per_node_are_refused(arguments: dict[str, Any], text: str) -> None:
    hook = arguments.pop("hook")
    with pytest.raises(HookConfigError, match=text):
        HookRequest.parse(hook, **arguments)
