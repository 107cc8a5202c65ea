"""The command `commhooks`."""
