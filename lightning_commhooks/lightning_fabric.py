"""`CommHookDDP` for Fabric from the package `lightning_fabric`, which comes with `pytorch_lightning`. See fabric.py."""

try:
    import lightning_fabric
    from lightning_fabric.strategies import DDPStrategy
except ModuleNotFoundError as error:
    if error.name != "lightning_fabric":
        raise
    raise ImportError(
        "this needs the package lightning_fabric: pip install lightning-fabric. For lightning.fabric write "
        "`from lightning_commhooks.fabric import CommHookDDP`"
    ) from error

from commhooks.hook.for_plugins import check_version
from lightning_commhooks.fabric_strategy import HookedFabricDDP

check_version(lightning_fabric)

__all__ = ["CommHookDDP"]


class CommHookDDP(HookedFabricDDP, DDPStrategy):  # type: ignore[misc]
    __doc__ = HookedFabricDDP.__doc__
