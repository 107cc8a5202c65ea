"""Communication hooks for DistributedDataParallel: compressed gradients, saved and resumed with
your checkpoints.

    hook = commhooks.attach(ddp_model, commhooks.PowerSGD(matrix_approximation_rank=4))

The hooks are also drop-in replacements for `torch.distributed.algorithms.ddp_comm_hooks`, function
by function.
"""

import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from commhooks.public import *  # noqa: F403
    from commhooks.public import __all__ as __all__
else:

    def __getattr__(name):
        # torch takes seconds to import, and the commands need it only when they run.
        if not (name.startswith("__") and name != "__all__"):
            import commhooks.public  # noqa: F401

            # during a circular import it is not yet an attribute of commhooks
            public = sys.modules["commhooks.public"]
            globals().update((each, getattr(public, each)) for each in ("__all__", *public.__all__))
            if name in globals():  # the import also sets subpackages
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")} - {"TYPE_CHECKING", "sys"})
