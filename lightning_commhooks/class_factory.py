"""Makes the strategies and callbacks for each of Lightning's packages.

`lightning.pytorch` and `pytorch_lightning` have the same content, and each rejects instances of the other's classes; so
do `lightning.fabric` and `lightning_fabric`. The other modules here import none of the four packages: a strategy or
callback gets its base class here, once per package.
"""

import functools
from importlib import import_module
from typing import Any

from commhooks.errors import needed
from lightning_commhooks.callbacks import CommHookCheckpoint, CommHookMonitor, CommHookRoundEnd
from lightning_commhooks.fabric_strategy import CommHookDDP as FabricCommHookDDP
from lightning_commhooks.fsdp2 import CommHookFSDP2
from lightning_commhooks.strategy import MODULES, CommHookDDP

FABRIC_MODULES = {
    "lightning.fabric": "lightning_commhooks.fabric",
    "lightning_fabric": "lightning_commhooks.lightning_fabric",
}
_HOOKS = ("powerSGD", "batched_powerSGD", "fp16_compress", "bf16_compress", "int8_compress", "int4_compress", "auto")
"""The hooks for which a strategy name is registered."""


@functools.cache
def trainer_classes(package: str) -> dict[str, Any]:
    """Make the strategies and callbacks for the Trainer of `package` ("lightning.pytorch" or "pytorch_lightning"), and
    register the strategy names there. Raises ImportError if the package is not installed, or too old."""
    lightning = _imported(package, MODULES)
    strategies: Any = import_module(f"{package}.strategies")
    make = functools.partial(_with_base, MODULES[package])
    checkpoint = make(CommHookCheckpoint, lightning.Callback)
    round_end = make(CommHookRoundEnd, lightning.Callback)
    attributes = {"package": package, "checkpoint_callback": checkpoint, "round_end_callback": round_end}
    ddp = make(CommHookDDP, strategies.DDPStrategy, **attributes)
    fsdp2 = make(CommHookFSDP2, strategies.ModelParallelStrategy, **attributes)
    _register_names(strategies.StrategyRegistry, ddp)
    made = [checkpoint, round_end, ddp, fsdp2, make(CommHookMonitor, lightning.Callback)]
    return {each.__name__: each for each in made}


@functools.cache
def fabric_class(package: str) -> Any:
    """Make the strategy for the Fabric of `package`, "lightning.fabric" or "lightning_fabric"; see
    `trainer_classes`."""
    _imported(package, FABRIC_MODULES)
    strategies: Any = import_module(f"{package}.strategies")
    return _with_base(FABRIC_MODULES[package], FabricCommHookDDP, strategies.DDPStrategy)


def _with_base(module: str, cls: type, base: type, **attributes: Any) -> type:
    return type(cls.__name__, (cls, base), {"__module__": module, "__doc__": cls.__doc__, **attributes})


def _imported(package: str, modules: dict[str, str]) -> Any:
    root = package.partition(".")[0]
    other = next(each for each in modules if each != package)
    install = f"pip install {root.replace('_', '-')}"
    sentence = f"{modules[package]} needs {package}: {install}. For {other} import from {modules[other]}"
    with needed(root, sentence=sentence):
        import_module(root)
    return import_module(package)


def _register_names(registry: Any, strategy: type) -> None:
    for hook in _HOOKS:
        name, about = hook.lower(), f"DDP with the communication hook {hook!r}"
        registry.register(f"ddp_{name}", strategy, description=about, override=True, hook=hook)
        # Interactive sessions can only fork, as with Lightning's own "ddp_notebook".
        notebook = {"description": f"{about}, for notebooks", "start_method": "fork"}
        registry.register(f"ddp_notebook_{name}", strategy, override=True, hook=hook, **notebook)
