"""Attach hooks to DDP models, and `CommHook`, the user's handle on an attached hook."""
