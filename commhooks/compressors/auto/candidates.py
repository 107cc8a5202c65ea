"""The candidates of `hook="auto"`, and the compressors that they stand for."""

from dataclasses import replace
from typing import Any

from commhooks.compressors.adaptive import ObservedPass
from commhooks.compressors.auto.options import QUALITIES, Auto
from commhooks.compressors.base import Compressor
from commhooks.compressors.candidates import Candidate
from commhooks.compressors.cast import AllReduceCompressor, BF16Compressor
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.quantized.exchange import Int4Compressor, Int8Compressor
from commhooks.errors import HookConfigError

_CLASSES: dict[str, type[Compressor[Any]]] = {
    each.Config.hook_name: each
    for each in (AllReduceCompressor, BF16Compressor, Int8Compressor, Int4Compressor, PowerSGDCompressor)
}


def new(candidate: Candidate) -> Compressor[Any]:
    """The candidate's compressor. It compresses from its first step on.

    Raises:
        HookConfigError: not one of those that are chosen from, or invalid options.
    """
    if candidate.hook not in _CLASSES:
        raise HookConfigError(f"{candidate.hook!r} is none of the hooks that 'auto' chooses from: {list(_CLASSES)}")
    made = _CLASSES[candidate.hook]
    try:
        return made(made.Config(**candidate.options_at_once(made.Config)))
    except TypeError as error:
        raise HookConfigError(f"hook {candidate.hook!r}: {error}") from error


def offered(config: Auto) -> list[Candidate]:
    """The candidates, plain all-reduce first."""
    found = []
    for each in QUALITIES[config.quality]:
        excludes = _CLASSES[each.hook].Config.start_option is not None
        found.append(replace(each, options={**each.options, **_exclude(config)}) if excludes else each)
    return found


def _exclude(config: Auto) -> dict[str, Any]:
    return {"exclude": list(config.exclude)}


def excluding(candidate: Candidate, config: Auto) -> Candidate:
    """The candidate with what the config excludes now."""
    if "exclude" not in candidate.options:
        return candidate
    return replace(candidate, options={**candidate.options, **_exclude(config)})


def counted_bytes(compressor: Compressor[Any], seen: ObservedPass) -> float:
    """Counted bytes of a step (see `Counters`). Sparse gradients send few rows, whatever is chosen: they count as
    nothing."""
    wire = compressor.wire_dtype
    return sum(
        plan.sent_bytes(wire) + (plan.flags * plan.wire_itemsize(wire) if plan.compressed else 0)
        for layout, plans in zip(seen.layouts, seen.plans(compressor), strict=True)
        if not layout.sparse
        for plan in plans
    )
