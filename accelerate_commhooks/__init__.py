"""commhooks for Hugging Face Accelerate: a communication hook that `save_state` and `load_state` carry along.

Accelerator(kwargs_handlers=[CommHookKwargs(hook="powerSGD")])
"""

try:
    import accelerate  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise ImportError('accelerate_commhooks needs Accelerate: pip install "commhooks[accelerate]"') from error

from accelerate_commhooks.handler import CommHookKwargs

__all__ = ["CommHookKwargs"]
