"""Read pickles of `PowerSGDState` and config objects that commhooks 0.1 wrote before its modules moved into packages.

Such pickles refer to classes by their old modules. There, config classes are the current ones; removed classes are
placeholders, which hold the pickled attributes until `converted` turns them into the current form.
"""

import dataclasses
import importlib.machinery
import sys
import types
from typing import Any

from commhooks.comm.counters import Counters
from commhooks.compressors.cast import AllReduce, BF16Compress, FP16Compress
from commhooks.compressors.hook_config import HookConfig
from commhooks.compressors.noop import Noop
from commhooks.compressors.powersgd.options import BatchedPowerSGD, PowerSGD


class _OldObject:
    """Placeholder for a removed class: holds the pickled attributes."""


_GONE = {"memory": ("Memory",), "stats": ("Stats", "PassStats"), "clocks": ("Clocks", "Times")}
_CONFIGS = (HookConfig, AllReduce, FP16Compress, BF16Compress, Noop, PowerSGD, BatchedPowerSGD)
_NAMES = {"GivenNames": "ModelNames", "PlaceNames": "PositionalNames"}


def let_old_modules_be_found() -> None:
    """Register the old modules so that `pickle` can import them. They contain only the classes that pickles name."""
    found: dict[str, dict[str, type]] = {"config": {each.__name__: each for each in _CONFIGS}}
    found |= {module: {name: type(name, (_OldObject,), {}) for name in names} for module, names in _GONE.items()}
    for module, classes in found.items():
        stand_in = types.ModuleType(f"commhooks.{module}", "Stands in for a module of commhooks 0.1 in old pickles.")
        stand_in.__spec__ = importlib.machinery.ModuleSpec(stand_in.__name__, None)
        vars(stand_in).update(classes)
        sys.modules.setdefault(stand_in.__name__, stand_in)


def converted(saved: dict[str, Any]) -> dict[str, Any]:
    """Convert `saved`, the pickled state of an old `PowerSGDState`, to the current form."""
    if "memory" not in saved:
        return saved
    memory, options = vars(saved["memory"]), vars(saved["options"])
    counted = {f.name for f in dataclasses.fields(Counters)}
    return {
        # Pickles of even earlier versions lack newer options.
        "options": {f.name: options[f.name] for f in dataclasses.fields(PowerSGD) if f.name in options},
        "learned": {
            "step": memory["step"],
            "nonfinite_steps": memory.get("nonfinite_steps", 0),
            "entries": {"q": memory["q"], "residual": memory["residuals"]},
            "loss_scale": memory.get("loss_scale", 1.0),
            "local_missing": memory.get("residual_missing", False),
            "missing_was_said": memory.get("missing_was_said", False),
            "local_shared": memory.get("residuals_shared", False),
        },
        "counters": {
            name: value
            for name, value in vars(saved["stats"]).items()
            if name in counted and isinstance(value, (int, str))
        },
        "saved_on": saved["saved_on"],
        "names": _NAMES.get(saved["names"], saved["names"]),
    }


let_old_modules_be_found()
