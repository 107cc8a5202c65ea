"""`CommHookDDP` for Fabric: its DDP strategy with a communication hook of commhooks for every model that is set up.

fabric = Fabric(devices=2, strategy=CommHookDDP(hook="powerSGD"))
model, optimizer = fabric.setup(model, optimizer)
fabric.save("state.ckpt", {"model": model, "optimizer": optimizer})   # with the state of the model's hook
"""

from commhooks.errors import needed
from lightning_commhooks.fabric_strategy import HookedFabricDDP

with needed(
    "lightning",
    sentence="this needs lightning.fabric: pip install lightning. For lightning_fabric write "
    "`from lightning_commhooks.lightning_fabric import CommHookDDP`",
):
    from lightning.fabric.strategies import DDPStrategy

__all__ = ["CommHookDDP"]


class CommHookDDP(HookedFabricDDP, DDPStrategy):
    __doc__ = HookedFabricDDP.__doc__
