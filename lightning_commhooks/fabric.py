"""`CommHookDDP` for the Fabric of `lightning.fabric`.

fabric = Fabric(devices=2, strategy=CommHookDDP(hook="powerSGD"))
model, optimizer = fabric.setup(model, optimizer)
fabric.save("state.ckpt", {"model": model, "optimizer": optimizer})   # includes the state of the model's hook
"""

from typing import TYPE_CHECKING

from lightning_commhooks.class_factory import fabric_class

if TYPE_CHECKING:
    from lightning_commhooks.fabric_strategy import CommHookDDP
else:
    CommHookDDP = fabric_class("lightning.fabric")

__all__ = ["CommHookDDP"]
