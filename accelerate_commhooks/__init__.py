"""commhooks for Hugging Face Accelerate: a handler of DDP arguments with a communication hook.

    Accelerator(kwargs_handlers=[CommHookKwargs(hook="powerSGD")])

`save_state` and `load_state` include the learned state of the hook; no further calls are needed.
"""

try:
    import accelerate
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise ImportError('accelerate_commhooks needs Accelerate: pip install "commhooks[accelerate]"') from error

from commhooks.hook.for_plugins import check_version

check_version(accelerate)

from accelerate_commhooks.handler import CommHookKwargs  # noqa: E402

__all__ = ["CommHookKwargs"]
