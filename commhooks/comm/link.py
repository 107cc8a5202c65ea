"""How long a message takes from one rank to another."""

import math
import time

import torch
import torch.distributed as dist

from commhooks.comm.collective import gather_rows

LONG_ROUND_TRIP_S = 0.01
"""From here on round trips are what small messages cost: between regions 20 ms and more, inside one less than 1 ms."""
_ROUND_TRIPS = 5


def round_trip_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that one number of each rank takes to all others, on the slowest rank. All ranks of `group` must call
    this; all get the same. It is tried again while that is long, because a rank may have been busy: the shortest time
    counts."""
    own = slowest = math.inf
    for _ in range(1 + _ROUND_TRIPS):  # the first one waits for the latest rank
        began = time.perf_counter()
        row = torch.tensor([own], dtype=torch.float32, device=device)
        slowest = float(gather_rows(row, group, None, "the time of a round trip").max())
        own = min(own, time.perf_counter() - began)
        if slowest < LONG_ROUND_TRIP_S:
            break
    return slowest
