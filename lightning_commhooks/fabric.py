"""`CommHookDDP` for the Fabric of `lightning.fabric`.

fabric = Fabric(devices=2, strategy=CommHookDDP(hook="powerSGD"))
model, optimizer = fabric.setup(model, optimizer)
fabric.save("state.ckpt", {"model": model, "optimizer": optimizer})   # includes the state of the
model's hook
"""

from lightning_commhooks.fabric_strategy import HookedFabricDDP
from lightning_commhooks.packages import check_installed

check_installed("lightning.fabric")

from lightning.fabric.strategies import DDPStrategy  # noqa: E402

__all__ = ["CommHookDDP"]


class CommHookDDP(HookedFabricDDP, DDPStrategy):
    """Trains with Fabric's `DDPStrategy` and a communication hook, on every device; `fabric.save`
    and `fabric.load` save and restore the hook.

    Each model that `fabric.setup` wraps has a hook with its own learned state. `fabric.save(path,
    {"model": model})` saves the hooks' states under the key "commhooks" and the models' names, and
    `fabric.load(path, {"model": model})` restores them. All ranks must call both, as Fabric itself
    requires. Set up the models before loading. Within `fabric.no_backward_sync(model)` the hook
    does not run.

    Args:
        hook, save_residual: as in `lightning_commhooks.CommHookDDP`.
        hook_options, hook_state, wrapper, strict, total_steps, check_every, ranks_per_node,
            members: as in `commhooks.attach`.
        ddp_kwargs: arguments of `DDPStrategy` and `DistributedDataParallel`.

    Raises:
        commhooks.HookConfigError: at construction, as in `lightning_commhooks.CommHookDDP`.
    """
