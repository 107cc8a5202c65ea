"""Names for `Trainer(strategy="...")`."""

from typing import Any

_HOOKS = {
    "ddp_powersgd": "powerSGD",
    "ddp_batched_powersgd": "batched_powerSGD",
    "ddp_fp16_compress": "fp16_compress",
    "ddp_bf16_compress": "bf16_compress",
    "ddp_int8_compress": "int8_compress",
    "ddp_int4_compress": "int4_compress",
    "ddp_auto": "auto",
}


def register_strategy_names(registry: Any, strategy: type) -> None:
    """Register the names with the `StrategyRegistry` of the package that `strategy`, a `CommHookDDP`, belongs to. A
    repeated call, as on a reload of a module, replaces the classes."""
    for name, hook in _HOOKS.items():
        about = f"DDP with the communication hook {hook!r}"
        registry.register(name, strategy, description=about, override=True, hook=hook)
        # As Lightning's own "ddp_notebook": other ways to start processes do not work in an interactive session.
        registry.register(
            name.replace("ddp_", "ddp_notebook_"),
            strategy,
            description=f"{about}, for notebooks",
            override=True,
            hook=hook,
            start_method="fork",
        )
