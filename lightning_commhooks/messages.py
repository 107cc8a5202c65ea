"""Warnings of rank 0 that say where they come from."""

from lightning_utilities.core.rank_zero import rank_zero_warn

from commhooks.errors import WARNING_PREFIX


def warn(text: str) -> None:
    """Warn on rank 0."""
    rank_zero_warn(f"{WARNING_PREFIX}{text}", stacklevel=5)  # 4 and this function
