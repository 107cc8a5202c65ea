"""A rank for each layer, from the share of its gradient's energy that each rank keeps. Pure.

The energy of a gradient is the sum of its squares. Of a matrix, a rank r keeps at most the r largest squared singular
values.
"""

from collections.abc import Callable, Mapping, Sequence

LARGEST = 16
"""The highest rank that is considered, and the one that is taken where the user gives no target: with rank 4 and below
the language model of benchmarks/language_model.py ends at a loss that is 6 % and more above that of all-reduce."""
SAVING = 2.0
"""A rank has to make a layer smaller by this factor; PowerSGD's `min_compression_rate`."""

Kept = Mapping[str, Sequence[float]]
"""By layer: the share of the energy that rank 1, 2, ... keeps, 0 to 1, not decreasing."""


def highest_rank(n: int, m: int) -> int:
    """The highest rank at which PowerSGD compresses an `n x m` matrix, from 1 to `LARGEST`."""
    return max((rank for rank in range(1, LARGEST + 1) if (n + m) * rank * SAVING < n * m), default=1)


def truncated(shares: Sequence[float], n: int, m: int) -> list[float]:
    """The shares of the ranks at which PowerSGD compresses an `n x m` matrix, at least of rank 1. Where nothing was
    measured (all are 0, or not numbers), they grow evenly."""
    ranks = range(1, highest_rank(n, m) + 1)
    if not any(each > 0 for each in shares):
        return [rank / min(n, m) for rank in ranks]
    return list(shares[: len(ranks)])


def ranks_for_share(kept: Kept, share: float) -> dict[str, int]:
    """By layer the lowest rank that keeps at least `share`; the highest one if none does."""
    return {
        name: next((rank for rank, each in enumerate(shares, 1) if each >= share), len(shares))
        for name, shares in kept.items()
    }


def ranks_for_bytes(kept: Kept, limit: int, bytes_of: Callable[[Mapping[str, int]], float]) -> dict[str, int]:
    """The ranks that let the layer that keeps least keep as much as possible, and send at most `limit` bytes; rank 1
    everywhere if even that sends more.

    Args:
        bytes_of: the bytes of a step with such ranks.
    """
    best = dict.fromkeys(kept, 1)
    # The ranks change at the shares that some rank keeps; the bytes grow with the share.
    shares = sorted({each for shares in kept.values() for each in shares})
    low, high = 0, len(shares)
    while low < high:
        middle = (low + high) // 2
        ranks = ranks_for_share(kept, shares[middle])
        if bytes_of(ranks) <= limit:
            best, low = ranks, middle + 1
        else:
            high = middle
    return best
