"""Attach hooks to models in DDP and FSDP2, and `CommHook`, the user's handle on an attached
hook.
"""
