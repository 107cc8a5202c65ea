"""commhooks for PyTorch Lightning: strategies for DDP and FSDP2 with a communication hook that is saved and resumed.

    Trainer(strategy=CommHookDDP(hook="powerSGD"))

The names here are for `lightning.pytorch`; `lightning_commhooks.pytorch_lightning` has the same for the package
`pytorch_lightning`, and `lightning_commhooks.fabric` and `lightning_commhooks.lightning_fabric` a strategy for the
Fabric of either. None of them imports what only the others need: the classes here are made when they are first asked
for.

Importing this package registers the strategy names "ddp_powersgd", "ddp_batched_powersgd", "ddp_fp16_compress",
"ddp_bf16_compress", "ddp_int8_compress", "ddp_int4_compress" and "ddp_auto", and the same for notebooks
("ddp_notebook_powersgd", ...), with `lightning.pytorch` and with `pytorch_lightning`, with each as soon as it is
imported. It has no other side effect.
"""

import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from commhooks.hook.for_plugins import TooOld, check_version
from lightning_commhooks.stats import hook_stats
from lightning_commhooks.when_imported import when_imported

if TYPE_CHECKING:
    from lightning_commhooks.lightning_pytorch import CommHookCheckpoint, CommHookDDP, CommHookFSDP2, CommHookMonitor

__all__ = ["CommHookCheckpoint", "CommHookDDP", "CommHookFSDP2", "CommHookMonitor", "hook_stats"]


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


if not _installed("lightning") and not _installed("pytorch_lightning"):
    raise ImportError("lightning_commhooks needs Lightning: pip install lightning")


def _for_lightning() -> None:
    # One that is too old may be there for other libraries: the error is for who asks for our classes.
    with suppress(TooOld):
        check_version(sys.modules["lightning"])
        import lightning_commhooks.lightning_pytorch  # noqa: F401


def _for_pytorch_lightning() -> None:
    with suppress(TooOld):
        check_version(sys.modules["pytorch_lightning"])
        import lightning_commhooks.pytorch_lightning  # noqa: F401


when_imported("lightning.pytorch", _for_lightning)
when_imported("pytorch_lightning", _for_pytorch_lightning)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_commhooks import lightning_pytorch

    return getattr(lightning_pytorch, name)
