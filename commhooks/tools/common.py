"""Helpers of the commands: the user's code, options, the process group, a stopwatch."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from commhooks.comm.groups import GLOO_INTERFACE
from commhooks.errors import CommandError, HookConfigError
from commhooks.import_path import import_path
from commhooks.request import why_not_called


@contextlib.contextmanager
def user_code(path: str) -> Iterator[None]:
    """Context manager: run the user's code in the body as `python -m` would without arguments.

    The current folder is first in `sys.path`, which is restored afterwards. Raises HookConfigError
    if the code calls `sys.exit`, as `parse_args()` does if an argument is missing.
    """
    argv = sys.argv
    search_path = list(sys.path)
    sys.argv = [path.partition(":")[0]]
    sys.path.insert(0, os.getcwd())
    try:
        yield
    except SystemExit as error:
        raise HookConfigError(
            f"{path!r} has called sys.exit({error.code!r}) while it was imported or called. A"
            " script's own run, with its parse_args(), belongs under `if __name__ == '__main__':`"
        ) from error
    finally:
        sys.argv = argv
        sys.path[:] = search_path


def call(path: str) -> Any:
    with user_code(path):
        function = import_path(path, repr(path))
        if not callable(function) or isinstance(function, torch.nn.Module):
            raise HookConfigError(
                f"{path!r} is a {type(function).__name__}; expected a function that builds the"
                " model"
            )
        if reason := why_not_called(function):
            raise HookConfigError(
                f"{path!r} cannot be called without arguments ({reason}): write a function that"
                " builds the model"
            )
        return function()


def parse_options(texts: list[str]) -> dict[str, Any]:
    """Convert `["random_seed=1", "exclude=['*embed*']"]` to a dict. Values are YAML."""
    for text in texts:
        if not text.partition("=")[0].strip() or "=" not in text:
            raise HookConfigError(
                f"--options {text}: expected NAME=VALUE, for example matrix_approximation_rank=4"
            )
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(texts), resolve=True)
    except OmegaConfBaseException as error:
        raise HookConfigError(
            f"--options {' '.join(texts)}: {error.full_key}: {str(error).splitlines()[0]}"
        ) from None
    except YAMLError:
        raise HookConfigError(
            f"--options {' '.join(texts)}: a value is not YAML; quote text with special characters,"
            " and the whole for the shell: --options \"exclude=['*embed*']\""
        ) from None
    return dict(values)


@contextlib.contextmanager
def process_group(backend: str | None, example: str) -> Iterator[None]:
    """Context manager: use the existing process group, or make one of torchrun's ranks.

    On GPUs with the device of LOCAL_RANK. Raises CommandError if torchrun has started no ranks
    (`example` is a command that does), or `init_process_group` fails. `backend`: nccl, gloo; None:
    torch's choice.
    """
    if dist.is_initialized():
        yield
        return
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise CommandError(f"no process group: start this like the run, such as {example}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    try:
        dist.init_process_group(backend)
    except (AssertionError, ValueError, RuntimeError) as error:
        which = "" if backend is None else f" with backend {backend!r}"
        hint = f" ({GLOO_INTERFACE})" if backend in (None, "gloo") else ""
        raise CommandError(
            f"the ranks cannot make a process group{which}{hint}: {error}"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Measure the seconds of `work`, including everything that it queues on the device."""

    def synchronize() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began
