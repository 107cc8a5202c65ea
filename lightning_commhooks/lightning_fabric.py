"""`CommHookDDP` for Fabric from the package `lightning_fabric`, which comes with `pytorch_lightning`. See fabric.py."""

from commhooks.errors import needed
from lightning_commhooks.fabric_strategy import HookedFabricDDP

with needed(
    "lightning_fabric",
    sentence="this needs the package lightning_fabric: pip install lightning-fabric. For lightning.fabric write "
    "`from lightning_commhooks.fabric import CommHookDDP`",
):
    from lightning_fabric.strategies import DDPStrategy

__all__ = ["CommHookDDP"]


class CommHookDDP(HookedFabricDDP, DDPStrategy):  # type: ignore[misc]
    __doc__ = HookedFabricDDP.__doc__
