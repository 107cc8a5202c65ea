"""commhooks for PyTorch Lightning: strategies for DDP and FSDP2 with a communication hook that is saved and resumed.

    Trainer(strategy=CommHookDDP(hook="powerSGD"))

Importing this package registers the strategy names "ddp_powersgd", "ddp_batched_powersgd", "ddp_fp16_compress",
"ddp_bf16_compress", "ddp_int8_compress", "ddp_int4_compress" and "ddp_auto" with Lightning, and the same for notebooks
("ddp_notebook_powersgd", ...); it has no other side effect.
"""

try:
    import lightning  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ImportError('lightning_commhooks needs Lightning: pip install "commhooks[lightning]"') from error

from lightning_commhooks.checkpoint import CommHookCheckpoint
from lightning_commhooks.fsdp2 import CommHookFSDP2
from lightning_commhooks.monitor import CommHookMonitor
from lightning_commhooks.registry import register_strategy_names
from lightning_commhooks.stats import hook_stats
from lightning_commhooks.strategy import CommHookDDP

__all__ = ["CommHookCheckpoint", "CommHookDDP", "CommHookFSDP2", "CommHookMonitor", "hook_stats"]

register_strategy_names()
