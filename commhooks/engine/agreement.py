"""Check that all ranks hold the same state: once after a start or a load, before the first bucket is reduced.

The step number and the options determine which collectives a step runs. Ranks that disagree on them would pair
collectives of different sizes: gloo aborts, NCCL hangs. Error feedback needs the residuals of all ranks, or none.
"""

import secrets
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commhooks.comm.collective import gather_rows
from commhooks.comm.counters import Counters
from commhooks.comm.shards import on_all_shards
from commhooks.engine.kernel_choice import Choice, Offer, agreed_choice
from commhooks.engine.state import LearnedState
from commhooks.errors import HookRunError


@dataclass(frozen=True)
class Terms:
    """What the ranks compare besides their state.

    Attributes:
        configuration: a hash of the hook, its options and the model; must be equal on all ranks.
        offer: the kernels of this rank.
    """

    configuration: int
    offer: Offer


@dataclass(frozen=True)
class Agreement:
    """The result of `agree`, equal on all ranks.

    Attributes:
        local_complete: every rank has its local tensors. If one lacks them, all ranks have dropped theirs.
        nonce: a random number, unique to this agreement.
        choice: the kernel of all ranks.
    """

    local_complete: bool
    nonce: int
    choice: Choice


def agree(
    state: LearnedState,
    terms: Terms,
    group: dist.ProcessGroup,
    shard_group: dist.ProcessGroup | None,
    device: torch.device,
    counters: Counters,
) -> Agreement:
    """Compare step and configuration over the ranks of `group`, and choose a kernel. All of its ranks must call this.
    Of a sharded model, compare the step with the ranks of `shard_group`, too.

    Raises:
        HookRunError: on all ranks, if the steps or the configurations differ, if some ranks cannot run the hook, or if
            they have no kernel in common; the message names the ranks.
        HookConfigError: no rank can run the hook.
    """
    agreement, table = on_all_shards(
        lambda: _agree(state, terms, group, device, counters), [state.step], shard_group, device, HookRunError
    )
    _check_steps([row[0] for row in table])
    return agreement


def _agree(
    state: LearnedState, terms: Terms, group: dist.ProcessGroup, device: torch.device, counters: Counters
) -> Agreement:
    row = [state.step, terms.configuration, int(state.local_missing), secrets.randbits(62), terms.offer.key]
    own = torch.tensor(row, dtype=torch.int64, device=device)
    table = gather_rows(
        own, group, counters, "the comparison of the ranks' state (load on every rank, or on none)"
    ).tolist()
    _check_steps([row[0] for row in table])
    configurations = [row[1] for row in table]
    if len(set(configurations)) > 1:
        groups = sorted({tuple(r for r, c in enumerate(configurations) if c == value) for value in configurations})
        raise HookRunError(
            "the ranks run different hooks, options or models: "
            + " differ from ".join(f"ranks {list(ranks)}" for ranks in groups)
            + ". Give every rank the same hook, options, wrapper and model"
        )
    choice = agreed_choice(terms.offer, [row[4] for row in table], group, device, HookRunError)
    complete = not any(row[2] for row in table)
    if not complete:
        state.drop_local()
    return Agreement(complete, table[0][3], choice)


def _check_steps(steps: list[int]) -> None:
    if len(set(steps)) > 1:
        raise HookRunError(
            f"the ranks are at different steps of the hook: {_by_rank(steps)}. Load the same checkpoint on every rank "
            "before the first backward pass, or on none"
        )


def _by_rank(values: list[int]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
