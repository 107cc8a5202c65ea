"""Do the ranks hold the same state? Asked once after a start or a load, before anything depends on the answer.

Which collectives a step runs follows from the step number and the options. Ranks that disagree on them would pair
collectives of different sizes: gloo aborts, NCCL hangs. And error feedback needs every rank's residual or none.
"""

import hashlib
import secrets
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commhooks.comm.collective import gather_rows
from commhooks.comm.counters import Stats
from commhooks.engine.state import Memory
from commhooks.errors import HookRunError


def fingerprint(*parts: object) -> int:
    """A number below 2**62 made of the `repr` of `parts`, the same in every process."""
    digest = hashlib.sha256("\0".join(map(repr, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


@dataclass(frozen=True)
class Agreement:
    """What the ranks found out.

    Attributes:
        residuals_complete: every rank has its residual; where one has not, all have dropped theirs.
        nonce: a random number, the same on all ranks, that no other agreement has.
    """

    residuals_complete: bool
    nonce: int


def agree(
    memory: Memory, configuration: int, group: dist.ProcessGroup, device: torch.device, stats: Stats
) -> Agreement:
    """Compare step and configuration over the ranks of `group`; all of them must call this.

    Raises:
        HookRunError: on all ranks, if the steps or the configurations differ; it names the ranks.
    """
    row = [memory.step, configuration, int(memory.residual_missing), secrets.randbits(62)]
    own = torch.tensor(row, dtype=torch.int64, device=device)
    table = gather_rows(
        own, group, stats, "the comparison of the ranks' state (load on every rank, or on none)"
    ).tolist()
    steps = [row[0] for row in table]
    if len(set(steps)) > 1:
        raise HookRunError(
            f"the ranks are at different steps of the hook: {_by_rank(steps)}. Load the same checkpoint on every rank "
            "before the first backward pass, or on none"
        )
    configurations = [row[1] for row in table]
    if len(set(configurations)) > 1:
        groups = sorted({tuple(r for r, c in enumerate(configurations) if c == value) for value in configurations})
        raise HookRunError(
            "the ranks run different hooks, options or models: "
            + " differ from ".join(f"ranks {list(ranks)}" for ranks in groups)
            + ". Give every rank the same hook, options, wrapper and model"
        )
    complete = not any(row[2] for row in table)
    if not complete:
        memory.drop_residuals()
    return Agreement(complete, table[0][3])


def _by_rank(values: list[int]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
