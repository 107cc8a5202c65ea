"""A rank of PowerSGD for each layer, chosen from gradients as hook="auto" chooses it."""

from collections.abc import Callable, Mapping, Sequence

import torch

from commhooks import PowerSGD
from commhooks.compressors.auto.energy import Energies, by_layer
from commhooks.compressors.auto.ranks import ranks_for_bytes, truncated
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.powersgd.matrix_plan import MatrixPlan
from tests.support.simulation import SimulatedRanks


def ranks_per_layer(
    parameters: Mapping[str, torch.Tensor], gradients: Sequence[torch.Tensor], like: int
) -> dict[str, int]:
    """By layer that PowerSGD compresses its rank: together they send at most the bytes of rank `like` for all.

    Args:
        parameters: name -> parameter, in the order of the gradients.
        gradients: averaged gradients of some steps, each flat (1-D).
    """
    plans = {rank: _plans(parameters, rank) for rank in (1, like)}
    energies = Energies()
    slots = {slot.name: slot for slot in SimulatedRanks(_low_rank(1), 1, parameters).layout.slots}
    for gradient in gradients:
        energies.look({each.name: slots[each.name].of(gradient).view(each.n, each.m) for each in plans[1].values()})
    names = list(plans[1])
    sent = {name: plan.sent_bytes(torch.float32) for name, plan in plans[1].items()}
    kept = {
        name: truncated(shares, plans[1][name].n, plans[1][name].m)
        for name, shares in by_layer(energies.numbers(names), names).items()
    }
    limit = sum(like * sent[name] for name in plans[like])
    return ranks_for_bytes(kept, limit, lambda ranks: sum(rank * sent[name] for name, rank in ranks.items()))


def _plans(parameters: Mapping[str, torch.Tensor], rank: int) -> dict[str, MatrixPlan]:
    planned = SimulatedRanks(_low_rank(rank), 1, parameters).plans
    return {plan.name: plan for plan in planned if isinstance(plan, MatrixPlan) and plan.compressed}


def _low_rank(rank: int) -> Callable[[], PowerSGDCompressor]:
    return lambda: PowerSGDCompressor(PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=0))
