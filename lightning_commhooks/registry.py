"""Names for `Trainer(strategy="...")`."""

from typing import Any

_HOOKS = ("powerSGD", "batched_powerSGD", "fp16_compress", "bf16_compress", "int8_compress", "int4_compress", "auto")


def register_strategy_names(registry: Any, strategy: type) -> None:
    """Register "ddp_powersgd" and so on with the `StrategyRegistry` of the package that `strategy`, a `CommHookDDP`,
    belongs to. A repeated call, as on a reload of a module, replaces the classes."""
    for hook in _HOOKS:
        name, about = hook.lower(), f"DDP with the communication hook {hook!r}"
        registry.register(f"ddp_{name}", strategy, description=about, override=True, hook=hook)
        # As Lightning's own "ddp_notebook": other ways to start processes do not work in an interactive session.
        registry.register(
            f"ddp_notebook_{name}",
            strategy,
            description=f"{about}, for notebooks",
            override=True,
            hook=hook,
            start_method="fork",
        )
