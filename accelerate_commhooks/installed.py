"""Check that there is an Accelerate to work with."""

from commhooks.hook.supported import check_version


def check_accelerate() -> None:
    """Raise ImportError if Accelerate is missing or too old; the message says what to install."""
    try:
        import accelerate
    except ModuleNotFoundError as error:
        if error.name != "accelerate":
            raise
        raise ImportError("accelerate_commhooks needs Accelerate: pip install accelerate") from error
    check_version(accelerate)
