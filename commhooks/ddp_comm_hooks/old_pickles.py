"""Pickles of `PowerSGDState` that commhooks 0.1 made before its modules moved into packages.

They name classes by the modules in which these were defined then. The classes here stand in for them while such a
pickle is read, and `converted` makes what is written today of what was read.
"""

import dataclasses
import sys
import types
from typing import Any


class _OldObject:
    """Takes whatever attributes were pickled."""


def _old(name: str) -> type[_OldObject]:
    return type(name, (_OldObject,), {})


_CLASSES = {
    "config": ("PowerSGD", "BatchedPowerSGD"),
    "memory": ("Memory",),
    "stats": ("Stats", "PassStats"),
    "clocks": ("Clocks", "Times"),
}
_NAMES = {"GivenNames": "ModelNames", "PlaceNames": "PositionalNames"}


def let_old_modules_be_found() -> None:
    """Let `pickle` import the modules of then. Nothing else finds anything in them."""
    for module, classes in _CLASSES.items():
        stand_in = types.ModuleType(f"commhooks.{module}", "Stands in for a module of commhooks 0.1 in old pickles.")
        for name in classes:
            setattr(stand_in, name, _old(name))
        sys.modules.setdefault(stand_in.__name__, stand_in)


def converted(saved: dict[str, Any]) -> dict[str, Any]:
    """`saved`, the state of a pickled `PowerSGDState`, as it is written today."""
    if "memory" not in saved:
        return saved
    from commhooks.comm.counters import Counters
    from commhooks.compressors.powersgd.config import PowerSGD

    memory, options = vars(saved["memory"]), vars(saved["options"])
    p_is_newer = memory.get("p_is_newer", set())
    counted = {f.name for f in dataclasses.fields(Counters)}
    return {
        # One that was pickled by an even earlier version lacks the options that are newer.
        "options": {f.name: options[f.name] for f in dataclasses.fields(PowerSGD) if f.name in options},
        "learned": {
            "step": memory["step"],
            "nonfinite_steps": memory.get("nonfinite_steps", 0),
            "entries": {
                # Of two factors that alternate, the newer one is kept.
                "q": {name: q for name, q in memory["q"].items() if name not in p_is_newer},
                "p": {name: p for name, p in memory.get("p", {}).items() if name in p_is_newer},
                "residual": memory["residuals"],
            },
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
