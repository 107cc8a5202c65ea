"""The PowerSGD candidate, with a rank for each layer."""

import glob
from collections.abc import Mapping, Sequence
from typing import Any

from commhooks.compressors.auto.candidates import Candidate, powersgd, target_label
from commhooks.compressors.auto.config import Auto
from commhooks.compressors.auto.energy import Energies, by_layer
from commhooks.compressors.auto.loads import load_of
from commhooks.compressors.auto.ranks import Kept, highest_rank, ranks_for_bytes, ranks_for_share, truncated
from commhooks.compressors.base import Compressor
from commhooks.compressors.observation import Ranks, Seen
from commhooks.compressors.powersgd.plan import MatrixPlan


def powersgd_candidates(config: Auto, seen: Seen, energies: Energies, ranks: Ranks) -> list[Candidate]:
    """The candidate for the config's target, if there is a layer that PowerSGD compresses. All ranks must call this;
    all get the same: the energies are rank 0's."""
    # The layers that PowerSGD compresses at rank 1, in an order that is the same on all ranks.
    lowest = powersgd(config, 1, "").new()
    plans = seen.plans(lowest)
    layers = [plan for bucket in plans for plan in bucket if isinstance(plan, MatrixPlan) and plan.compressed]
    if not layers:
        return []
    if config.target is None:
        chosen = {plan.name: highest_rank(plan.n, plan.m) for plan in layers}
    else:
        names = [plan.name for plan in layers]
        chosen = _for_target(
            config.target, layers, lowest, seen, by_layer(ranks.of_first(energies.numbers(names)), names)
        )
    low, high = min(chosen.values()), max(chosen.values())
    label = f"{target_label(config.target)} ({f'rank {low}' if low == high else f'ranks {low} to {high}'})"
    return [powersgd(config, {glob.escape(name): rank for name, rank in chosen.items()}, label)]


def _for_target(
    target: int | float, layers: Sequence[MatrixPlan], lowest: Compressor[Any], seen: Seen, measured: Kept
) -> dict[str, int]:
    """The rank of each layer.

    Args:
        layers, lowest: planned with rank 1, and PowerSGD of that rank.
        measured: see `Kept`; `LARGEST` shares for each layer.
    """
    kept = {plan.name: truncated(measured[plan.name], plan.n, plan.m) for plan in layers}
    if not isinstance(target, int):
        return ranks_for_share(kept, target)
    at_rank_1 = load_of(lowest, seen, 0.0).counted_bytes
    each_rank = {plan.name: plan.sent_bytes(lowest.wire_dtype) for plan in layers}

    def bytes_of(by_name: Mapping[str, int]) -> float:
        """Without planning: many ranks are tried, and every plan would compare each layer with a glob of each."""
        return at_rank_1 + sum((rank - 1) * each_rank[name] for name, rank in by_name.items())

    return ranks_for_bytes(kept, target, bytes_of)
