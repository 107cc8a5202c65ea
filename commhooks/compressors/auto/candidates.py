"""The candidates of `hook="auto"`, and the compressors that they stand for."""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from commhooks.compressors.adaptive import ObservedPass, Ranks
from commhooks.compressors.auto.energy import Energies, by_layer
from commhooks.compressors.auto.options import QUALITIES, Auto
from commhooks.compressors.auto.ranks import highest_rank, ranks_for_bytes, ranks_for_share, truncated
from commhooks.compressors.base import Compressor
from commhooks.compressors.candidates import Candidate, powersgd
from commhooks.compressors.cast import AllReduceCompressor, BF16Compressor
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.powersgd.matrix_plan import MatrixPlan
from commhooks.compressors.quantized.compressor import Int4Compressor, Int8Compressor
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.errors import HookConfigError

POWERSGD = PowerSGDCompressor.Config.hook_name
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


def simple(config: Auto) -> list[Candidate]:
    """The candidates without ranks, the most exact first."""
    return [
        replace(each, options={} if _CLASSES[each.hook].Config.start_option is None else _exclude(config))
        for each in QUALITIES[config.quality]
    ]


def widest(config: Auto) -> list[Compressor[Any]]:
    """Compressors that compress whatever a candidate may: those of `simple`, and PowerSGD at the lowest rank."""
    return [*map(new, simple(config)), *([_lowest(config)] if config.quality == "close" else [])]


def _exclude(config: Auto) -> dict[str, Any]:
    return {"exclude": list(config.exclude)}


def excluding(candidate: Candidate, config: Auto) -> Candidate:
    """The candidate with what the config excludes now."""
    if "exclude" not in candidate.options:
        return candidate
    return replace(candidate, options={**candidate.options, **_exclude(config)})


def allowed(candidate: Candidate, config: Auto) -> bool:
    """Whether the config allows the candidate: by its quality, and PowerSGD if its ranks are for the config's target
    and for the layers that it does not exclude."""
    if candidate.hook != POWERSGD:
        return candidate.hook in [each.hook for each in QUALITIES[config.quality]]
    if config.quality != "close" or excluding(candidate, config) != candidate:
        return False
    return candidate.label.startswith(f"{_target_label(config.target)} (")


def _target_label(target: int | float | None) -> str:
    """Of the PowerSGD candidate for the config's target; its ranks follow, in brackets."""
    if target is None:
        return "powerSGD"
    return f"powerSGD, {target} bytes" if isinstance(target, int) else f"powerSGD, {target:g} of energy"


# ---- PowerSGD with a rank for each layer -----------------------------------------------------------------------------


def look_at(seen: ObservedPass, config: Auto, energies: Energies) -> None:
    """Show the gradients of a pass to `energies`, which decide the ranks."""
    for layout, plans, gradient in zip(seen.layouts, seen.plans(_lowest(config)), seen.gradients, strict=True):
        slots = {slot.name: slot for slot in layout.slots}
        energies.look({each.name: slots[each.name].of(gradient).view(each.n, each.m) for each in _matrices(plans)})


def powersgd_candidates(config: Auto, seen: ObservedPass, energies: Energies, ranks: Ranks) -> list[Candidate]:
    """The candidate for the config's target, if there is a layer that PowerSGD compresses. All ranks must call this;
    all get the same: the energies are rank 0's."""
    # The layers that PowerSGD compresses at rank 1, in an order that is the same on all ranks.
    layers = [each for plans in seen.plans(_lowest(config)) for each in _matrices(plans)]
    if not layers:
        return []
    if config.target is None:
        chosen = {plan.name: highest_rank(plan.n, plan.m) for plan in layers}
    else:
        names = [plan.name for plan in layers]
        shares = by_layer(ranks.of_first(energies.numbers(names)), names)
        chosen = _for_target(config, layers, seen, shares)
    low, high = min(chosen.values()), max(chosen.values())
    label = f"{_target_label(config.target)} ({f'rank {low}' if low == high else f'ranks {low} to {high}'})"
    return [powersgd({glob.escape(name): rank for name, rank in chosen.items()}, _exclude(config), label)]


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


def _for_target(
    config: Auto, layers: Sequence[MatrixPlan], seen: ObservedPass, shares: Mapping[str, Sequence[float]]
) -> dict[str, int]:
    """The rank of each layer. `layers`: planned with rank 1."""
    kept = {plan.name: truncated(shares[plan.name], plan.n, plan.m) for plan in layers}
    if not isinstance(config.target, int):
        assert config.target is not None
        return ranks_for_share(kept, config.target)
    lowest = _lowest(config)
    at_rank_1 = counted_bytes(lowest, seen)
    each_rank = {plan.name: plan.sent_bytes(lowest.wire_dtype) for plan in layers}

    def bytes_of(by_name: Mapping[str, int]) -> float:
        """Without planning: many ranks are tried, and every plan would compare each layer with a glob of each."""
        return at_rank_1 + sum((rank - 1) * each_rank[name] for name, rank in by_name.items())

    return ranks_for_bytes(kept, config.target, bytes_of)


def _lowest(config: Auto) -> Compressor[Any]:
    return new(powersgd(1, _exclude(config)))


def _matrices(plans: Sequence[UnitPlan]) -> list[MatrixPlan]:
    return [each for each in plans if isinstance(each, MatrixPlan) and each.compressed]
