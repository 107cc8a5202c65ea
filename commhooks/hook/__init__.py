"""The user's handle on an attached hook."""
