"""commhooks for PyTorch Lightning: strategies with a communication hook, which checkpoints hold.

    Trainer(strategy=CommHookDDP(hook="powerSGD"))

These classes are for `lightning.pytorch`. `lightning_commhooks.pytorch_lightning` has the same
classes for the package `pytorch_lightning`; `lightning_commhooks.fabric` and
`lightning_commhooks.lightning_fabric` have a strategy for Fabric.

Importing this package registers the strategy names "ddp_powersgd", "ddp_batched_powersgd",
"ddp_fp16_compress", "ddp_bf16_compress", "ddp_int8_compress", "ddp_int4_compress" and "ddp_auto",
and the same names for notebooks ("ddp_notebook_powersgd", ...), with `lightning.pytorch` or
`pytorch_lightning`, whichever is imported already. If neither is, it imports the installed ones.
"""

import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_commhooks.callbacks import hook_stats
from lightning_commhooks.packages import MODULES

if TYPE_CHECKING:
    from lightning_commhooks.lightning_pytorch import (
        CommHookCheckpoint,
        CommHookDDP,
        CommHookFSDP2,
        CommHookMonitor,
    )

__all__ = ["CommHookCheckpoint", "CommHookDDP", "CommHookFSDP2", "CommHookMonitor", "hook_stats"]


def _is_installed(root: str) -> bool:
    try:
        return root in sys.modules or find_spec(root) is not None
    except ModuleNotFoundError:  # a finder that blocks it
        return False


_roots = {package: package.partition(".")[0] for package in MODULES}
_installed = [package for package, root in _roots.items() if _is_installed(root)]
if not _installed:
    raise ImportError("lightning_commhooks needs Lightning: pip install lightning")
_imported = [package for package in _installed if _roots[package] in sys.modules]
for _package in _imported or _installed:
    # A Lightning that is too old for commhooks may be installed for another library. So the error
    # is raised only when a class is imported from here.
    with suppress(Exception):
        if _package == "pytorch_lightning":
            import lightning_commhooks.pytorch_lightning
        else:
            import lightning_commhooks.lightning_pytorch  # noqa: F401


def __getattr__(name: str) -> Any:
    if not name.startswith("CommHook"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import lightning_commhooks.lightning_pytorch as classes

    return getattr(classes, name)
