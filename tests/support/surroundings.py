"""What a task of a worker must leave as it found it: environment, settings, threads."""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

THREAD_GRACE_S = 2.0  # for threads that are about to end


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a task must leave as it found it."""

    environ: dict[str, str]
    settings: dict[str, Any]
    threads: frozenset[threading.Thread]
    log_handlers: tuple[logging.Handler, ...]

    @staticmethod
    def now() -> "Surroundings":
        return Surroundings(
            dict(os.environ),
            {name: get() for name, (get, _) in _SETTINGS.items()},
            frozenset(threading.enumerate()),
            tuple(logging.getLogger().handlers),
        )

    def restore(self) -> tuple[list[str], bool]:
        """Puts everything back; returns a sentence per leak and whether one of them could not be undone."""
        leaks = []
        now = dict(os.environ)
        for name in sorted(now.keys() | self.environ.keys()):
            if name in _SET_BY_TORCH:
                continue
            if now.get(name) != self.environ.get(name):
                leaks.append(f"environment variable {name}: {self.environ.get(name)!r} became {now.get(name)!r}")
                if name in self.environ:
                    os.environ[name] = self.environ[name]
                else:
                    del os.environ[name]
        for name, (get, put) in _SETTINGS.items():
            if get() != self.settings[name]:
                leaks.append(f"{name}: {self.settings[name]} became {get()}")
                put(self.settings[name])
        if tuple(logging.getLogger().handlers) != self.log_handlers:
            leaks.append("handlers of the root logger")
            logging.getLogger().handlers[:] = self.log_handlers
        left = list(self._threads_left())
        leaks += [f"non-daemon thread {thread.name!r}" for thread in left]
        return leaks, bool(left)

    def _threads_left(self) -> Iterator[threading.Thread]:
        deadline = time.monotonic() + THREAD_GRACE_S
        for thread in threading.enumerate():
            if thread not in self.threads and not thread.daemon:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    yield thread


_SET_BY_TORCH = (
    "TORCHINDUCTOR_CACHE_DIR",  # when an optimizer first imports inductor
    "CUDA_MODULE_LOADING",  # up to torch 2.11, when CUDA is first used
)
"""Environment variables that torch sets for good."""

# Name -> how to read it and how to put it back.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "autocast on CPU": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda enabled: torch.set_autocast_enabled("cpu", enabled),
    ),
    "working directory": (os.getcwd, os.chdir),
}
