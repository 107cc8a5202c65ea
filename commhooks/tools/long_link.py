"""What to do where round trips, and not the bandwidth, are what a step costs."""

from typing import Any

from commhooks.comm.link import LONG_ROUND_TRIP_S
from commhooks.compressors.base import Compressor
from commhooks.engine.coalescing import Waiting


def buckets_in_turn(
    compressor: Compressor[Any], ranks: int, round_trip_s: float, counted_bytes: float, buckets: int
) -> int:
    """Of so many buckets, how many send one after another: 1 where their small messages go out together.

    Args:
        counted_bytes: of a step, in all buckets.
    """
    which = Waiting.of(compressor, ranks, round_trip_s) if compressor.transactional else None
    largest = counted_bytes / len(compressor.collectives) / buckets
    return 1 if which is not None and largest <= which.largest_bytes else buckets


def sentences(ranks: int, machines: int, round_trip_s: float) -> list[str]:
    """What the user should know about PowerSGD between so many ranks of a group; empty if round trips are short."""
    if round_trip_s < LONG_ROUND_TRIP_S or ranks == 2:
        return []
    by_itself = ' With ranks_per_node="auto" on two machines it does so by itself.' if machines == 2 else ""
    return [
        f"A round trip takes {1e3 * round_trip_s:.0f} ms, and PowerSGD has two or more of them for every bucket. With "
        f'hook_options={{"coalesce": True}} it sends the small messages of all buckets together.{by_itself}'
    ]
