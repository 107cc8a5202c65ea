"""Run the code of hooks without the modes of whoever calls it.

A hook is attached, loaded, saved and called inside the user's code: in `torch.inference_mode()`
while a framework validates, under autocast, with another default device or dtype. Learned state
that was created or moved in such a mode would keep it: a tensor made in inference mode can never be
changed in place outside of it. So every entry into a hook that may create or move tensors runs in
`plain_mode`. The default dtype is a setting of the process, not of the thread: tensors that are
created get their dtype explicitly.
"""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_mode() -> Iterator[None]:
    """Run the body without inference mode, grad mode, autocast and a default device.

    Also a decorator.
    """
    with contextlib.ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))  # switches grad mode on
        modes.enter_context(torch.no_grad())
        accelerator = torch.accelerator.current_accelerator()
        for device_type in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            available = torch.amp.is_autocast_available(device_type)
            if available and torch.is_autocast_enabled(device_type):
                modes.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        yield
