"""Predictions: by hand, anchored on what was measured, and with measurements that make no sense."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from commhooks.comm.cost import Cost, collective_cost
from commhooks.comm.link import Link
from commhooks.compressors.auto.loads import load_of
from commhooks.compressors.auto.prediction import Load, Network, predicted_s

LINK = Link(mbit_per_s=80.0, latency_ms=2.0)  # 1e7 bytes/s; two ranks: two messages of 1 ms
PLAIN = Load(((("sum", 1e6),), (("sum", 1e6),)), 0.0)
HALF = Load(((("sum", 5e5),), (("sum", 5e5),)), 0.0)
TWO = Load(((("all_to_all", 1e5), ("gather", 1e5)), (("all_to_all", 1e5), ("gather", 1e5))), 0.03)


def predict(loads: dict[str, Load], measured: float = 1.0, link: Link = LINK, **more: Any) -> dict[str, float]:
    network = Network(link, **{"ranks": 2, **more})
    return predicted_s(loads, "plain", measured, (0.1, 0.1), network, (100, 100))


def test_the_candidate_in_force_takes_what_was_measured() -> None:
    assert predict({"plain": PLAIN, "half": HALF})["plain"] == 1.0


def test_a_candidate_differs_by_the_difference_of_the_pipelines() -> None:
    # plain: ready at 0.1; 1e6 bytes at 1e7 bytes/s and two messages: 0.102 twice, one after the other: 0.304.
    # half: 0.052 each; the first is hidden behind the second bucket's 0.1: 0.252.
    found = predict({"plain": PLAIN, "half": HALF})
    assert found["half"] == pytest.approx(1.0 + 0.252 - 0.304)


def test_codec_and_rounds_count() -> None:
    # 0.005 before each of three parts per bucket. Bucket 0: ready 0.1, sent 0.105, arrives 0.105 + 0.011.
    # Bucket 1: ready 0.205, sent 0.21, arrives 0.221; gather 0 sent 0.215 -> network free 0.221 -> 0.232;
    # gather 1: host waits to 0.221, 0.226 -> 0.232 -> 0.243; ends 0.243 + ... both last parts.
    found = predict({"plain": PLAIN, "two": TWO}, measured=0.304)
    assert found["two"] == pytest.approx(0.248, abs=0.006)


def test_a_model_that_is_longer_than_what_was_measured_counts_in_proportion() -> None:
    """As after a burst of somebody else in the moment in which the link was measured."""
    found = predict({"plain": PLAIN, "half": HALF, "twice": Load(PLAIN.sent, 0.2)}, measured=0.01)
    assert found["plain"] == 0.01 and found["half"] == pytest.approx(0.01 * 0.252 / 0.304)
    assert found["twice"] > 0.01


@pytest.mark.parametrize(
    "link", [Link(math.nan, 1.0), Link(0.0, 1.0), Link(-5.0, 1.0), Link(10.0, math.nan), Link(10.0, -1.0)]
)
def test_a_link_that_makes_no_sense_predicts_nothing(link: Link) -> None:
    assert all(math.isnan(each) for each in predict({"plain": PLAIN, "half": HALF}, link=link).values())


def test_a_codec_that_was_not_measured_is_not_predicted() -> None:
    found = predict({"plain": PLAIN, "unknown": Load(HALF.sent, math.nan)})
    assert found["plain"] == 1.0 and math.isnan(found["unknown"])


def test_one_rank_sends_nothing() -> None:
    assert predict({"plain": PLAIN, "half": HALF}, link=Link(0.0, 0.1), ranks=1) == {"plain": 1.0, "half": 1.0}


def test_ranks_of_one_machine_share_its_network() -> None:
    """A ring crosses the network of a machine once, an all-to-all as often as it has ranks."""
    bytes_only = Link(80.0, 0.0)
    alone = predict({"plain": PLAIN, "two": TWO}, link=bytes_only, ranks=16)
    shared = predict({"plain": PLAIN, "two": TWO}, link=bytes_only, ranks=16, together=8)
    ring, pairs = 2 * 15 / 16 * 1e5 / 1e7, 2 * 8 * 8 / 16 * 1e5 / 1e7
    assert shared["plain"] == alone["plain"] == 1.0
    # The first bucket's all-to-all is hidden behind the second bucket's computing. The gathers are rings with NCCL.
    assert shared["two"] - alone["two"] == pytest.approx(pairs - ring)
    on_gloo = predict({"plain": PLAIN, "two": TWO}, link=bytes_only, ranks=16, together=8, backend="gloo")
    assert on_gloo["two"] - alone["two"] == pytest.approx(3 * (pairs - ring))


@pytest.mark.parametrize(
    ("op", "ranks", "together", "expected"),
    [
        ("sum", 2, 1, Cost(100, 2)),
        ("sum", 4, 1, Cost(150, 4)),
        ("sum", 1024, 1, Cost(2 * 1023 / 1024 * 100, 20)),
        ("gather", 4, 1, Cost(150, 3)),
        ("all_to_all", 4, 1, Cost(150, 3)),
        ("all_to_all", 4, 2, Cost(200, 2)),
        ("sum", 1, 1, Cost(0, 0)),
    ],
)
def test_what_a_collective_costs(op: str, ranks: int, together: int, expected: Cost) -> None:
    found = collective_cost(op, 100, ranks, together)  # type: ignore[arg-type]
    assert (found.sent, found.messages) == pytest.approx((expected.sent, expected.messages))


def test_what_differs_on_gloo() -> None:
    assert collective_cost("sum", 100, 1024, backend="gloo") == Cost(2 * 1023 / 1024 * 100, 2 * 1023)
    assert collective_cost("gather", 100, 4, 2, backend="gloo") == collective_cost("all_to_all", 100, 4, 2)


def test_sparse_gradients_count_as_nothing() -> None:
    """A plan has all rows of an embedding; a step sends few of them."""
    plan = SimpleNamespace(compressed=True, flags=0, sent_bytes=lambda dtype: 1000.0, wire_itemsize=lambda dtype: 4)
    seen = SimpleNamespace(
        layouts=[SimpleNamespace(sparse=True), SimpleNamespace(sparse=False)], plans=lambda compressor: [[plan]] * 2
    )
    compressor = SimpleNamespace(collectives=("all_to_all", "gather"), wire_dtype=None)
    load = load_of(compressor, seen, 0.5)  # type: ignore[arg-type]
    assert load.counted_bytes == 1000 and load.sent[0] == (("sum", 0.0),)
