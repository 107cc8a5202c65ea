"""Lightning's packages, for each of which there are strategies.

`lightning.pytorch` and `pytorch_lightning` have the same content, and each rejects instances of the
other's classes; so do `lightning.fabric` and `lightning_fabric`.
"""

from importlib import import_module
from typing import Any

from commhooks.errors import needed
from commhooks.hook.plugin_api import COMPRESSORS

MODULES = {
    "lightning.pytorch": "lightning_commhooks",
    "pytorch_lightning": "lightning_commhooks.pytorch_lightning",
}
"""Package with a Trainer -> module from which users import the classes for it."""
FABRIC_MODULES = {
    "lightning.fabric": "lightning_commhooks.fabric",
    "lightning_fabric": "lightning_commhooks.lightning_fabric",
}
_HOOKS = (
    "powerSGD",
    "batched_powerSGD",
    "fp16_compress",
    "bf16_compress",
    "int8_compress",
    "int4_compress",
    "auto",
)
"""The hooks for which a strategy name is registered."""


def check_installed(package: str) -> None:
    """Raise ImportError, with what to do, if `package` is missing or too old."""
    modules = MODULES if package in MODULES else FABRIC_MODULES
    root = package.partition(".")[0]
    twin = next(name for name in modules if name != package)
    install = f"pip install {root.replace('_', '-')}"
    sentence = (
        f"{modules[package]} needs {package}: {install}. For {twin} import from {modules[twin]}"
    )
    with needed(root, sentence=sentence):
        import_module(root)


def register_names(registry: Any, strategy: type) -> None:
    """Register the names for `Trainer(strategy=...)` with the registry of a package."""
    for hook in _HOOKS:
        if hook not in COMPRESSORS:  # it was taken out
            continue
        name = hook.lower()
        about = f"DDP with the communication hook {hook!r}"
        registry.register(f"ddp_{name}", strategy, description=about, override=True, hook=hook)
        # Interactive sessions can only fork, as with Lightning's own "ddp_notebook".
        notebook = {"description": f"{about}, for notebooks", "start_method": "fork"}
        registry.register(f"ddp_notebook_{name}", strategy, override=True, hook=hook, **notebook)
