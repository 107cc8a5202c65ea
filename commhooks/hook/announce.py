"""The one line that rank 0 says of a hook at the first backward pass."""

import logging
import sys

from commhooks.comm.counters import Stats
from commhooks.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from commhooks.hook.plan import ModelPlan
from commhooks.hook.request import HookSpec

logger = logging.getLogger(__name__)


def announce(spec: HookSpec, low_rank: PowerSGDState | None, plan: ModelPlan, stats: Stats) -> None:
    """Call at the end of the pass. `low_rank`: the state of PowerSGD, None for other hooks."""
    text = f"commhooks: {spec.name}"
    if low_rank is not None:
        rank, start = low_rank.matrix_approximation_rank, low_rank.start_powerSGD_iter
        text += f" (rank {rank}, from step {start}): {plan.summary()}"
    elif plan.sends is not None:
        sent, before = stats.last_pass.bytes_sent, stats.bytes_uncompressed
        text += f": {before / 1e6:.3f} MB -> {sent / 1e6:.3f} MB per step and rank"
    if spec.wrapper is not None:
        text += f", {spec.wrapper} on the wire"
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    else:
        # Nobody has set up logging, and whether compression acts must not be a secret.
        print(text, file=sys.stderr, flush=True)
