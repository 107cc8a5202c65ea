"""Runs a script of `accelerate.test_utils.scripts` with a hook of ours in every Accelerator.

    torchrun --nproc_per_node 2 tests/peers/accelerate_peer.py test_sync

The scripts make accelerators without arguments, so the class that they import is replaced by one
that adds a `CommHookKwargs`. Where a script asks for one of torch's hooks, it gets ours of the same
name. Without COMMHOOKS_PEERS_HOOK nothing of this happens.
"""

import dataclasses
import importlib
import sys
from typing import Any

import accelerate
import peer_hooks
import torch
from accelerate import DistributedDataParallelKwargs, DistributedType
from accelerate.utils import DDPCommunicationHookType
from torch.nn.parallel import DistributedDataParallel

from accelerate_commhooks import CommHookKwargs

FOR_GPUS = {"test_ddp_comm_hook"}
"""Scripts that wrap a model for the GPU of their rank, and need nothing else of a GPU."""
LEFT_OUT = {
    "test_distributed_data_loop": [
        "test_can_join_uneven_inputs",
        "test_join_can_override_even_batches",
        "test_join_can_override_for_mixed_type_dataloaders",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches",
        "test_stateful_dataloader",
        "test_stateful_dataloader_save_state",
    ]
}
"""Parts that hang or fail here with a hook and without: Accelerate 1.15 joins uneven inputs on GPUs
only, and the stateful loaders, which know nothing of hooks, need torchdata.
"""


class _Recorded(CommHookKwargs):
    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        super().register_comm_hook(model)
        if (hook := self.attached) is not None:
            peer_hooks.keep(hook)


class HookedAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An Accelerator whose handler of DDP arguments is ours."""

    def __init__(self, *args: Any, kwargs_handlers: Any = None, **options: Any) -> None:
        handlers = [_ours(handler) for handler in kwargs_handlers or ()]
        if not any(isinstance(handler, DistributedDataParallelKwargs) for handler in handlers):
            handlers.append(_Recorded(hook=peer_hooks.config()))
        super().__init__(*args, kwargs_handlers=handlers, **options)


def _ours(handler: Any) -> Any:
    """Our handler with the fields of a stock one that asks for a hook; anything else as it is."""
    if (
        type(handler) is not DistributedDataParallelKwargs
        or handler.comm_hook == DDPCommunicationHookType.NO
    ):
        return handler
    return _Recorded(
        **{field.name: getattr(handler, field.name) for field in dataclasses.fields(handler)}
    )


class CPUModel(DistributedDataParallel):
    """DDP without the device ids that a script for GPUs gives."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **{**options, "device_ids": None, "output_device": None})


def main(script: str) -> None:
    """Run `script` on this rank."""
    if peer_hooks.NAME:
        accelerate.Accelerator = accelerate.accelerator.Accelerator = HookedAccelerator
    if script in FOR_GPUS:
        torch.nn.parallel.DistributedDataParallel = CPUModel  # type: ignore[misc]
    state = accelerate.PartialState(cpu=True)
    if (state.distributed_type, state.num_processes) != (DistributedType.MULTI_CPU, 2):
        raise SystemExit(
            f"expected two CPU ranks, found {state.num_processes} and {state.distributed_type}"
        )
    peer = importlib.import_module(f"accelerate.test_utils.scripts.{script}")
    for name in LEFT_OUT.get(script, ()):
        setattr(peer, name, lambda *_: None)
    peer.main()


if __name__ == "__main__":
    # As a module with a name, in which pickles find what it defines.
    import accelerate_peer

    accelerate_peer.main(sys.argv[1])
