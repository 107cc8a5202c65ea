"""What an exchange costs, and what to do where round trips, and not the bandwidth, are most of that."""

from typing import Any

from commhooks.comm.link import LONG_ROUND_TRIP_S, Network
from commhooks.compressors.base import Compressor
from commhooks.compressors.local_steps.options import passes_per_exchange
from commhooks.engine.coalescing import Waiting


def exchange_s(compressor: Compressor[Any], network: Network, counted_bytes: float, buckets: int) -> float:
    """Seconds that the exchange takes per step, on average. Where the small messages of several buckets go out
    together, these cost the latency of one.

    Args:
        counted_bytes: of a step, in all buckets; see `Counters`.
    """
    every = passes_per_exchange(compressor.config)
    counted = counted_bytes * every
    which = Waiting.of(compressor, network.ranks, 2 * network.latency_s) if compressor.transactional else None
    largest = counted / len(compressor.collectives) / buckets
    turns = 1 if which is not None and largest <= which.largest_bytes else buckets
    return network.seconds(counted, compressor.collectives, turns) / every


def sentences(ranks: int, machines: int, round_trip_s: float) -> list[str]:
    """What the user should know about PowerSGD between so many ranks of a group; empty if round trips are short."""
    if round_trip_s < LONG_ROUND_TRIP_S or ranks == 2:
        return []
    by_itself = ' With ranks_per_node="auto" on two machines it does so by itself.' if machines == 2 else ""
    return [
        f"A round trip takes {1e3 * round_trip_s:.0f} ms, and PowerSGD has two or more of them for every bucket. With "
        f'hook_options={{"coalesce": True}} it sends the small messages of all buckets together.{by_itself}'
    ]
