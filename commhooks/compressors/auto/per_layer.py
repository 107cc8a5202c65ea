"""The PowerSGD candidates, with a rank for each layer."""

import glob
from collections.abc import Mapping

from commhooks.compressors.auto.candidates import Candidate, powersgd
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
    plans = seen.plans(powersgd(config, 1, "").new())
    layers = [plan for bucket in plans for plan in bucket if isinstance(plan, MatrixPlan) and plan.compressed]
    names = [plan.name for plan in layers]
    if not names:
        return []
    kept = by_layer(ranks.of_first(energies.numbers(names)), names)
    kept = {plan.name: truncated(kept[plan.name], plan.n, plan.m) for plan in layers}

    def bytes_of(by_name: int | Mapping[str, int]) -> float:
        return load_of(_candidate(config, by_name, "", 0.0).new(), seen, 0.0).counted_bytes

    if isinstance(config.target, int):
        chosen = ranks_for_bytes(kept, config.target, bytes_of)
        return [_candidate(config, chosen, f"powerSGD, {config.target} bytes", LOSSY + 1)]
    if config.target is not None:
        chosen = ranks_for_share(kept, config.target)
        return [_candidate(config, chosen, f"powerSGD, {config.target:g} of energy", LOSSY + 1)]
    found: dict[str, Candidate] = {}
    for rank in EQUIVALENTS:
        by_name = ranks_for_bytes(kept, int(bytes_of(rank)), bytes_of)
        # What is the same for two sizes is one candidate.
        found.setdefault(repr(by_name), _candidate(config, by_name, f"powerSGD like rank {rank}", LOSSY + 1 / rank))
    return list(found.values())


def _candidate(config: Auto, by_name: int | Mapping[str, int], label: str, changes: float) -> Candidate:
    if isinstance(by_name, int):
        return powersgd(config, by_name, label, changes)
    low, high = min(by_name.values()), max(by_name.values())
    ranks = f"rank {low}" if low == high else f"ranks {low} to {high}"
    return powersgd(config, {glob.escape(name): rank for name, rank in by_name.items()}, f"{label} ({ranks})", changes)
