"""What each candidate sends and computes in a step, from its plans and from the times of the probes."""

import math
from collections.abc import Mapping
from typing import Any

from commhooks.comm.collective import Op
from commhooks.compressors.auto.candidates import POWERSGD
from commhooks.compressors.auto.prediction import Load
from commhooks.compressors.base import Compressor
from commhooks.compressors.observation import Seen


def load_of(compressor: Compressor[Any], seen: Seen, codec_s: float) -> Load:
    """The load of one candidate on the buckets of `seen`. `codec_s`: of all buckets together. Sparse gradients send few
    rows, whatever is chosen: they count as nothing."""
    sent: list[tuple[tuple[Op, float], ...]] = []
    for layout, plans in zip(seen.layouts, seen.plans(compressor), strict=True):
        if layout.sparse:
            sent.append((("sum", 0.0),))
            continue
        compresses = any(plan.compressed for plan in plans)
        size = sum(plan.sent_bytes(compressor.wire_dtype) for plan in plans)
        size += sum(plan.flags * plan.wire_itemsize(compressor.wire_dtype) for plan in plans if plan.compressed)
        collectives: tuple[Op, ...] = tuple(compressor.collectives) if compresses else ("sum",)
        sent.append(tuple((op, size / len(collectives)) for op in collectives))
    return Load(tuple(sent), codec_s)


def codec_times(
    made: Mapping[str, Compressor[Any]],
    probes: Mapping[str, Compressor[Any]],
    probe_s: Mapping[str, float],
    seen: Seen,
) -> dict[str, float]:
    """Seconds of the codec by label: as rehearsed; for PowerSGD with ranks of its own between those of its probes, by
    the size of its factors.

    Args:
        made: the candidates.
        probes, probe_s: what was rehearsed, and its seconds.
    """
    low_rank = [label for label, each in probes.items() if each.name == POWERSGD]
    known = sorted((size, probe_s[label]) for label in low_rank if (size := _factors(probes[label], seen)))
    return {
        label: probe_s[label] if label in probe_s else _between(known, _factors(each, seen))
        for label, each in made.items()
    }


def _factors(compressor: Compressor[Any], seen: Seen) -> int:
    """Elements of the factors that PowerSGD sends."""
    return sum(plan.numel_sent for plans in seen.plans(compressor) for plan in plans if plan.compressed)


def _between(known: list[tuple[int, float]], size: int) -> float:
    """The straight line through two measured points; in proportion to the size where there is one."""
    if not known:
        return math.nan
    (small, fast), (large, slow) = known[0], known[-1]
    if large == small:
        return slow * size / large
    return max(0.0, fast + (slow - fast) * (size - small) / (large - small))
