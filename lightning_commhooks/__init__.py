"""commhooks for PyTorch Lightning: strategies for DDP and FSDP2 with a communication hook that is saved and resumed.

    Trainer(strategy=CommHookDDP(hook="powerSGD"))

The names here are for `lightning.pytorch`; `lightning_commhooks.pytorch_lightning` has the same for the package
`pytorch_lightning`, and `lightning_commhooks.fabric` and `lightning_commhooks.lightning_fabric` a strategy for the
Fabric of either.

Importing this package registers the strategy names "ddp_powersgd", "ddp_batched_powersgd", "ddp_fp16_compress",
"ddp_bf16_compress", "ddp_int8_compress", "ddp_int4_compress" and "ddp_auto", and the same for notebooks
("ddp_notebook_powersgd", ...): with that of `lightning.pytorch` and `pytorch_lightning` which is imported already, and
where none is, with each that is installed, which it imports. It has no other side effect.
"""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from commhooks.hook.for_plugins import check_version
from lightning_commhooks.hooked_strategy import hook_stats

if TYPE_CHECKING:
    from lightning_commhooks.lightning_pytorch import CommHookCheckpoint, CommHookDDP, CommHookFSDP2, CommHookMonitor

__all__ = ["CommHookCheckpoint", "CommHookDDP", "CommHookFSDP2", "CommHookMonitor", "hook_stats"]


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


_OURS = {"lightning": "lightning_pytorch", "pytorch_lightning": "pytorch_lightning"}
"""Our module for each package with a Trainer; it registers the names when it is imported."""

_there = [package for package in _OURS if _installed(package)]
if not _there:
    raise ImportError("lightning_commhooks needs Lightning: pip install lightning")
for _package in [package for package in _there if package in sys.modules] or _there:
    # One that is too old or broken may be there for other libraries: the error is for who asks for our classes.
    with suppress(Exception):
        check_version(import_module(_package))
        import_module(f"{__name__}.{_OURS[_package]}")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_commhooks import lightning_pytorch

    return getattr(lightning_pytorch, name)
