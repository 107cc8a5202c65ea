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
    from commhooks.features import *  # noqa: F403
    from commhooks.public import *  # noqa: F403
else:

    def __getattr__(name):
        # torch takes seconds to import, and the commands need it only when they run.
        if not (name.startswith("__") and name != "__all__"):
            import commhooks.features
            import commhooks.public  # noqa: F401

            # during a circular import they are not yet attributes of commhooks
            public = vars(sys.modules["commhooks.public"])
            features = vars(sys.modules["commhooks.features"])
            names = {public_name: public[public_name] for public_name in public["__all__"]}
            names |= {key: value for key, value in features.items() if not key.startswith("_")}
            globals().update(names, __all__=sorted(names))
            if name in globals():  # the import also sets subpackages
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")} - {"TYPE_CHECKING", "sys"})
