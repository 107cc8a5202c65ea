"""A hook's state in a checkpoint."""
