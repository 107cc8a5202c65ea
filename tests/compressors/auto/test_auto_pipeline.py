"""The pipeline on paper, by hand and against the engine's own order."""

from __future__ import annotations

import pytest

from commhooks.compressors.auto.pipeline import BucketTimes, step_s


def one(computing: float, codec: tuple[float, ...], wire: tuple[float, ...]) -> BucketTimes:
    return BucketTimes(computing, codec, wire)


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        ([], 0),
        ([one(3, (1, 2), (5,))], 3 + 1 + 5 + 2),
        # The first all-reduce travels while the second bucket is computed.
        ([one(1, (0, 0), (4,)), one(4, (0, 0), (2,))], 1 + 4 + 2),
        # The second waits for the network, which carries the first.
        ([one(1, (0, 0), (10,)), one(1, (0, 0), (2,))], 1 + 10 + 2),
        # P0 (4), then P1 (4) while the host waits for P0; Q0 (2) and Q1 (2) follow.
        ([one(1, (0, 0, 0), (4, 2)), one(1, (0, 0, 0), (4, 2))], 1 + 4 + 4 + 2 + 2),
        # The host waits for P0 before it can compute the third bucket's gradients.
        ([one(0, (0, 0, 0), (10, 0)), one(0, (0, 0), (0,)), one(5, (0, 0), (0,))], 10 + 5),
        # Nothing on the wire: everything adds up.
        ([one(1, (2, 3, 4), (0, 0)), one(5, (6, 7), (0,))], 1 + 2 + 3 + 4 + 5 + 6 + 7),
    ],
)
def test_by_hand(buckets: list[BucketTimes], expected: float) -> None:
    assert step_s(buckets) == pytest.approx(expected)


def test_codec_time_is_divided_equally() -> None:
    assert BucketTimes.even(1.0, 6.0, [1.0, 2.0]) == one(1.0, (2.0, 2.0, 2.0), (1.0, 2.0))
