"""`CommHookDDP` for the Fabric of the package `lightning_fabric`, a part of `pytorch_lightning`."""

from lightning_commhooks.fabric_strategy import HookedFabricDDP
from lightning_commhooks.packages import check_installed

check_installed("lightning_fabric")

from lightning_fabric.strategies import DDPStrategy  # noqa: E402

__all__ = ["CommHookDDP"]


class CommHookDDP(HookedFabricDDP, DDPStrategy):  # type: ignore[misc]
    """The `CommHookDDP` of `lightning_commhooks.fabric`, for `lightning_fabric`."""
