"""The PowerSGD candidates, with a rank for each layer."""

import glob
from collections.abc import Mapping

from commhooks.compressors.auto.candidates import Candidate, like_label, powersgd, target_label
from commhooks.compressors.auto.config import Auto
from commhooks.compressors.auto.energy import Energies, by_layer
from commhooks.compressors.auto.loads import load_of
from commhooks.compressors.auto.ranks import EQUIVALENTS, ranks_for_bytes, ranks_for_share, truncated
from commhooks.compressors.observation import Ranks, Seen
from commhooks.compressors.powersgd.plan import MatrixPlan

LOSSY = 2.0
"""`Candidate.changes` of PowerSGD is more than this; as in its trials."""


def powersgd_candidates(config: Auto, seen: Seen, energies: Energies, ranks: Ranks) -> list[Candidate]:
    """The candidates for the config's target. All ranks must call this; all get the same: the energies are rank 0's."""
    # The layers that PowerSGD compresses at rank 1, in an order that is the same on all ranks.
    lowest = powersgd(config, 1, "").new()
    plans = seen.plans(lowest)
    layers = [plan for bucket in plans for plan in bucket if isinstance(plan, MatrixPlan) and plan.compressed]
    names = [plan.name for plan in layers]
    if not names:
        return []
    kept = by_layer(ranks.of_first(energies.numbers(names)), names)
    kept = {plan.name: truncated(kept[plan.name], plan.n, plan.m) for plan in layers}

    at_rank_1 = load_of(lowest, seen, 0.0).counted_bytes
    each_rank = {plan.name: plan.sent_bytes(lowest.wire_dtype) for plan in layers}

    def bytes_of(by_name: Mapping[str, int]) -> float:
        """Without planning: many ranks are tried, and every plan would compare each layer with a glob of each."""
        return at_rank_1 + sum((rank - 1) * each_rank[name] for name, rank in by_name.items())

    if isinstance(config.target, int):
        chosen = ranks_for_bytes(kept, config.target, bytes_of)
        return [_candidate(config, chosen, target_label(config.target), LOSSY + 1)]
    if config.target is not None:
        chosen = ranks_for_share(kept, config.target)
        return [_candidate(config, chosen, target_label(config.target), LOSSY + 1)]
    found: dict[str, Candidate] = {}
    for rank in EQUIVALENTS:
        limit = load_of(powersgd(config, rank, "").new(), seen, 0.0).counted_bytes
        by_name = ranks_for_bytes(kept, int(limit), bytes_of)
        # What is the same for two sizes is one candidate.
        found.setdefault(repr(by_name), _candidate(config, by_name, like_label(rank), LOSSY + 1 / rank))
    return list(found.values())


def _candidate(config: Auto, by_name: Mapping[str, int], label: str, changes: float) -> Candidate:
    low, high = min(by_name.values()), max(by_name.values())
    ranks = f"rank {low}" if low == high else f"ranks {low} to {high}"
    return powersgd(config, {glob.escape(name): rank for name, rank in by_name.items()}, f"{label} ({ranks})", changes)
