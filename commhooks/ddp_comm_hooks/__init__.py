"""Drop-in for `torch.distributed.algorithms.ddp_comm_hooks`: its modules, functions, defaults."""

from commhooks.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook

__all__ = ["debugging_hooks", "default_hooks", "powerSGD_hook"]
