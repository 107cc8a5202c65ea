"""`CommHookDDP` for the Fabric of the package `lightning_fabric`, a part of `pytorch_lightning`; see fabric.py."""

from lightning_commhooks.class_factory import fabric_class

__all__ = ["CommHookDDP"]

CommHookDDP = fabric_class("lightning_fabric")
