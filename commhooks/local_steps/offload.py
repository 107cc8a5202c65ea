"""Keep the anchor and the momentum in host memory while the weights are on an accelerator.

An outer step reads and writes each of them once in many steps, so they need no memory on the device
between outer steps. Copies run on a stream of their own, while other buffers are exchanged.
"""

from collections.abc import Iterable, Mapping

import torch

from commhooks.engine.streams import copying
from commhooks.gradients.precision import keep_for_current_stream


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into new host memory, pinned if there is an accelerator. The host waits for the
    copy.
    """
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, pin_memory=torch.accelerator.is_available()
    ).copy_(tensor)


def fetch(
    kept: Mapping[str, torch.Tensor], names: Iterable[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Copy the tensors with these names, if `kept` has them, to `device`. Call `wait_for_copies`
    before using the copies.
    """
    here = {}
    with copying(device, after_current=False):
        for name in names:
            if (value := kept.get(name)) is not None:
                copy = torch.empty(value.shape, dtype=value.dtype, device=device)
                here[name] = copy.copy_(value, non_blocking=True)
    keep_for_current_stream(here.values())
    return here


def put_back(
    values: Mapping[str, torch.Tensor], kept: dict[str, torch.Tensor], device: torch.device
) -> None:
    """Copy `values`, on `device`, into the host tensors in `kept`, adding tensors for missing
    names. The host does not wait: call `wait_for_copies` before `HeldState.committing` ends.
    """
    for name in values.keys() - kept.keys():
        kept[name] = to_host(torch.zeros_like(values[name], device="cpu"))
    with copying(device, after_current=True):
        for name, value in values.items():
            kept[name].copy_(value, non_blocking=True)
        keep_for_current_stream(values.values())
