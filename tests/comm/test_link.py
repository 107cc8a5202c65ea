"""Measuring the network between the ranks: the same numbers on all of them, whatever happens on one. That the link is
the same on three is in tests/tools/test_network.py."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commhooks.comm import link
from commhooks.comm.collective import Op
from commhooks.comm.link import Link, Network, measure_link

CPU = torch.device("cpu")
_ones = torch.ones


def test_bytes_and_messages_by_hand() -> None:
    """With several ranks per node see tests/tools/test_cluster.py."""
    assert Network(2, 1e9).seconds(100e6) == pytest.approx(0.8)
    assert Network(4, 1e9).seconds(100e6) == pytest.approx(1.2)
    # Up and down a tree of 8, for each of 3 buckets; a ring with gloo.
    assert Network(8, 1e9, latency_s=1.0).seconds(0, buckets=3) == 3 * 2 * 3
    assert Network(8, 1e9, latency_s=1.0, backend="gloo").seconds(0, buckets=3) == 3 * 2 * 7
    quantised: tuple[Op, ...] = ("all_to_all", "gather")
    assert Network(8, 1e9, latency_s=1.0).seconds(0, quantised) == 2 * 7


def _measured() -> Link:
    return measure_link(dist.group.WORLD, CPU)  # type: ignore[arg-type]


def _far_away() -> Link:
    """100 Mbit/s, and 50 ms for each message."""
    with mock.patch.object(link, "_all_reduce_s", lambda buffer, group: 0.05 + 8e-8 * buffer.nbytes):
        return _measured()


def test_a_long_latency_is_no_low_bandwidth(run_ranks: Any) -> None:
    for found in run_ranks(_far_away):
        assert found.latency_ms == pytest.approx(50, rel=0.01)
        assert found.mbit_per_s == pytest.approx(100, rel=0.01)


def _full_on_rank_1() -> tuple[Link, int]:
    """Where one rank has no memory for larger buffers, all go on with the size that they have."""
    sizes = []

    def ones(numel: int, **more: Any) -> torch.Tensor:
        if dist.get_rank() == 1 and 4 * numel > 2**17:
            raise torch.OutOfMemoryError
        sizes.append(numel)
        return _ones(numel, **more)

    with mock.patch.object(torch, "ones", ones), mock.patch.object(link, "_ENOUGH_S", float("inf")):
        return _measured(), max(sizes)


def test_a_rank_without_memory_for_more(run_ranks: Any) -> None:
    (first, most), (second, least) = run_ranks(_full_on_rank_1)
    assert first == second and first.mbit_per_s > 0
    assert 4 * least == 2**17 and most == 2 * least
