"""commhooks for Hugging Face Accelerate: the handler of DDP arguments with a communication hook.

    Accelerator(kwargs_handlers=[CommHookKwargs(hook="powerSGD")])

`save_state` and `load_state` include the learned state of the hook; no further calls are needed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate_commhooks.handler import CommHookKwargs

__all__ = ["CommHookKwargs"]


def __getattr__(name: str) -> Any:
    # Accelerate and torch take seconds to import; the command needs them only when it runs.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_accelerate()
    from accelerate_commhooks.handler import CommHookKwargs

    return CommHookKwargs


def check_accelerate() -> None:
    """Raise ImportError with the command to install Accelerate if it is missing or too old."""
    from commhooks.errors import needed

    with needed(
        "accelerate", sentence="accelerate_commhooks needs Accelerate: pip install accelerate"
    ):
        import accelerate  # noqa: F401


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
