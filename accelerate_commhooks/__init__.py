"""commhooks for Hugging Face Accelerate: a communication hook that `save_state` and `load_state` carry along.

Accelerator(kwargs_handlers=[CommHookKwargs(hook="powerSGD")])
"""

from importlib.util import find_spec

if find_spec("accelerate") is None:
    raise ImportError('accelerate_commhooks needs Accelerate: pip install "commhooks[accelerate]"')

from accelerate_commhooks.handler import CommHookKwargs

__all__ = ["CommHookKwargs"]
