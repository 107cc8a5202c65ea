"""`CommHookDDP` for Fabric: its DDP strategy with a communication hook of commhooks for every model that is set up.

fabric = Fabric(devices=2, strategy=CommHookDDP(hook="powerSGD"))
model, optimizer = fabric.setup(model, optimizer)
fabric.save("state.ckpt", {"model": model, "optimizer": optimizer})   # with the state of the model's hook
"""

try:
    import lightning
    from lightning.fabric.strategies import DDPStrategy
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ImportError(
        "this needs lightning.fabric: pip install lightning. For lightning_fabric write "
        "`from lightning_commhooks.lightning_fabric import CommHookDDP`"
    ) from error

from commhooks.hook.for_plugins import check_version
from lightning_commhooks.fabric_strategy import HookedFabricDDP

check_version(lightning)

__all__ = ["CommHookDDP"]


class CommHookDDP(HookedFabricDDP, DDPStrategy):
    __doc__ = HookedFabricDDP.__doc__
